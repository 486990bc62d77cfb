"""A simulation of the whole: real owner, operator, trigger and sidecar code, in a world driven by a seed."""
