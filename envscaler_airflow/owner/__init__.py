"""The owner's side of a run: the one place that acts, and the code that watches and sends requests."""
