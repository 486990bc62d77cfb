"""The table of a stage's deadline: built in the worker at each start, looked up in the triggerer.

``tables/deadline.json`` says which is the present one, ``tables/deadline-<hash>.bin``, and for what it was
built. A check names the table that it was decided by, so that it can be decided again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import re
import threading
from collections.abc import Iterable, Mapping

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.scaling import POLICIES, Observation, Policy, Proposal, Propose, meet_deadline
from envscaler_airflow.scaling.deadline import SpotJob, Table, build_table
from envscaler_airflow.scaling.deadline.live import TICK_S
from envscaler_airflow.scaling.registry import all_policies
from envscaler_airflow.store.base import Store

LIMIT_S = 20.0
"""Longest time for one answer, seconds. Chosen: ours take milliseconds."""
MOST_AT_ONCE = 32
"""Most calls of one policy that run at a time. Chosen: as many as a triggerer has threads for checks."""


def timed(name: str, propose: Propose) -> Propose:
    """*propose*, in a thread of its own that nobody waits for at exit: a call that hangs cannot be ended."""
    room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def within(observation: Observation, policy: Policy) -> Proposal:
        if not room.acquire(blocking=False):
            return Proposal(reason=f"policy {name!r}: {MOST_AT_ONCE} calls of it have not come back")
        answers: queue.SimpleQueue[Proposal] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put(propose(observation, policy))
            finally:
                room.release()

        threading.Thread(target=answer, name=f"envscaler-{name}", daemon=True).start()
        try:
            return answers.get(timeout=LIMIT_S)
        except queue.Empty:
            return Proposal(reason=f"policy {name!r} did not answer within {LIMIT_S:g} s")

    return within


log = logging.getLogger(__name__)

KEY = "tables/deadline.json"
"""The present table and its job."""
_NAME = re.compile(r"tables/deadline-[0-9a-f]{16}\.bin\Z")
MAX_BYTES = 1 << 25
"""Largest table read, bytes. Chosen: five times that of a deadline of a month."""
MAX_TICKS = 6 * 24 * 60
"""Longest deadline that a table is built for: 60 days. Chosen: half a minute of a worker."""
MAX_SLACK_S = 12 * 3600.0
"""Slack beyond which the table is not told finer, seconds. Chosen: with so much, spot is always safe."""
ALIKE = 1.1
"""Starts and prices that differ by no more than this factor need no other table. Chosen: as the tolerance of
a move."""
MAX_ROWS = 32
"""Ticks kept of a table. Chosen: 7 MB in the store, 18 MB in the triggerer, 2 s to build for four days."""


def job_of(
    allocation: Allocation, offers: Iterable[Offer], *, deadline_s: float, start_s: float
) -> SpotJob | None:
    """The job as a table sees it; None when it is not to be had on both markets, or a price is unknown.

    Its work is not known before it was measured: the table holds every amount, by the slack that it leaves.

    Args:
        allocation: What the attempt begins on; its machine is meant.
        offers: All that can be had.
        deadline_s: Seconds to the deadline.
        start_s: Seconds that every launch takes.
    """
    kind = allocation.offer.instance_type
    prices: dict[str, float] = {}
    for offer in offers:
        if offer.instance_type == kind and offer.usd_per_hour:
            known = prices.get(offer.capacity_type, math.inf)
            prices[offer.capacity_type] = min(known, offer.usd_per_hour)
    ticks = math.ceil(deadline_s / TICK_S)
    if len(prices) < 2 or not 0 < ticks <= MAX_TICKS or ticks * TICK_S <= start_s:
        return None
    return SpotJob(
        ticks=ticks,
        gap_s=TICK_S,
        work_s=max(0.0, ticks * TICK_S - start_s - MAX_SLACK_S),
        overhead_s=start_s,
        on_demand_usd=prices["on-demand"],
        spot_usd=prices["spot"],
    )


def publish(store: Store, prefix: str, job: SpotJob) -> bool:
    """Build the table of *job* unless it is there; False when that cannot be done here. For the owner alone.

    Raises:
        StoreError: The store cannot be read or written.
    """
    known = _known(store, prefix)
    if known is not None and _serves(known[1], job):
        return True
    try:
        table = build_table(job, every=max(4, job.ticks // MAX_ROWS))
    except ModuleNotFoundError as err:
        log.warning("no table for the deadline: %s; pip install envscaler-airflow[simulate]", err)
        return False
    data = table.to_bytes()
    name = _name_of(data)
    store.write(f"{prefix}/{name}", data)
    store.write(
        f"{prefix}/{KEY}", json.dumps({"schema": SCHEMA, "table": name, "job": job.to_dict()}).encode()
    )
    return True


def _name_of(data: bytes) -> str:
    return f"tables/deadline-{hashlib.sha256(data).hexdigest()[:16]}.bin"


def name_of(store: Store, prefix: str) -> str | None:
    """Which table is the present one; None without one.

    Raises:
        StoreError: The store cannot be read.
    """
    known = _known(store, prefix)
    return None if known is None else known[0]


def read(store: Store, prefix: str, name: str) -> Table | None:
    """The table of that name; None without one, and when it cannot be understood.

    Raises:
        StoreError: The store cannot be read.
    """
    if _NAME.match(name) is None:
        return None
    try:
        data = store.read(f"{prefix}/{name}", max_bytes=MAX_BYTES)
        return None if data is None or _name_of(data) != name else Table.from_bytes(data)
    except (ProtocolError, ValueError):
        return None


def with_tables(store: Store, prefix: str) -> Mapping[str, Propose]:
    """All policies, the deadline policy with the table that each observation names, others within a time.

    The first observation that names a table has it read: do that in a thread.
    """
    tables: dict[str, Table | None] = {}

    def by_table(observation: Observation, policy: Policy) -> Proposal:
        name = observation.deadline_table
        if name is not None and name not in tables:
            tables[name] = read(store, prefix, name)
        return meet_deadline(observation, policy, table=tables.get(name or ""))

    others = {name: timed(name, call) for name, call in all_policies().items() if name not in POLICIES}
    return {**POLICIES, **others, "deadline": by_table}


def _serves(known: SpotJob, job: SpotJob) -> bool:
    """True when the table of *known* is good for *job* too; less time to the deadline needs no other."""
    if known.ticks < job.ticks:
        return False
    pairs = ((known.overhead_s, job.overhead_s), (_price(known), _price(job)))
    return all(max(one, other) <= ALIKE * min(one, other) for one, other in pairs)


def _price(job: SpotJob) -> float:
    return job.spot_usd / job.on_demand_usd


def _known(store: Store, prefix: str) -> tuple[str, SpotJob] | None:
    try:
        text = store.read(f"{prefix}/{KEY}", max_bytes=1 << 12)
        body = read_object(text, where=f"{prefix}/{KEY}") if text is not None else {}
        name = str(body["table"])
        return (name, SpotJob.from_dict(body["job"])) if _NAME.match(name) is not None else None
    except (ProtocolError, ValueError, KeyError, TypeError, OverflowError):
        return None
