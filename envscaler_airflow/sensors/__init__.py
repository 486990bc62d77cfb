"""Airflow sensors: they observe, and send requests to the owner."""
