"""Stop an execution at certain points, or lose it before it starts, in the worker's process alone.

A gate is a file ``<E2E_GATES>/<run_id>.<point>``; while the file exists, the execution waits there.
``before`` and ``after`` are right before and right after the call of the backend, ``delivered`` is right
after the delivery. ``asleep`` stops the next try before its execution; later tries pass. ``unanswered`` is
not a gate: the backend starts the requested attempt, its answer is lost, and the file is removed. ``lost`` is
not a gate either: the process of the next try ends before its execution starts, and removes the file.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from envscaler_airflow import EnvStageOperator
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import Handle

GATES = Path(os.environ.get("E2E_GATES", "/nonexistent"))
submit = LocalBackend.submit
deliver = EnvStageOperator._deliver


def wait_at(point: str, run_id: str) -> None:
    """Record that the execution reached the point, and wait there while its gate exists."""
    gate = GATES / f"{run_id}.{point}"
    if gate.exists():
        gate.with_suffix(f".{point}.reached").touch()
    while gate.exists():
        time.sleep(0.05)


def held_submit(self: Any, request: AttemptRequest) -> Handle:
    """Submit between the two gates."""
    run_id = request.run_prefix.split("/")[2]
    wait_at("before", run_id)
    handle = submit(self, request)
    wait_at("after", run_id)
    gate = GATES / f"{run_id}.unanswered"
    if gate.exists():
        gate.unlink()
        raise BackendError("the API server does not answer", status=503, transient=True)
    return handle


def held_deliver(self: Any, context: Any, *arguments: Any) -> Any:
    """Deliver; Airflow gets the result only once the gate is open."""
    result = deliver(self, context, *arguments)
    wait_at("delivered", context["run_id"])
    return result


def lose(context: Any) -> None:
    """End this process as a failing machine would, or stop it, where the test asks for it."""
    gate = GATES / f"{context['run_id']}.asleep"
    if gate.exists():
        reached = gate.rename(gate.with_suffix(".asleep.reached"))
        while reached.exists():
            time.sleep(0.05)
    mark = GATES / f"{context['run_id']}.lost"
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Install the gates."""
    LocalBackend.submit = held_submit
    EnvStageOperator._deliver = held_deliver
