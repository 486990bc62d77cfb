"""Airflow hooks: they turn connections and settings into objects that the other packages take."""
