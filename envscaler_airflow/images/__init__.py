"""From a spec to what runs it: renderings, images, locks, and the registry of shared specs.

Rendering is pure: files of the user are read by ``sources`` and handed over as text.
"""
