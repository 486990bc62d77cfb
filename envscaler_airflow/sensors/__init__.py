"""Airflow sensors: they look, and ask the owner."""
