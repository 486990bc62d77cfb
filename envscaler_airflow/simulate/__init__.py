"""Apply the scaling decisions to public traces, measured trainings and recorded runs."""
