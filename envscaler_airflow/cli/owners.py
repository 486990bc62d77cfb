"""Who owns a run, and whether that process still watches it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.backends.base import Backend, HasAddress
from envscaler_airflow.backends.local.machine import Identity, this_identity
from envscaler_airflow.backends.local.processes import ProcessId
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.local_files import user_name
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import RunState
from envscaler_airflow.store.keys import SHELL_DAG
from envscaler_airflow.store.lease import LEASE, MAX_LEASE_BYTES, RENEW_EVERY_S
from envscaler_airflow.store.run import Run

OWNER = "lease/owner.json"
"""Which process of which machine owns a run from a shell."""
MAX_OWNER_BYTES = 1 << 14
"""Largest such file read, bytes. Chosen: ours have 500."""
SILENT_S = 3 * RENEW_EVERY_S + 10.0
"""Age of a lease beyond which no process renews it, seconds. Chosen: three renewals that did not come."""

Presence = Literal["there", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Ownership:
    """What is known of the owner of a run.

    Attributes:
        name: As shown: ``ana@build-3:4711`` (its process), ``Airflow, try 2``, ``-``.
        presence: ``there`` while a process watches the run; ``gone`` when it is known that none does.
        why: How that is known; "" where it is not.
        is_by_age: True when it is known from the age of the lease, not from the process itself.
    """

    name: str
    presence: Presence
    why: str = ""
    is_by_age: bool = False


def write_owner(run: Run, ti_id: str, backend: Backend) -> None:
    """Say that this process owns *run* as *ti_id*, on *backend*.

    Raises:
        StoreError: The store cannot be written.
    """
    process = ProcessId.of(os.getpid())
    body = {
        "schema": SCHEMA,
        "ti_id": ti_id,
        "user": user_name(),
        "machine": this_identity().to_dict(),
        "process": None if process is None else process.to_dict(),
        "backend": backend.name,
        "address": backend.address() if isinstance(backend, HasAddress) else {},
    }
    run.write(OWNER, json.dumps(body).encode())


def address_of(run: Run, backend: str) -> dict[str, Any]:
    """Where the last shell that owned the run reached *backend*; {} where that is not known.

    Raises:
        StoreError: The store cannot be read.
    """
    body = _written(run) or {}
    found = body.get("address") if body.get("backend") == backend else None
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def is_of_shell(run: Run) -> bool:
    """True for a run that was started without Airflow."""
    return run.prefix.split("/")[1:2] == [SHELL_DAG]


def owner_of(run: Run, state: RunState) -> Ownership:
    """Who owns the run, and whether that process is there.

    On the machine of a shell that owns it, by its process; elsewhere by the age of the lease on the store's
    own clock. Where the store reports no dates it is unknown.

    Raises:
        StoreError: The store cannot be read.
    """
    body = _written(run)
    is_shell = is_of_shell(run)
    if is_shell and body is not None and (state.owner is None or body["ti_id"] == state.owner.ti_id):
        return _of_shell(run, body)
    if state.owner is None:
        return Ownership("-", "gone" if body is None else "unknown", "no process has taken it")
    name = "a shell" if is_shell else f"Airflow, try {state.owner.try_number}"
    return _by_lease(run, name)


def _written(run: Run) -> dict[str, Any] | None:
    try:
        body = read_object(run.read(OWNER, max_bytes=MAX_OWNER_BYTES) or b"", where=OWNER)
    except ProtocolError:
        return None
    return body if isinstance(body.get("ti_id"), str) else None


def _of_shell(run: Run, body: dict[str, Any]) -> Ownership:
    machine = body.get("machine")
    there = Identity.from_dict(machine) if isinstance(machine, dict) else Identity("?")
    process, here = ProcessId.from_dict(body.get("process")), this_identity()
    name = f"{body.get('user', '?')}@{there.host}" + (f":{process.pid}" if process else "")
    if process is None or not here.is_same_host(there):
        return _by_lease(run, name)
    if here.boot_id != there.boot_id:
        return Ownership(name, "gone", "the machine was restarted since")
    if here.pid_namespace != there.pid_namespace:
        return _by_lease(run, name)
    if process.is_alive():
        return Ownership(name, "there", "the process runs")
    return Ownership(name, "gone", "the process has ended")


def _by_lease(run: Run, name: str) -> Ownership:
    try:
        if run.lease.read() is None:
            return Ownership(name, "gone", "it has no lease")
    except ProtocolError:
        return Ownership(name, "unknown")
    age_s = _age_s(run)
    if age_s is None:
        return Ownership(name, "unknown")
    why = f"its lease was last renewed {duration_text(age_s)} ago"
    return Ownership(name, "gone" if age_s > SILENT_S else "there", why, is_by_age=True)


def _age_s(run: Run) -> float | None:
    """Seconds since the lease was renewed, by the store's clock; None if the store reports no dates."""
    found = run.read_dated(LEASE, max_bytes=MAX_LEASE_BYTES)
    if found is None or found[1] is None:
        return None
    return max(0.0, run.now() - found[1])


def shown_status(state: RunState, presence: Presence) -> str:
    """The status of a run as shown: ``failed to start`` and ``orphaned`` are distinct from ``active``."""
    has_begun = bool(state.attempts_of(state.generation)) if state.generation else False
    if state.status == "none":
        return {"there": "starting", "unknown": "none", "gone": "failed to start"}[presence]
    if state.status == "failed" and not has_begun:
        return "failed to start"
    if state.status == "active" and presence == "gone":
        return "orphaned" if has_begun else "failed to start"
    return state.status
