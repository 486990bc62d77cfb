"""The owner's side of a run: the one place that acts, and the watching and asking beside it."""
