"""``python -m envscaler_airflow.cli``."""

from envscaler_airflow.cli import main

main()
