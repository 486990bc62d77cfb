"""Airflow provider for machine-learning stages."""
