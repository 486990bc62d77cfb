"""What Airflow loads through the ``airflow.plugins`` entry point."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from envscaler_airflow.operators.stage import RunStoreLink

PREFIX = "/envscaler"
"""Path prefix of the page on the API server."""


class PageApp:
    """The page as an ASGI application, created at its first request.

    Airflow loads plugins in all its processes; only the API server serves the page.
    """

    _app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if self._app is None:
            from envscaler_airflow.plugin.app import make_app  # noqa: PLC0415 - see above

            self._app = make_app()
        await self._app(scope, receive, send)


class EnvScalerPlugin(AirflowPlugin):
    """Adds the run store's link to stages, and a page about its training to each task instance."""

    name = "envscaler"
    operator_extra_links = [RunStoreLink()]  # noqa: RUF012  (Airflow's base declares all three so)
    fastapi_apps = [{"app": PageApp(), "url_prefix": PREFIX, "name": "envscaler"}]  # noqa: RUF012  (same)
    external_views = [  # noqa: RUF012  (same)
        {
            "name": "Training",
            # Relative to [api] base_url. Airflow fills in the braces, each encoded.
            "href": f"{PREFIX[1:]}/dags/{{DAG_ID}}/training"
            "?run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}",
            "destination": "task_instance",
            "url_route": "envscaler-training",
        }
    ]
