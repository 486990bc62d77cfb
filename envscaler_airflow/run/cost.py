"""What a run cost, where the money went, and what a static plan would have cost.

Pure: billed intervals, prices and steps in, a :class:`Bill` out. Anything unknown stays
None and is named in the notes; it is never counted as free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF, Tariffs
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.planning.record import NotNegative, Record


@dataclass(frozen=True, slots=True)
class UsageInterval(Record):
    """Billed time of one node, from the provider's timestamps, seconds since the epoch.

    Attributes:
        node: Index.
        start: When it was allocated.
        end: When it was released; None while it is allocated. An end before the start counts as no time.
        now: The provider's time of its answer; an open interval is billed up to it. None where the provider
            does not report it.
        before_s: Time of the same machine before *start*, in another interval: both are rounded together.
    """

    node: int
    start: NotNegative[float]
    end: NotNegative[float] | None = None
    now: float | None = None
    before_s: NotNegative[float] | None = None


@dataclass(frozen=True, slots=True)
class Use(Record):
    """One attempt, as input to its bill.

    Attributes:
        generation, attempt: Which attempt.
        allocation: What it was on, with its price.
        usage: Billed intervals of its nodes; None: the provider did not report them; empty: never billed.
        outcome: ``moved``, ``lost``, ``succeeded``, ...; ``""`` while it runs.
        provisioning_s: Billed seconds before the first step: start, setup, restore. None: unknown.
        idle_s: Billed seconds without training after that: stalls, saves, drain. None: unknown.
        first_step, last_step: Step at which it began, and the last one that it made.
        kept_step: Step that the next attempt resumed from, or that the result contains; None: not known yet.
        repeated_steps: Steps made twice within the attempt, after one of its pods was replaced.
        is_lower_bound: True if ``usage`` contains only what the statuses of the nodes prove, since the
            provider no longer has its times.
    """

    generation: int
    attempt: int
    allocation: Allocation
    usage: tuple[UsageInterval, ...] | None = None
    outcome: str = ""
    provisioning_s: NotNegative[float] | None = None
    idle_s: NotNegative[float] | None = None
    first_step: NotNegative[int] | None = None
    last_step: NotNegative[int] | None = None
    kept_step: NotNegative[int] | None = None
    repeated_steps: int = 0
    is_lower_bound: bool = False

    @property
    def name(self) -> str:
        """Return ``g1-a3``."""
        return f"g{self.generation}-a{self.attempt}"


@dataclass(frozen=True, slots=True)
class Pause(Record):
    """A pause of the training between two attempts.

    Attributes:
        before, after: Attempts around it.
        cause: ``moved``, ``lost``, ...
        total_s: From the last step to the next one; None: unknown.
        parts: Seconds by part, e.g. ``checkpoint``, ``noticed``, ``waited``, ``start``,
            ``setup``, ``first_step``; a missing part is unknown.
    """

    before: int
    after: int
    cause: str = ""
    total_s: NotNegative[float] | None = None
    parts: Mapping[str, NotNegative[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split(Record):
    """One amount, split by what it was spent on. None: cannot be determined.

    Attributes:
        compute: Training that counts.
        lost: Training that was repeated, since no checkpoint contained it.
        provisioning: Before the first step.
        idle: Any other billed time without training.
    """

    compute: float | None = None
    lost: float | None = None
    provisioning: float | None = None
    idle: float | None = None


@dataclass(frozen=True, slots=True)
class Line(Record):
    """The bill of one attempt.

    Attributes:
        use: Its facts.
        node_hours: Billed, all nodes together; None: unknown.
        wall_s: From the start of the first node to the release of the last; None: unknown or never started.
        usd_per_node_hour: Price; the mean of its parts if it is of two offers; None: unknown.
        usd: Billed hours of each node at the price of its offer; None: one of them is unknown.
        least_usd: If *usd* is unknown, the least that it cost; None: unknown too.
        steps: Steps done; None: unknown.
        lost_steps: Steps of these that were repeated; None: unknown.
        hours: Node-hours by what they were spent on.
        usd_split: The same in USD.
    """

    use: Use
    node_hours: float | None = None
    wall_s: float | None = None
    usd_per_node_hour: float | None = None
    usd: float | None = None
    least_usd: float | None = None
    steps: int | None = None
    lost_steps: int | None = None
    hours: Split = field(default_factory=Split)
    usd_split: Split = field(default_factory=Split)


@dataclass(frozen=True, slots=True)
class StaticPlan(Record):
    """The first allocation, on-demand for all the work, without a move or a loss.

    Attributes:
        allocation: The allocation.
        hours: Provisioning of the first attempt, then all steps at its speed and with its idle time; None:
            unknown.
        usd: ``hours`` at the on-demand price; None: unknown.
        assumption: How the plan was derived, human-readable.
    """

    allocation: Allocation
    hours: float | None = None
    usd: float | None = None
    assumption: str = ""


@dataclass(frozen=True, slots=True)
class Bill(Record):
    """What a run cost.

    Attributes:
        lines: One per attempt.
        pauses: Between attempts.
        usd: All attempts; None if the cost of any is unknown.
        known_usd: Attempts of known cost, plus the least cost of the others.
        node_hours: All attempts; None if unknown for any.
        wall_s: From the start of the first node to the release of the last; None without an attempt.
        steps, lost_steps: All attempts; None if unknown for any.
        hours, usd_split: All attempts by what they were spent on; a part is None if unknown for any.
        static: The comparison; None without an attempt.
        saved_usd: Static minus actual cost, below 0 if the run cost more; None if either is unknown.
        notes: What is unknown, and why.
    """

    lines: tuple[Line, ...] = ()
    pauses: tuple[Pause, ...] = ()
    usd: float | None = None
    known_usd: float = 0.0
    node_hours: float | None = None
    wall_s: float | None = None
    steps: int | None = None
    lost_steps: int | None = None
    hours: Split = field(default_factory=Split)
    usd_split: Split = field(default_factory=Split)
    static: StaticPlan | None = None
    saved_usd: float | None = None
    notes: tuple[str, ...] = ()


def bill(
    uses: Iterable[Use],
    *,
    now: float,
    tariffs: Tariffs,
    pauses: Iterable[Pause] = (),
    total_steps: int | None = None,
    on_demand_usd_per_node_hour: float | None = None,
) -> Bill:
    """Add up the bill of a run.

    Args:
        uses: Attempts, any order.
        now: Provider's time up to which running nodes are billed, seconds since the epoch.
        tariffs: Round time up to the units of each cloud.
        pauses: Between attempts.
        total_steps: Of all the work; None: the steps done and kept so far.
        on_demand_usd_per_node_hour: For the static plan, if the first allocation was spot.
    """
    ordered = sorted(uses, key=lambda use: (use.generation, use.attempt))
    lines = tuple(_line(use, now, tariffs) for use in ordered)
    usds = [line.usd for line in lines]
    usd = _sum(usds)
    static = _static(lines, total_steps, on_demand_usd_per_node_hour) if lines else None
    paid = None if static is None or static.usd is None or usd is None else static.usd - usd
    steps, lost = _sum([line.steps for line in lines]), _sum([line.lost_steps for line in lines])
    return Bill(
        lines=lines,
        pauses=tuple(sorted(pauses, key=lambda item: (item.before, item.after))),
        usd=usd,
        known_usd=fsum(item for line in lines for item in (line.usd, line.least_usd) if item is not None),
        node_hours=_sum([line.node_hours for line in lines]),
        wall_s=_wall_s([held for use in ordered for held in use.usage or ()], now),
        steps=None if steps is None else int(steps),
        lost_steps=None if lost is None else int(lost),
        hours=_total([line.hours for line in lines]),
        usd_split=_total([line.usd_split for line in lines]),
        static=static,
        saved_usd=paid,
        notes=tuple(_notes(lines, static)),
    )


def spent_usd(uses: Iterable[Use], *, now: float, tariffs: Tariffs) -> float | None:
    """Return the cost of the attempts up to *now*, for the budget; None if any of it is unknown."""
    return _sum([_line(use, now, tariffs).usd for use in uses])


def _line(use: Use, now: float, tariffs: Tariffs) -> Line:
    node_hours, usd = _billed(use, now, tariffs)
    least_usd = None
    if use.is_lower_bound:
        node_hours, usd, least_usd = None, None, usd
    price = use.allocation.offer.usd_per_hour
    if use.allocation.is_mixed:
        price = usd / node_hours if usd is not None and node_hours else _mean_price(use.allocation)
    held_s = sum(_seconds(held, now) for held in use.usage or ())
    steps, lost_steps = _steps(use)
    hours = _split_hours(use, node_hours, steps, lost_steps, held_s=held_s)
    return Line(
        use=use,
        node_hours=node_hours,
        wall_s=None if use.is_lower_bound else _wall_s(use.usage or (), now),
        usd_per_node_hour=price,
        usd=usd,
        least_usd=least_usd,
        steps=steps,
        lost_steps=lost_steps,
        hours=hours,
        usd_split=_priced(hours, price),
    )


def _steps(use: Use) -> tuple[int | None, int | None]:
    """Return steps done, and how many of them were lost. Steps of a running attempt count until a loss."""
    if use.usage == ():
        return 0, 0
    steps = _difference(use.last_step, use.first_step)
    kept = use.last_step if use.kept_step is None and not use.outcome else use.kept_step
    lost, again = _difference(use.last_step, kept), use.repeated_steps
    if steps is None:
        return None, None
    return steps + again, None if lost is None else min(lost, steps) + again


def _billed(use: Use, now: float, tariffs: Tariffs) -> tuple[float | None, float | None]:
    """Return billed node-hours and USD, each node by its own offer."""
    if use.usage is None:
        return None, None
    offers = [_offer_of(use.allocation, held.node) for held in use.usage]
    paid_s = [_billed_s(offer, held, now, tariffs) for offer, held in zip(offers, use.usage, strict=True)]
    prices = [None if offer is None else offer.usd_per_hour for offer in offers]
    usds = [
        None if price is None else seconds * price / SECONDS_PER_HOUR
        for price, seconds in zip(prices, paid_s, strict=True)
    ]
    return sum(paid_s) / SECONDS_PER_HOUR, _sum(usds)


def _offer_of(allocation: Allocation, node: int) -> Offer | None:
    """Return the offer that *node* is billed as; None if a mixed allocation does not report it."""
    if allocation.is_mixed and not 0 <= node < allocation.nodes:
        return None
    return allocation.offer_of(node) if allocation.is_mixed else allocation.offer


def _billed_s(offer: Offer | None, held: UsageInterval, now: float, tariffs: Tariffs) -> float:
    """Return the billed seconds: rounded up to the cloud's unit, and at least its minimum."""
    seconds = _seconds(held, now)
    billing = None if offer is None else tariffs.get(offer.cloud, UNKNOWN_TARIFF).billing
    if billing is None or seconds == 0:
        return seconds
    if not held.before_s:
        return billing.billed_s(seconds)
    return billing.billed_s(held.before_s + seconds) - billing.billed_s(held.before_s)


def _mean_price(allocation: Allocation) -> float | None:
    price = allocation.usd_per_hour
    return None if price is None else price / allocation.nodes


def _split_hours(
    use: Use, node_hours: float | None, steps: int | None, lost_steps: int | None, *, held_s: float
) -> Split:
    """Split billed hours: provisioning and idle as stated, the rest by steps kept and lost.

    Billed time beyond the node's own time, up to the cloud's unit, is idle.
    """
    nodes = use.allocation.nodes
    if node_hours == 0:
        return Split(0.0, 0.0, 0.0, 0.0)
    if node_hours is None or use.provisioning_s is None:
        return Split()
    provisioning = min(use.provisioning_s * nodes / SECONDS_PER_HOUR, node_hours)
    if use.idle_s is None:
        return Split(provisioning=provisioning)
    rounding = node_hours - held_s / SECONDS_PER_HOUR
    idle = min(use.idle_s * nodes / SECONDS_PER_HOUR + rounding, node_hours - provisioning)
    training = max(0.0, node_hours - provisioning - idle)
    if steps == 0:
        return Split(0.0, 0.0, provisioning, idle + training)
    if steps is None or lost_steps is None:
        return Split(provisioning=provisioning, idle=idle)
    lost = training * lost_steps / steps
    return Split(training - lost, lost, provisioning, idle)


def _static(lines: Sequence[Line], total_steps: int | None, on_demand: float | None) -> StaticPlan:
    allocation = lines[0].use.allocation
    steady = Allocation(allocation.offer, allocation.nodes)
    ran = [line for line in lines if line.node_hours != 0]
    if len(ran) == 1 and ran[0].use.outcome == "succeeded" and ran[0].use.allocation.name == steady.name:
        return _as_it_ran(steady, ran[0], on_demand)
    there = (line for line in lines if line.steps and line.use.allocation.name == allocation.name)
    first = next(there, lines[0])
    steps = total_steps if total_steps is not None else _steps_kept(lines)
    trained = None
    if first.hours.compute is not None and first.hours.lost is not None:
        trained = (first.hours.compute + first.hours.lost) / allocation.nodes
    if steps is None or trained is None or not first.steps or first.hours.provisioning is None:
        why = f"the speed of {first.use.name} on {allocation.name} is unknown"
        return StaticPlan(steady, assumption=why)
    start = first.hours.provisioning / allocation.nodes
    hours = start + trained / first.steps * steps + _static_idle_h(lines, first, steps)
    price = _static_price(allocation, on_demand)
    return StaticPlan(
        steady,
        hours=hours,
        usd=None if price is None else hours * price * allocation.nodes,
        assumption=f"{steps} steps at the speed that {first.use.name} had, started once, idle as much",
    )


def _static_idle_h(lines: Sequence[Line], first: Line, steps: int) -> float:
    """Hours of saves, stalls and drain: scaled by steps from *first*, but no more than the run had."""
    assert first.steps
    scaled = (first.hours.idle or 0.0) / first.use.allocation.nodes / first.steps * steps
    idle = [
        None if line.hours.idle is None else line.hours.idle / line.use.allocation.nodes for line in lines
    ]
    of_run = _sum(idle)
    return scaled if of_run is None else min(scaled, of_run)


def _as_it_ran(steady: Allocation, line: Line, on_demand: float | None) -> StaticPlan:
    """Return a run that never moved and lost nothing as its own static plan, including all its time."""
    hours = None if line.node_hours is None else line.node_hours / steady.nodes
    price = _static_price(steady, on_demand)
    usd = None if price is None or hours is None else hours * price * steady.nodes
    return StaticPlan(steady, hours, usd, assumption="as it ran: it never moved")


def _static_price(allocation: Allocation, on_demand: float | None) -> float | None:
    """Return the on-demand USD per hour of one node; None when unknown."""
    is_known = allocation.offer.capacity_type == "on-demand" and _is_of_one_type(allocation)
    return allocation.offer.usd_per_hour if on_demand is None and is_known else on_demand


def _is_of_one_type(allocation: Allocation) -> bool:
    return len({part.offer.instance_type for part in allocation.parts}) == 1


def _steps_kept(lines: Sequence[Line]) -> int | None:
    kept = [
        line.steps - line.lost_steps
        for line in lines
        if line.steps is not None and line.lost_steps is not None
    ]
    return sum(kept) if len(kept) == len(lines) else None


def _notes(lines: Sequence[Line], static: StaticPlan | None) -> list[str]:
    notes = []
    for line in lines:
        if line.least_usd is not None:
            notes.append(
                f"{line.use.name}: cost at least {usd_text(line.least_usd)}, by the statuses of its nodes; "
                "the provider has no times of it any more"
            )
        elif line.node_hours is None:
            notes.append(f"{line.use.name}: the provider did not report how long it was allocated")
        elif line.usd is None:
            notes.append(f"{line.use.name}: the price of {_unpriced(line.use.allocation)} is unknown")
        if line.node_hours == 0:
            continue
        if line.use.provisioning_s is None or line.use.idle_s is None:
            notes.append(f"{line.use.name}: how long it took to start or stood idle is unknown")
        elif line.steps is None or line.lost_steps is None:
            notes.append(f"{line.use.name}: steps done or kept are unknown")
    if static is not None and static.hours is None:
        notes.append(f"static plan: {static.assumption}")
    elif static is not None and static.usd is None:
        notes.append(f"static plan: the on-demand price of {static.allocation.name} is unknown")
    return notes


def _unpriced(allocation: Allocation) -> str:
    names = [part.offer.name for part in allocation.parts if part.offer.usd_per_hour is None]
    return ", ".join(names) or f"a node beyond {allocation.name}"


def _seconds(held: UsageInterval, now: float) -> float:
    return max(0.0, (now if held.end is None else held.end) - held.start)


def _wall_s(held: Sequence[UsageInterval], now: float) -> float | None:
    if not held:
        return None
    ends = [now if item.end is None else item.end for item in held]
    return max(0.0, max(ends) - min(item.start for item in held))


def _difference(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else max(0, last - first)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # fsum: the order of attempts does not affect the last digit.
    return fsum(known) if len(known) == len(values) else None


def _total(splits: Sequence[Split]) -> Split:
    return Split(
        compute=_sum([item.compute for item in splits]),
        lost=_sum([item.lost for item in splits]),
        provisioning=_sum([item.provisioning for item in splits]),
        idle=_sum([item.idle for item in splits]),
    )


def _priced(hours: Split, price: float | None) -> Split:
    if price is None:
        return Split()
    return Split(
        compute=None if hours.compute is None else hours.compute * price,
        lost=None if hours.lost is None else hours.lost * price,
        provisioning=None if hours.provisioning is None else hours.provisioning * price,
        idle=None if hours.idle is None else hours.idle * price,
    )
