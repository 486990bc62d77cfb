"""A DAG without envscaler: shows that the Airflow of the session works."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import DAG, BaseOperator


class Defers(BaseOperator):
    """Defers for ``params.seconds`` and pushes the data of the event.

    Use at least about 3 s: the scheduler fails a task that is queued again before the executor has reported
    the end of the previous execution (Airflow 3.3.2).
    """

    def execute(self, context: Any) -> None:
        """Defer once."""
        self.log.info("before the deferral")
        self.defer(
            trigger=TimeDeltaTrigger(timedelta(seconds=context["params"]["seconds"])), method_name="resumed"
        )

    def resumed(self, context: Any, event: Any) -> str:
        """Return the data of the event."""
        self.log.info("after the deferral")
        return "resumed"


with DAG("plain", schedule=None, params={"seconds": 4}):
    Defers(task_id="defers", retries=0)
