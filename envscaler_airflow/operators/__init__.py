"""Airflow operators: the owner of a run."""
