"""The same decisions on public traces, measured trainings and recorded runs."""
