"""Airflow's own state of a stage's task, requested from a worker or a triggerer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowRuntimeError

from envscaler_airflow.errors import BackendError

if TYPE_CHECKING:
    from envscaler_airflow.store.keys import RunKey

OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States that a task leaves only by a clear."""


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int | None) -> str | None:
    """Return Airflow's state of a task; ``removed`` if it was deleted with its DAG run. Blocks."""
    states = list(task_states(dag_id, run_id, task_id, map_index).values())
    return states[0] if states else "removed"


def task_states(dag_id: str, run_id: str, task_id: str, map_index: int | None) -> dict[str, str | None]:
    """Return Airflow's state of a task by map index, all of them for None; empty if deleted. Blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance  # noqa: PLC0415  (slow to load)

    found = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, run_ids=[run_id], task_ids=[task_id], map_index=map_index
    )
    return dict(found.get(run_id, {}))


def why_over(key: RunKey) -> str | None:
    """Return why the run's task will not return to it; None if it may, or if the run has no task.

    Raises:
        BackendError: Airflow does not answer now.
    """
    from envscaler_airflow.store.keys import SHELL_DAG  # noqa: PLC0415  (triggers do without)

    if key.dag_id == SHELL_DAG:
        return None
    with _translated(key):
        state = task_state(key.dag_id, key.run_id, key.task_id, key.map_index)
    return f"its task is {state} in Airflow" if state in OVER else None


def why_gone(key: RunKey) -> str | None:
    """Return why the run's task cannot be cleared any more; None if it can, or if the run has no task.

    Raises:
        BackendError: Airflow does not answer now.
    """
    from envscaler_airflow.store.keys import SHELL_DAG  # noqa: PLC0415  (triggers do without)

    if key.dag_id == SHELL_DAG:
        return None
    with _translated(key):
        found = task_states(key.dag_id, key.run_id, key.task_id, key.map_index)
    return None if found else "its DAG run was deleted in Airflow"


@contextmanager
def _translated(key: RunKey) -> Iterator[None]:
    """Raise Airflow's own error as the one that owners handle: unknown is not over."""
    try:
        yield
    except AirflowRuntimeError as err:
        where = f"task {key.task_id} of {key.dag_id}, run {key.run_id}"
        raise BackendError(f"{where}: Airflow does not report its state: {err}", transient=True) from err
