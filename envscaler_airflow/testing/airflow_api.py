"""A client of Airflow's public REST API with the calls that tests and the demo need."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

T = TypeVar("T")

DONE = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""Task states that change only when a user clears the task."""

_RETRIES = 10
_RETRY_S = 0.5
"""How often a request is retried after SQLite refused its transaction. Chosen: writers lock it for less."""


class AirflowApi:
    """Calls ``/api/v2`` of one Airflow whose simple auth manager admits every user as admin."""

    def __init__(self, url: str) -> None:
        """Store *url*, such as ``http://127.0.0.1:8080``; nothing is called yet."""
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=30)
        self._token: str | None = None
        self._writing = threading.Lock()

    def close(self) -> None:
        """Close the connections; later calls fail."""
        self._client.close()

    def health(self) -> dict[str, str | None]:
        """Status of ``metadatabase``, ``scheduler``, ``triggerer`` and ``dag_processor``."""
        answer = self._client.get("/api/v2/monitor/health", timeout=5)
        answer.raise_for_status()
        return {name: part["status"] for name, part in answer.json().items()}

    def call(self, method: str, path: str, *, body: Any = None, **query: Any) -> Any:
        """JSON answer of one request below ``/api/v2``, with a token; None when it is empty.

        The request is retried while another service locks SQLite: it then had no effect.

        Raises:
            httpx.HTTPStatusError: Any answer but 2xx; the body's detail is in its notes.
        """
        answer = self._send(method, path, body, query)
        for _ in range(_RETRIES):
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                self._token = None
            elif not _is_locked(answer):
                break
            else:
                time.sleep(_RETRY_S)
            answer = self._send(method, path, body, query)
        try:
            answer.raise_for_status()
        except httpx.HTTPStatusError as err:
            err.add_note(answer.text[:2000])
            raise
        return answer.json() if answer.content else None

    def wait(self, ask: Callable[[], T | None], *, timeout_s: float, what: str, every_s: float = 0.5) -> T:
        """The first true result of *ask*. A server that takes too long counts as no answer yet.

        Raises:
            TimeoutError: There was none within *timeout_s*; names *what* was waited for.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            answer: T | httpx.TimeoutException | None
            try:
                if answer := ask():
                    return answer
            except httpx.TimeoutException as err:
                answer = err
            if time.monotonic() > give_up:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s; last answer {answer!r}")
            time.sleep(every_s)

    def wait_for_dag(self, dag_id: str, *, timeout_s: float = 60) -> None:
        """Return once the dag processor has stored *dag_id*.

        Raises:
            RuntimeError: A DAG file cannot be imported; its traceback is in the message.
            TimeoutError: No such DAG within *timeout_s*.
        """

        def is_known() -> bool:
            try:
                self.call("GET", f"/dags/{_part(dag_id)}/details")
            except httpx.HTTPStatusError as err:
                if err.response.status_code != httpx.codes.NOT_FOUND:
                    raise
                if faults := self.import_errors():
                    raise RuntimeError("\n".join(faults)) from err
                return False
            return True

        self.wait(is_known, timeout_s=timeout_s, what=f"DAG {dag_id}")

    def import_errors(self) -> list[str]:
        """File and traceback of each DAG file that cannot be imported."""
        found = self.call("GET", "/importErrors")["import_errors"]
        return [f"{item['filename']}: {item['stack_trace']}" for item in found]

    def trigger_dag(
        self,
        dag_id: str,
        *,
        run_id: str | None = None,
        conf: Mapping[str, Any] | None = None,
        timeout_s: float = 60,
    ) -> str:
        """Start a DAG run, once the DAG is known, and return its run_id. *conf* sets params."""
        self.wait_for_dag(dag_id, timeout_s=timeout_s)
        body: dict[str, Any] = {"logical_date": None, "conf": dict(conf or {})}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return str(self.call("POST", f"/dags/{_part(dag_id)}/dagRuns", body=body)["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """``queued``, ``running``, ``success`` or ``failed``."""
        return str(self.call("GET", _run(dag_id, run_id))["state"])

    def wait_for_run(self, dag_id: str, run_id: str, *, timeout_s: float = 120) -> str:
        """The final state of a DAG run."""

        def final_state() -> str | None:
            state = self.run_state(dag_id, run_id)
            return state if state in ("success", "failed") else None

        return self.wait(final_state, timeout_s=timeout_s, what=f"end of {dag_id} {run_id}")

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Every task instance of a DAG run as the API shows it, mapped ones each."""
        answer = self.call("GET", f"{_run(dag_id, run_id)}/taskInstances", limit=100)
        return list(answer["task_instances"])

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """State of each task, ``train`` or ``train[3]`` when it is mapped; None before it is scheduled."""
        return {
            task["task_id"] + (f"[{task['map_index']}]" if task["map_index"] >= 0 else ""): task["state"]
            for task in self.tasks(dag_id, run_id)
        }

    def task(self, dag_id: str, run_id: str, task_id: str, *, map_index: int = -1) -> dict[str, Any]:
        """One task instance as the API shows it: id, state, try_number, pid, rendered_fields, trigger, ..."""
        answer = self.call("GET", _task(dag_id, run_id, task_id) + _mapped(map_index))
        return dict(answer)

    def wait_for_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        states: str | Collection[str] = DONE,
        *,
        timeout_s: float = 120,
        map_index: int = -1,
    ) -> dict[str, Any]:
        """The task instance, once its state is one of *states*."""
        wanted = {states} if isinstance(states, str) else set(states)

        def arrived() -> dict[str, Any] | None:
            task = self.task(dag_id, run_id, task_id, map_index=map_index)
            return task if task["state"] in wanted else None

        try:
            return self.wait(arrived, timeout_s=timeout_s, what=f"{dag_id} {run_id} {task_id} in {wanted}")
        except TimeoutError as err:
            err.add_note(f"states now: {self.task_states(dag_id, run_id)}")
            raise

    def logs(
        self, dag_id: str, run_id: str, task_id: str, *, try_number: int = 1, map_index: int = -1
    ) -> list[str]:
        """Lines of one try's log, including the trigger's, oldest first."""
        path = f"{_task(dag_id, run_id, task_id)}/logs/{try_number}"
        content = self.call("GET", path, full_content=True, map_index=map_index)["content"]
        return [_line(item) for item in content]

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str, *, map_index: int = -1) -> None:
        """The action "Mark as failed" or "Mark as success" of the UI."""
        path = _task(dag_id, run_id, task_id) + _mapped(map_index)
        self.call("PATCH", path, body={"new_state": state})

    def clear(self, dag_id: str, run_id: str, task_ids: Collection[str], *, downstream: bool = False) -> None:
        """The action "Clear" of the UI, in any state of the tasks.

        If all of them have ended, it waits until the run has too: a scheduler that is about to end the run
        would otherwise do so after the clear, and a cleared task of an ended run never starts.
        """

        def is_settled() -> bool:
            return self.run_state(dag_id, run_id) in ("success", "failed") or not all(
                state in DONE for state in self.task_states(dag_id, run_id).values()
            )

        self.wait(is_settled, timeout_s=60, what=f"end of {dag_id} {run_id}, whose tasks have ended")
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "only_failed": False,
            "reset_dag_runs": True,
            "include_downstream": downstream,
        }
        self.call("POST", f"/dags/{_part(dag_id)}/clearTaskInstances", body=body)

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """The action "Mark Dag Run as ..." of the UI: its unfinished tasks get a final state too."""
        self.call("PATCH", _run(dag_id, run_id), body={"state": state})

    def delete_dag_run(self, dag_id: str, run_id: str) -> None:
        """Delete a DAG run with its task instances; Airflow refuses while it is running."""
        self.call("DELETE", _run(dag_id, run_id))

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", *, map_index: int = -1
    ) -> Any:
        """The value; None when there is none with that key."""
        path = f"{_task(dag_id, run_id, task_id)}/xcomEntries/{_part(key)}"
        try:
            return self.call("GET", path, map_index=map_index)["value"]
        except httpx.HTTPStatusError as err:
            if err.response.status_code == httpx.codes.NOT_FOUND:
                return None
            raise

    def _send(self, method: str, path: str, body: Any, query: Mapping[str, Any]) -> httpx.Response:
        if self._token is None:
            answer = self._client.get("/auth/token")
            answer.raise_for_status()
            self._token = str(answer.json()["access_token"])
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        # Airflow logs a write on its event loop, which blocks until another request's transaction ends; that
        # one ends on the same loop, so both wait until SQLite gives up. One write at a time of ours avoids
        # most of it.
        with self._writing if method != "GET" else contextlib.nullcontext():
            return self._client.request(method, f"/api/v2{path}", json=body, params=query, headers=headers)


def _is_locked(answer: httpx.Response) -> bool:
    return answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR and "Database error" in answer.text


def _part(name: str) -> str:
    return quote(name, safe="")


def _run(dag_id: str, run_id: str) -> str:
    return f"/dags/{_part(dag_id)}/dagRuns/{_part(run_id)}"


def _task(dag_id: str, run_id: str, task_id: str) -> str:
    return f"{_run(dag_id, run_id)}/taskInstances/{_part(task_id)}"


def _mapped(map_index: int) -> str:
    return f"/{map_index}" if map_index >= 0 else ""


def _line(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    rest = {key: value for key, value in item.items() if key in ("error_detail", "exc_info") and value}
    return str(item.get("event", "")) + (f" {json.dumps(rest, default=str)}" if rest else "")
