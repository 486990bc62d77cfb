"""The market of a run with a deadline: samples of spot, and what the owner runs after an attempt has ended.

Every launch that came, was refused or was lost is a sample with its time: those of this run are in its
events, those of other runs in ``availability.v1/`` and ``stockouts.v1/`` of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from envscaler_airflow.backends.base import Backend, CountsFree
from envscaler_airflow.errors import BackendError, NoOfferError, ProtocolError
from envscaler_airflow.owner import policies
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.stage_knowledge import START_S
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.performance import merged
from envscaler_airflow.planning.stockouts import StockOut, against
from envscaler_airflow.run import AttemptState, RunState, outcome_of
from envscaler_airflow.run.actions import Resume
from envscaler_airflow.run.measured import speed_of, steps_left, trained_s
from envscaler_airflow.scaling import StartFacts, all_policies, policy_of
from envscaler_airflow.scaling.deadline import Hazard, Market, MarketView, Risk, Table, Zone, decide_market
from envscaler_airflow.scaling.deadline.policy import DEADLINE, high_s, opened_table, spot_of
from envscaler_airflow.scaling.deadline.spot_market import IDLE_LOOK_S, LOOK_S, TICK_S
from envscaler_airflow.store.availability import Seen, read_seen, stockouts, write_seen
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store

SPREAD = 0.1
"""Relative stdev of a speed that was measured for a minute; it falls with the root of the time. Chosen: with
ten hours, half a per cent."""
REWRITE_S = 600.0
"""How often a sample that brings nothing new is written, seconds. Chosen: a tick of the model."""

Look = tuple[float, bool]
"""When, and whether the offer was available."""


def market_of(
    run: Run,
    backend: Backend,
    state: RunState,
    *,
    here: Allocation,
    candidates: Iterable[Allocation],
    pause_s: float | None = None,
    unsaved_s: float = 0.0,
) -> Market:
    """Look at the spot candidates with the machine of *here*, and return all that is known of them.

    Args:
        run: Where its events are.
        backend: Counts free machines, where it can.
        state: Fold of the run's events.
        here: The live allocation, or the last one.
        candidates: What the stage may run on.
        pause_s: Expected pause of a move, from the start of the live attempt; None when unknown.
        unsaved_s: Seconds of work since its last checkpoint.

    Raises:
        StoreError: The store does not answer.
    """
    now = run.now()
    spots = list({item.name: item for item in spot_of(here, (here, *candidates))}.values())
    known = {item.name: read_seen(run.store, item.offer.name) for item in spots}
    due = [item for item in spots if _is_due(known[item.name], now)]
    free = _free_nodes(backend, state, [item.offer for item in due])
    refused = stockouts(run.store, now=now)
    zones = []
    for item in spots:
        looks = list(_looks(state, item.offer, refused, now))
        if item.offer.name in free:
            looks.append((now, free[item.offer.name] >= item.nodes))
        zones.append(_zone(run.store, item, known[item.name], looks, now))
    starts = starts_s(state)
    usual = median(starts) if starts else pause_s
    return Market(
        zones=tuple(zones),
        start_s=usual,
        wait_s=min(usual or 0.0, max(0.0, max(starts) - (usual or 0.0))) if starts else 0.0,
        unsaved_s=unsaved_s,
    )


def _is_due(seen: Seen | None, now: float) -> bool:
    since = None if seen is None else seen.since(now)
    return since is None or since >= LOOK_S / 2


def _free_nodes(backend: Backend, state: RunState, offers: Sequence[Offer]) -> Mapping[str, int]:
    """Free nodes by offer name; empty where only a request shows them."""
    if not offers or not isinstance(backend, CountsFree):
        return {}
    live = state.live
    try:
        return backend.free_nodes(offers, without=None if live is None else live.handle)
    except BackendError:
        return {}


def _zone(store: Store, item: Allocation, seen: Seen | None, looks: Iterable[Look], now: float) -> Zone:
    """Fold the samples since the record into it, and write it if that brought news."""
    since = None if seen is None else seen.since(now)
    if seen is None or since is None:
        risk, at = Risk(Hazard(), TICK_S), None
    else:
        risk, at = seen.risk(TICK_S), seen.at
    was_up, begun = risk.is_up, at
    for when, is_up in sorted(looks):
        if at is None or when > at:
            risk.observe(is_up=is_up, after_s=None if at is None else when - at)
            at = when
    price = item.usd_per_hour or 0.0
    zone = risk.zone(item.offer.name, price)
    if at is not None and (begun is None or was_up != risk.is_up or at - begun >= REWRITE_S):
        write_seen(store, item.offer.name, Seen(zone, at))
    return replace(zone, name=item.name, unseen_s=0.0 if at is None else max(0.0, now - at))


def _looks(state: RunState, offer: Offer, refused: Iterable[StockOut], now: float) -> Iterator[Look]:
    """What the events of this run, and refusals of other runs, show of *offer*."""
    for attempt in state.attempts:
        if offer.name not in {part.offer.name for part in attempt.allocation.parts}:
            continue
        ended, outcome = attempt.ended_at, outcome_of(attempt.outcome)
        if attempt.outcome == "not-started":
            if attempt.end.failure == "capacity" and ended is not None:
                yield ended, False
            continue
        if attempt.started_at is None or attempt.phase == "started":
            continue  # whether it has a machine is seen once it has ended
        until = now if ended is None else ended
        yield from _held(attempt.started_at, until)
        if outcome.is_disruption and ended is not None:
            yield ended + _NEXT_S, False
    yield from ((item.at, False) for item in refused if against(offer, (item,), item.at) is not None)


_NEXT_S = 1e-3
"""From the last moment of a machine to the sample that misses it, seconds."""


def _held(started: float, until: float) -> Iterator[Look]:
    """A machine that ran is a sample at every tick."""
    ticks = int((until - started) // TICK_S)
    yield from ((started + tick * TICK_S, True) for tick in range(ticks + 1))
    yield until, True


def starts_s(state: RunState) -> list[float]:
    """Seconds from the intent of each attempt to its first work: its life without its training."""
    found = []
    for attempt in state.attempts_of(state.generation):
        until, trained = attempt.stopping_at or attempt.ended_at, trained_s(attempt)
        if attempt.started_at is None or until is None or attempt.end.earlier_pods_s:
            continue
        if trained:
            found.append(max(0.0, until - attempt.intended_at - trained - (attempt.end.save_s or 0.0)))
    return found


def resume_of(owned: OwnedRun, state: RunState) -> Resume | None:
    """Return what the market decides after an attempt has ended; None if the stage's policy is another one.

    Raises:
        StoreError: The store does not answer.
    """
    last, left_s = state.current, deadline_left_s(owned, state)
    spec = owned.spec(state)
    policy = None if spec.scaling is None else spec.scaling.policy
    if last is None or left_s is None or DEADLINE.name not in (policy, owned.stage.strategy):
        return None
    try:
        places = _places(owned, last.allocation)
    except (BackendError, NoOfferError):
        return None
    bought = _cheapest([item for item in places if _is_on_demand(item)])
    if bought is None or not spot_of(last.allocation, places):
        return None
    market = market_of(owned.run, owned.backend, state, here=last.allocation, candidates=places)
    start_s = START_S if market.start_s is None else market.start_s
    is_seen = isinstance(owned.backend, CountsFree)
    view = MarketView(
        zones=market.zones,
        on_demand_usd=bought.usd_per_hour or 0.0,
        left_s=left_s,
        work_s=work_left_s(state, last),
        start_s=start_s,
        look_s=IDLE_LOOK_S if is_seen else _until_unknown_s(market.zones),
        wait_s=market.wait_s,
        blind_s=start_s,
        ask_s=0.0 if is_seen else asks_s(state),
    )
    found = decide_market(view, _table(owned, state, last.allocation, start_s, left_s))
    target = {"on-demand": bought, "wait": None}.get(found.action)
    if found.action == "launch":
        target = next(item for item in places if item.name == found.zone)
    return Resume(found, target)


def _until_unknown_s(zones: Iterable[Zone]) -> float:
    """Seconds until a zone may be requested again."""
    left = min((TICK_S - zone.unseen_s for zone in zones), default=TICK_S)
    return max(IDLE_LOOK_S, left)


def _is_on_demand(item: Allocation) -> bool:
    return item.rest is None and item.offer.capacity_type == "on-demand"


def _cheapest(places: Iterable[Allocation]) -> Allocation | None:
    known = [item for item in places if item.usd_per_hour is not None]
    return min(known, key=lambda item: (item.usd_per_hour or 0.0, item.name), default=None)


def _places(owned: OwnedRun, here: Allocation) -> list[Allocation]:
    """Where the planned targets allow the machine of *here*, at today's prices."""
    fresh = {offer.name: offer for offer in owned.backend.offers()}
    planned = [Allocation.from_dict(item) for item in owned.run.plan().get("targets", ())]
    return [
        replace(item, offer=fresh[item.offer.name])
        for item in planned
        if item.rest is None
        and item.offer.name in fresh
        and item.offer.instance_type == here.offer.instance_type
        and item.nodes == here.nodes
    ]


def _table(owned: OwnedRun, state: RunState, here: Allocation, start_s: float, left_s: float) -> Table | None:
    """The table of the deadline, built if the present one does not serve any more."""
    spec = owned.spec(state)
    known = StartFacts(here, start_s, left_s, owned.backend.offers)
    policies.prepare(owned.run, all_policies()[DEADLINE.name], policy_of(spec), known)
    name, _ = policies.present_table(owned.run, DEADLINE.name)
    try:
        return None if name is None else opened_table(policies.read_table(owned.run, DEADLINE.name, name))
    except (ProtocolError, ValueError):
        return None


def deadline_left_s(owned: OwnedRun, state: RunState) -> float | None:
    """Seconds to the deadline of the generation; None without one."""
    deadline_s = owned.stage.deadline_s
    since = 0.0 if state.begun_at is None else owned.run.now() - state.begun_at
    return None if deadline_s is None else deadline_s - since


def work_left_s(state: RunState, last: AttemptState) -> float | None:
    """90th percentile of the seconds of work left after *last*, without losses; None before it is measured.

    The speed is that of all ended attempts on the same machine. Work since the newest checkpoint is done
    again.
    """
    attempts, here = state.attempts_of(state.generation), last.allocation
    left, speed = steps_left(attempts), None
    for attempt in attempts:
        there = attempt.allocation
        if (there.offer.instance_type, there.nodes) == (here.offer.instance_type, here.nodes):
            speed = merged(speed, speed_of(attempt))
    if left is None or speed is None:
        return None
    return high_s(left, replace(speed, stdev=speed.mean * SPREAD * min(1.0, (60.0 / speed.seconds) ** 0.5)))


def asks_s(state: RunState) -> float:
    """Mean seconds until a request of this generation was refused; one minute before the first."""
    took = [
        attempt.ended_at - attempt.intended_at
        for attempt in state.attempts_of(state.generation)
        if attempt.outcome == "not-started" and attempt.ended_at is not None
    ]
    return sum(took) / len(took) if took else 60.0
