"""Airflow hooks: connections and settings become objects that the rooms below take."""
