"""The policies of a run: the tables that its owner prepares, and a time limit on code of other packages.

``tables/POLICY.json`` names the current table, ``tables/POLICY-<hash>.bin``, and what it was built for. The
owner builds the table on the worker at each start; a check in the triggerer looks it up and records its name.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from envscaler_agent.messages import read_object
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.scaling import (
    Check,
    Observation,
    Policy,
    Prepared,
    Proposal,
    Propose,
    ScalingPolicy,
    StartFacts,
    all_policies,
)
from envscaler_airflow.scaling.decision import table_name
from envscaler_airflow.scaling.phase import FILE, Forecast
from envscaler_airflow.scaling.registry import checked
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.keys import is_name
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_TABLE = 1 << 25
"""Largest table, bytes. Chosen: five times that of a deadline of a month."""
MAX_POINTER = 1 << 12
"""Largest file that names a table, bytes. Chosen: that of the deadline policy takes a tenth."""
MAX_FORECAST = 1 << 20
"""Largest file of phases, bytes. Chosen: a thousand phases take a tenth."""
MAX_RUNS = 20
"""Earlier runs that are read, by name from the last. Chosen: a month of workdays."""
LIMIT_S = 20.0
"""Longest time for one answer of another package's policy, seconds. Chosen: ours take milliseconds."""
MOST_AT_ONCE = 32
"""Most concurrent calls of one policy. Chosen: as many as a triggerer has threads for checks."""


def policies_of(run: Run) -> Mapping[str, ScalingPolicy]:
    """Return all policies, each with the tables that observations name; other packages' policies have limits.

    The first observation that names a table reads it from the store: call it in a thread. A fault in another
    package's policy ends no check and no execution: its errors become reasons.
    """
    return {name: _opened(run, policy) for name, policy in all_policies().items()}


def prepare(run: Run, policy: ScalingPolicy, settings: Policy, facts: StartFacts) -> None:
    """Have *policy* build what it looks up later, and write it to the run's tables. Only for the owner.

    Raises:
        StoreError: The store cannot be read or written.
        BackendError: The backend does not answer about its offers.
    """
    made = (_bounded(policy) if policy.origin else policy).prepare(
        settings,
        replace(
            facts,
            present=lambda: present_table(run, policy.name)[1],
            earlier=lambda: _earlier(run),
        ),
    )
    for name, data in made.files.items():
        run.write(f"tables/{name}", data)
    if made.reason:
        log.warning("policy=%s prepares less than it could: %s", policy.name, made.reason)


def present_table(run: Run, policy: str) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return the name of the current table of *policy*, and what it was built for; None if unreadable.

    Raises:
        StoreError: The store cannot be read.
    """
    name = f"tables/{policy}.json"
    try:
        text = run.read(name, max_bytes=MAX_POINTER)
        body = read_object(text, where=name) if text is not None else {}
    except ProtocolError:
        return None, None
    match body:
        case {"table": str(table), "job": dict(built_for)} if _is_table(policy, table):
            return table, built_for
    return None, None


def read_table(run: Run, policy: str, name: str) -> bytes:
    """Return the table of *policy* with that name.

    Raises:
        StoreError: The store cannot be read.
        ProtocolError: It does not exist, or its content does not match the hash in its name.
    """
    data = run.read(name, max_bytes=MAX_TABLE) if _is_table(policy, name) else None
    if data is None or f"tables/{table_name(policy, data)}" != name:
        raise ProtocolError(f"{run.prefix}/{name:.100}: expected a table of policy {policy} with that hash")
    return data


def read_forecast(run: Run) -> Forecast:
    """Return the phases of an earlier run; no phases if the file is missing or cannot be understood.

    Raises:
        StoreError: The store cannot be read.
    """
    name = f"tables/{FILE}"
    try:
        text = run.read(name, max_bytes=MAX_FORECAST)
        return Forecast() if text is None else Forecast.from_dict(read_object(text, where=name))
    except (ProtocolError, ValueError, KeyError, TypeError, OverflowError):
        return Forecast()


def _is_table(policy: str, name: str) -> bool:
    return re.match(rf"tables/{re.escape(policy)}-[0-9a-f]{{16}}\.bin\Z", name) is not None


def _earlier(run: Run) -> Iterator[tuple[str, Iterable[Check]]]:
    """Yield the checks of the same stage in other runs of the DAG."""
    deployment, dag, mine, *rest = run.prefix.split("/")
    others = [name for name in run.store.children(f"{deployment}/{dag}") if name != mine]
    for name in sorted(others, reverse=True)[:MAX_RUNS]:
        where = "/".join([deployment, dag, name, *rest])
        yield name, (check for check, _ in read_decisions(Run(run.store, where)))


def _opened(run: Run, policy: ScalingPolicy) -> ScalingPolicy:
    if policy.with_table is not None:
        policy = replace(policy, propose=_by_table(run, policy, policy.with_table))
    return _bounded(policy) if policy.origin else policy


def _by_table(run: Run, policy: ScalingPolicy, with_table: Callable[[bytes], Propose]) -> Propose:
    opened: dict[str, Propose] = {}

    def propose(observation: Observation, settings: Policy) -> Proposal:
        name = observation.deadline_table
        if name is not None and name not in opened:
            try:
                opened[name] = with_table(read_table(run, policy.name, name))
            except (ProtocolError, ValueError):
                opened[name] = policy.propose
        return opened.get(name or "", policy.propose)(observation, settings)

    return propose


def _bounded(policy: ScalingPolicy) -> ScalingPolicy:
    """Limit a policy of another package: its errors become reasons, and each call has :data:`LIMIT_S`."""
    label, room = f"policy {policy.name!r} ({policy.origin})", threading.BoundedSemaphore(MOST_AT_ONCE)
    return replace(
        policy,
        propose=_within(
            room,
            lambda seen, settings: checked(policy.propose(seen, settings), label, seen),
            lambda why: Proposal(reason=f"{label} {why}"),
        ),
        prepare=_within(
            room,
            lambda settings, facts: _storable(policy.prepare(settings, facts)),
            lambda why: Prepared(reason=f"{label} {why}"),
        ),
    )


def _within(
    room: threading.BoundedSemaphore, call: Callable[P, T], failed: Callable[[str], T]
) -> Callable[P, T]:
    """Run *call* in a thread that process exit does not wait for, since a call that hangs cannot be ended."""

    def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        if not room.acquire(blocking=False):
            return failed(f"has not come back from {MOST_AT_ONCE} calls")
        answer: Future[T] = Future()

        def answering() -> None:
            try:
                answer.set_result(call(*args, **kwargs))
            except StoreError as err:  # raised for the table or the checks that it reads
                answer.set_exception(err)
            except (Exception, SystemExit) as err:  # noqa: BLE001  (an edge: code of other packages)
                answer.set_result(failed(f"failed: {err!r:.500}"))
            finally:
                room.release()

        threading.Thread(target=answering, name="envscaler-policy", daemon=True).start()
        try:
            return answer.result(timeout=LIMIT_S)
        except TimeoutError:
            return failed(f"did not answer within {LIMIT_S:g} s")

    return bounded


def _storable(made: Prepared) -> Prepared:
    """Return *made*, as far as it can be stored.

    Raises:
        ValueError: It cannot be stored.
    """
    for name, data in made.files.items():
        if not is_name(name) or not isinstance(data, bytes) or len(data) > MAX_TABLE:
            raise ValueError(f"file {name!r:.60} of prepare is not at most {MAX_TABLE} bytes")
    return Prepared(dict(made.files), str(made.reason))
