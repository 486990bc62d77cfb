"""Backends behind one seam: local, kubernetes and vm, found by name."""
