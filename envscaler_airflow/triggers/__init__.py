"""Airflow triggers: they observe, and return exactly one event."""
