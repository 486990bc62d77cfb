"""Observe a run as a scaling policy sees it, check by check. Reads only; makes no requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from envscaler_agent.protocol import Status
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.catalog.packaged import gpu_facts
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner import facts, limits, resume
from envscaler_airflow.owner.policies import policies_of, present_table, read_forecast
from envscaler_airflow.owner.stage_knowledge import START_S, START_STDEV_S
from envscaler_airflow.planning import Allocation, Knowledge, Overheads, Speed, measure, merged
from envscaler_airflow.planning.knowledge import machine_name
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run.measured import step_of
from envscaler_airflow.scaling import (
    Ask,
    Check,
    Memory,
    Metric,
    Observation,
    Policy,
    Sample,
    ScalingPolicy,
    ask_metrics,
    decide,
    recent,
    remember,
    usage_samples,
    work_of,
)
from envscaler_airflow.scaling.deadline import Market
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.from_spec import policy_of, speedups_of
from envscaler_airflow.scaling.history import History, averaged
from envscaler_airflow.scaling.observation import Done, Refused
from envscaler_airflow.scaling.phase import Forecast
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.run import Run

SLOTS_S = 6.0
"""Part of a move's pause that a first start does not have, seconds: two short worker slots and the drain of
the old machine. Chosen: a task's execution in Airflow 3.3 begins within 2 to 3 s on two cores."""
STALE_S = 90.0
"""A status unchanged for this long says nothing about health, seconds. Chosen: six times its interval."""
STATUS_S = 15.0
"""How often a node reports, seconds. Source: ``sidecar.loop.STATUS_S``."""
LONG_CHECK_S = 120.0
"""Longest interval between two checks over which rules that count checks keep their samples, seconds. Chosen:
four times the sensor's default; a longer pause is a restart, and earlier samples do not apply."""
MAX_POINTS = 240
"""Progress points kept to measure speed. Chosen: an hour of statuses."""

SnapshotKind = Literal["no-run", "no-attempt", "over", "seen"]


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The run at one check.

    Attributes:
        kind: ``no-run`` yet, ``no-attempt`` live now, ``over``, or ``seen``.
        state: Fold of the events.
        check: The decision with all its inputs; None unless ``seen``.
    """

    kind: SnapshotKind
    state: RunState
    check: Check | None = None


@dataclass(slots=True)
class _Attempt:
    """What this watcher remembers of the live attempt since its last change in place.

    Points come from one pod of node 0, the one with *claim*; each pod counts seconds from its own start.
    """

    key: tuple[int, int, int]
    since_s: float
    epoch: int | None = None
    points: list[tuple[float, float]] = field(default_factory=list)
    sequences: dict[int, tuple[int, float]] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    earlier: Speed | None = None
    unit: str = ""
    claim: int = 0
    looked_at: tuple[int, int] = (0, 0)


class ScalingWatcher:
    """Checks one run repeatedly and carries windows and speeds from check to check."""

    def __init__(
        self,
        *,
        run: Run,
        backend: Backend,
        candidates: tuple[Allocation, ...] = (),
        also: Allocation | None = None,
        ask: Ask | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue from the decisions that are recorded in the run.

        Args:
            run: Which run.
            backend: For metered cost.
            candidates: What the stage may move to; if empty, the targets in ``plan.json``.
            also: One more, which replaces that of the same name.
            ask: Answers the queries of rules; None: the answers that the last check recorded remain in use.
            monotonic: For ages.
        """
        self._run = run
        self._backend = backend
        self._candidates = candidates
        self._also = {} if also is None else {also.name: also}
        self._ask = ask
        self._monotonic = monotonic
        checks = [check for check, _ in read_decisions(run)]
        self._memory: Memory = remember(checks)
        self._last: Check | None = checks[-1] if checks else None
        self._offset_s = self._memory.elapsed_s - monotonic()
        self._attempt: _Attempt | None = None
        self._samples: tuple[Sample, ...] = checks[-1].observation.samples if checks else ()
        self._unknown: Mapping[str, str] = checks[-1].observation.unknown if checks else {}
        self._plan: Mapping[str, Any] = {}
        self._known = Knowledge()
        self._forecast = Forecast()
        self._phases = _phases_of(checks)
        self._table: str | None = None
        self._policies = policies_of(run)
        self._spec_hash = ""

    def snapshot(self) -> RunSnapshot:
        """Read new events and decide.

        Raises:
            StoreError: The store cannot be read; nothing is known.
        """
        state = self._run.events.load()
        if state.generation == 0:
            return RunSnapshot("no-run", state)
        if state.status != "active":
            return RunSnapshot("over", state)
        live = state.live
        if live is None or live.phase == "intended" or live.generation != state.generation:
            return RunSnapshot("no-attempt", state)
        observation = self.observation(state, live)
        policy = self.policy(state)
        decision = decide(observation, policy, policies=self._policies)
        check = Check(observation, policy, decision)
        self._memory = self._memory.after(check)
        self._last = check
        return RunSnapshot("seen", state, check)

    def spec(self, state: RunState) -> EnvSpec:
        """Return the frozen spec of the run."""
        spec = self._run.spec(state.spec_hash)
        if self._spec_hash != state.spec_hash:
            self._spec_hash, self._plan = state.spec_hash, self._run.plan()
            self._known = planned_knowledge(self._plan)
        return spec

    def policy(self, state: RunState) -> Policy:
        """Return the stage's policy, with the value of an hour that the plan used."""
        return policy_of(self.spec(state), value_of_hour=float(self._plan.get("value_of_hour_usd") or 0.0))

    @property
    def policies(self) -> Mapping[str, ScalingPolicy]:
        """Return every installed policy, with the tables of this run."""
        return self._policies

    def candidates(self, state: RunState) -> tuple[Allocation, ...]:
        """Return what the stage may move to, except what the next attempt gets anyway."""
        self.spec(state)
        planned = [Allocation.from_dict(item) for item in self._plan.get("targets", ())]
        put_off = state.live.next_allocation if state.live is not None else None
        names = {put_off.name} if put_off is not None else set()
        known = {item.name: item for item in self._candidates or planned} | self._also
        return tuple(item for name, item in known.items() if name not in names)

    def observation(self, state: RunState, live: AttemptState) -> Observation:
        """Return the facts at this moment; see :class:`~envscaler_airflow.scaling.Observation`."""
        now_s, now = self._monotonic() + self._offset_s, self._run.now()
        mine = self._remembered(state, live, now_s)
        head = self._head(state, live, mine, now_s)
        next_phase, next_in_s = self._forecast_phase(head, now_s)
        has_moved = _moves(state) > 0
        return replace(
            self._work_and_places(state, live, mine, head, now_s),
            samples=self._samples,
            unknown=self._unknown,
            spent_usd=facts.spent_usd(state, self._backend, now=now),
            budget_usd=state.begun.budget_usd,
            deadline_table=self._table,
            deadline_left_s=self._deadline_left_s(state),
            since_move_s=now_s - mine.since_s if has_moved else None,
            since_move_epochs=_epochs_since(mine, head) if has_moved else None,
            moves=_moves(state),
            pending=_pending(state, live),
            training_phase=head.progress.phase if head else None,
            next_phase=next_phase,
            next_phase_in_s=next_in_s,
            phase_lasts_s=self._forecast.lasts_s(),
            wanted=dict(self._memory.wanted),
            refused={item.target: Refused(item.times, max(0.0, now - item.at)) for item in state.refused},
            market=self._market(state, live, mine, head),
        )

    def _market(
        self, state: RunState, live: AttemptState, mine: _Attempt, head: Status | None
    ) -> Market | None:
        """Return the samples of spot, if the policy needs them."""
        known = self._policies.get(self.policy(state).name)
        if known is None or not known.needs_market or state.begun.deadline_s is None:
            return None
        speed = merged(mine.earlier, measure(mine.points))
        step, saved = (None, None) if head is None else (head.progress.step, head.last_checkpoint_step)
        unsaved_s = 0.0
        if head is not None and step is not None and speed is not None and mine.unit == "steps":
            begun = head.resumed_at or 0
            unsaved_s = max(0, step - max(begun, saved or 0)) / speed.mean
        return resume.market_of(
            self._run,
            self._backend,
            state,
            here=live.allocation,
            candidates=self.candidates(state),
            pause_s=expected_pause_s(live, head),
            unsaved_s=unsaved_s,
        )

    def _work_and_places(
        self, state: RunState, live: AttemptState, mine: _Attempt, head: Status | None, now_s: float
    ) -> Observation:
        """Return the training's progress and speed, and the facts about current and candidate machines."""
        done = work_of(head.progress) if head else None
        candidates = self.candidates(state)
        step = _new_step(mine, head)
        is_same = self._memory.generation == live.generation
        history = self._memory.history if is_same else History()
        places = (live.allocation, *candidates)
        return Observation(
            current=live.allocation,
            candidates=candidates,
            elapsed_s=now_s,
            generation=live.generation,
            attempt=live.number,
            health=self._health(mine, head, now_s),
            phase=head.phase if head else "setup",
            unit=done.unit if done else "steps",
            units_done=done.done if done else None,
            units_total=done.total if done else None,
            epoch=head.progress.epoch if head else None,
            speeds={**self._learned(places, done.unit if done else mine.unit), **self._speeds(live, mine)},
            measured=self._measured(live, step, places),
            history=history.after(live.allocation.name, moves=_moves(state), done=_share(done), step=step),
            gpu_speeds=_gpu_speeds(places),
            speedups=speedups_of(self.spec(state)),
            overheads=self._overheads(state, live, head),
            interruptions_per_hour=_interruptions(state, places, now=self._run.now()),
        )

    def _head(self, state: RunState, live: AttemptState, mine: _Attempt, now_s: float) -> Status | None:
        """Return the status of node 0, after remembering everything that it reports."""
        head = self._statuses(state, live, mine, now_s).get(0)
        self._ask_queries(self.policy(state), now_s)
        if mine.epoch is None and head is not None:
            mine.epoch = head.progress.epoch
        self._take_point(mine, head)
        return head

    def _statuses(
        self, state: RunState, live: AttemptState, mine: _Attempt, now_s: float
    ) -> dict[int, Status]:
        found = {}
        for node in range(live.allocation.nodes):
            status = self._run.status(live.key, node)
            if status is None:
                continue
            found[node] = status
            last = mine.sequences.get(node)
            if last is None or last[0] != status.sequence:
                mine.sequences[node] = (status.sequence, now_s)
        if len(found) == live.allocation.nodes:
            self._take_samples(self.policy(state), mine, found, now_s)
        return found

    def _take_samples(
        self, policy: Policy, mine: _Attempt, statuses: Mapping[int, Status], now_s: float
    ) -> None:
        """Take a round of samples once every node has reported since the last; only what the policy needs."""
        spoken = {node: status.sequence for node, status in statuses.items()}
        if any(mine.sampled.get(node) == sequence for node, sequence in spoken.items()):
            return
        mine.sampled = spoken
        metrics = [metric for metric in self._needs(policy) if metric.query is None]
        new = [
            sample
            for node, status in statuses.items()
            for sample in usage_samples(now_s, node, status.usage)
            if any(metric.matches(sample.metric) for metric in metrics)
        ]
        self._add_samples(policy, new, now_s)

    def _ask_queries(self, policy: Policy, now_s: float) -> None:
        """Take a sample of each query; a query without a value now starts over, as a node metric would."""
        metrics = self._needs(policy)
        if self._ask is None or all(metric.query is None for metric in metrics):
            return
        answers = ask_metrics(metrics, self._ask, at_s=now_s)
        self._unknown = answers.unknown
        self._samples = tuple(item for item in self._samples if item.metric not in answers.unknown)
        self._add_samples(policy, answers.samples, now_s)

    def _add_samples(self, policy: Policy, new: Iterable[Sample], now_s: float) -> None:
        last_s = now_s if self._last is None else self._last.observation.elapsed_s
        interval_s = min(max(STATUS_S, now_s - last_s), LONG_CHECK_S)
        known = self._policies.get(policy.name)
        window = 0.0 if known is None else known.looks_back_s(policy, interval_s=interval_s)
        self._samples = recent((*self._samples, *new), now_s=now_s, window_s=window)

    def _needs(self, policy: Policy) -> tuple[Metric, ...]:
        """Return the metrics that each check carries; none for a policy that is not installed here."""
        known = self._policies.get(policy.name)
        return () if known is None else known.needs(policy)

    def _remembered(self, state: RunState, live: AttemptState, now_s: float) -> _Attempt:
        key = (live.generation, live.number, len(live.earlier))
        if self._attempt is None or self._attempt.key != key:
            self._forecast = read_forecast(self._run)
            self._table, _ = present_table(self._run, self.policy(state).name)
            since, epoch = now_s, None
            last = self._last.observation if self._last else None
            was = None if last is None else (last.generation, last.attempt, last.moves)
            if self._attempt is None and last is not None and was == (*key[:2], _moves(state)):
                since = last.elapsed_s - (last.since_move_s or 0.0)
                epoch = None if last.epoch is None else last.epoch - (last.since_move_epochs or 0)
            else:
                self._samples = ()
            speed = self._memory.speeds.get(live.allocation.name)
            earlier = speed if self._memory.generation == live.generation else None
            unit = "" if earlier is None else self._memory.unit
            self._attempt = _Attempt(key, since, epoch, earlier=earlier, unit=unit)
        return self._attempt

    @staticmethod
    def _take_point(mine: _Attempt, head: Status | None) -> None:
        if head is None:
            return
        work, at_s = work_of(head.progress), head.progress.elapsed_s
        done = work.done
        if head.phase != "running" or done is None or at_s is None:
            return
        if mine.unit and work.unit != mine.unit:  # the training reported steps only after epochs
            mine.points.clear()
            mine.earlier = None
        mine.unit = work.unit
        if mine.points and (head.claim != mine.claim or at_s < mine.points[-1][0]):
            mine.earlier = merged(mine.earlier, measure(mine.points))  # from the pod before its replacement
            mine.points.clear()
        mine.claim = head.claim
        if not mine.points and mine.earlier is None and (first := _first_point(head, work.unit)) is not None:
            mine.points.append(first)
        if not mine.points or at_s > mine.points[-1][0]:
            mine.points.append((at_s, done))
            del mine.points[:-MAX_POINTS]

    @staticmethod
    def _health(mine: _Attempt, head: Status | None, now_s: float) -> Literal["ok", "stalled", "unknown"]:
        seen = mine.sequences.get(0)
        if head is None or seen is None or now_s - seen[1] > STALE_S:
            return "unknown"
        return "stalled" if head.health == "stalled" else "ok"

    def _speeds(self, live: AttemptState, mine: _Attempt) -> dict[str, Speed]:
        is_same = self._memory.unit in ("", mine.unit or self._memory.unit)
        is_known = self._memory.generation == live.generation and is_same
        known = dict(self._memory.speeds) if is_known else {}
        speed = merged(mine.earlier, measure(mine.points))
        if speed is not None:
            known[live.allocation.name] = speed
        return known

    def _learned(self, places: Iterable[Allocation], unit: str) -> dict[str, Speed]:
        """Speeds of *places* in earlier runs; measured ones of this generation replace them."""
        if unit and unit != self._known.unit:
            return {}
        found = {place.name: self._known.speed_of(place) for place in places}
        return {
            name: speed for name, speed in found.items() if speed is not None and speed.source == "learned"
        }

    def _forecast_phase(self, head: Status | None, now_s: float) -> tuple[str | None, float | None]:
        """Forecast the next phase from the previous run; phases count from the first check of this run."""
        phase = head.progress.phase if head is not None else None
        if phase is None:
            return None, None
        if not self._phases or self._phases[-1][0] != phase:
            self._phases.append((phase, now_s))
        phases = tuple(name for name, _ in self._phases)
        return self._forecast.after(phases, now_s - self._phases[-1][1])

    def _measured(
        self, live: AttemptState, step: Measured | None, places: Iterable[Allocation]
    ) -> dict[str, Measured]:
        """Return the steps by allocation, of this generation with *step* included, else of earlier runs."""
        earlier = ((place.name, self._known.steps.get(machine_name(place))) for place in places)
        known = {name: Measured.of(one) for name, one in earlier if one is not None}
        known |= self._memory.measured if self._memory.generation == live.generation else {}
        if step is not None:
            known[live.allocation.name] = averaged(known.get(live.allocation.name), step)
        return known

    def _overheads(self, state: RunState, live: AttemptState, head: Status | None) -> Overheads:
        spec = self.spec(state)
        pauses, measured = facts.move_pauses_s(state), facts.start_s(state)
        every = spec.checkpoint.every.seconds if spec.checkpoint else None
        expected, planned = expected_pause_s(live, head), self._known.overheads
        known = next((item for item in (measured, expected) if item is not None), planned.start_s or START_S)
        return Overheads(
            start_s=known,
            start_stdev_s=(planned.start_stdev_s or START_STDEV_S)
            / (1 + len(pauses) + (expected is not None)),
            checkpoint_s=_checkpoint_s(state, head, planned),
            checkpoint_every_s=every if live.checkpoint_every_s is None else live.checkpoint_every_s,
        )

    def _deadline_left_s(self, state: RunState) -> float | None:
        deadline_s = state.begun.deadline_s
        if deadline_s is None or state.begun_at is None:
            return None
        return deadline_s - (self._run.now() - state.begun_at)


def _phases_of(checks: Iterable[Check]) -> list[tuple[str, float]]:
    """Return the phases announced so far, each with the time at which it was first seen."""
    found: list[tuple[str, float]] = []
    for check in checks:
        seen = check.observation
        if seen.training_phase is not None and (not found or found[-1][0] != seen.training_phase):
            found.append((seen.training_phase, seen.elapsed_s))
    return found


def _share(done: Done | None) -> float | None:
    """Return the fraction of the work that is done; None when it is unknown."""
    if done is None or done.done is None or not done.total:
        return None
    return min(1.0, done.done / done.total)


def _new_step(mine: _Attempt, head: Status | None) -> Measured | None:
    """Return the step that a new status reports; None if the status was looked at before."""
    if head is None or head.phase != "running" or mine.looked_at == (head.claim, head.sequence):
        return None
    mine.looked_at = (head.claim, head.sequence)
    step = step_of(head.progress)
    return None if step is None else Measured.of(step)


def _gpu_speeds(places: Iterable[Allocation]) -> dict[str, float]:
    """Memory bandwidth of each known GPU, GB/s; used to compare types before they were tried."""
    known, names = gpu_facts(), {place.offer.gpu_name for place in places}
    return {
        name: found.bandwidth_gb_s
        for name in sorted(name for name in names if name)
        if (found := known.get(name)) is not None and found.bandwidth_gb_s is not None
    }


def _interruptions(state: RunState, places: Iterable[Allocation], *, now: float) -> dict[str, float]:
    """Return the expected losses per hour of every offer of *places*."""
    offers = [part.offer for place in places for part in place.parts]
    return limits.interruptions(offers, limits.losses_per_hour(state, now=now))


def _checkpoint_s(state: RunState, head: Status | None, planned: Overheads) -> float:
    """Return what this attempt measured, or the last one that did, else what the plan knew."""
    measured = limits.measured_s(state, head)
    return (planned.checkpoint_s or limits.CHECKPOINT_S) if measured is None else measured


def planned_knowledge(plan: Mapping[str, Any]) -> Knowledge:
    """Return what the plan of a run knew; nothing if another version wrote it."""
    try:
        return Knowledge.from_dict(plan["inputs"]["knowledge"])
    except (KeyError, TypeError, ValueError):
        return Knowledge()


def expected_pause_s(live: AttemptState, head: Status | None) -> float | None:
    """Expected pause of a move, derived from how this attempt itself started; None if unknown.

    The time from the intent to the first step, plus :data:`SLOTS_S`.
    """
    if live.started_at is None or head is None:
        return None
    setup, first = head.setup_s, head.progress.first_step_s
    if setup is None or first is None:
        return None
    return SLOTS_S + max(0.0, live.started_at - live.intended_at) + setup + first


def _moves(state: RunState) -> int:
    """Count the moves carried out, including those in place."""
    attempts = state.attempts_of(state.generation)
    left = sum(attempt.stop_reason == "move" and not attempt.is_live for attempt in attempts)
    return left + sum(len(attempt.earlier) for attempt in attempts)


def _first_point(head: Status, unit: str) -> tuple[float, float] | None:
    """Return when the first step of this attempt ended, and its number; None if it is not reported."""
    first_s, begun = head.progress.first_step_s, head.start_step
    if unit != "steps" or first_s is None or begun is None or head.resume is not None:
        return None
    return first_s, float(begun + 1)


def _epochs_since(mine: _Attempt, head: Status | None) -> int | None:
    if mine.epoch is None or head is None or head.progress.epoch is None:
        return None
    return max(0, head.progress.epoch - mine.epoch)


def _pending(state: RunState, live: AttemptState) -> str | None:
    if live.phase == "stopping":
        return f"attempt {live.number} was asked to stop ({live.stop_reason})"
    if live.change is not None:
        return f"attempt {live.number} is being changed to {live.change.target.name}"
    for request in state.pending:
        return f"request {request.number} ({request.body.type}) has no answer yet"
    return None
