"""Hold a slice right before and right after the backend is called, in the worker's process alone.

A gate is a file ``<E2E_GATES>/<run_id>.before`` or ``.after``; while it stands, the slice waits there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest, Handle
from envscaler_airflow.backends.local import LocalBackend

GATES = Path(os.environ.get("E2E_GATES", "/nonexistent"))
submit = LocalBackend.submit


def wait_at(point: str, request: AttemptRequest) -> None:
    """Say that the point was reached, and wait there while its gate stands."""
    gate = GATES / f"{request.run_prefix.split('/')[2]}.{point}"
    if gate.exists():
        gate.with_suffix(f".{point}.reached").touch()
    while gate.exists():
        time.sleep(0.05)


def held_submit(self: Any, request: AttemptRequest) -> Handle:
    """Submit between the two gates."""
    wait_at("before", request)
    handle = submit(self, request)
    wait_at("after", request)
    return handle


def install() -> None:
    """Put the gates around the local backend's submit."""
    LocalBackend.submit = held_submit
