"""What Airflow loads by the ``airflow.plugins`` entry point."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from envscaler_airflow.operators.links import RunStoreLink


class EnvScalerPlugin(AirflowPlugin):
    """Adds the run store's link to stages."""

    name = "envscaler"
    operator_extra_links = [RunStoreLink()]  # noqa: RUF012  (Airflow's base declares it so)
