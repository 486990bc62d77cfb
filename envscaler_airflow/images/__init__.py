"""From a spec to what runs it: renderings, images, locks, and the registry of shared specs.

Rendering is pure: ``sources`` reads the user's files and passes them on as text.
"""
