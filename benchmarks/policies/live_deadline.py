"""What a stage with a deadline pays on spot traces, by the code that runs it, beside the simulated cost.

    python benchmarks/policies/live_deadline.py --spot DIR [--cells 52x0.2,70x0.2] [--every 4] [--ask 60]
        [--small 2000]

Each job is a run in a store: the real owner starts, moves and ends its attempts, the real scaling watcher
decides while they run, on machines that a script takes away as the trace says. Only the clock is made up, and
time in which nothing can happen is skipped.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any

from envscaler_agent.protocol import (
    Ended,
    Manifest,
    Progress,
    Status,
    checkpoint_name,
    parse_checkpoint_name,
    status_name,
)
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.envspec import EnvSpec, load_spec
from envscaler_airflow.errors import CapacityError
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Delivered, Stage, Waiting
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Actor, AttemptState, Handle
from envscaler_airflow.scaling.deadline import ON_DEMAND
from envscaler_airflow.scaling.deadline import policy as deadline_policy
from envscaler_airflow.simulate.reports import SpotCell
from envscaler_airflow.simulate.spot import (
    Traces,
    Window,
    excerpt,
    of_dataset,
    read_traces,
    read_windows,
    simulate_spot,
)
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store
from envscaler_airflow.testing import ManualClock, ScriptedBackend

KEY = RunKey("deployment", "dag", "run", "train")
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, gpu: 1}}
entrypoint: [python, train.py]
checkpoint: {every: 60s}
scaling: {policy: deadline}
"""
STEP_S = 5.0
"""Seconds of a step. Chosen: losing part of one costs nothing that the simulator would count."""
SAVED_S = 60.0
"""Seconds between checkpoints, as the spec says."""
SLOT_S = 3.0
"""From a watcher's event to the owner's execution, seconds. Source: a worker slot in Airflow 3.3."""
POLL_S = 5.0
"""Between two polls of a trigger, seconds."""
CHECK_S = 30.0
"""Between two checks of the sensor, seconds: its default."""
MEASURED_S = 900.0
"""As long as an attempt has trained for less, no check is skipped, seconds: its speed is being measured."""
DATA = "aws2022_k80v100_600s.csv"


@dataclass(frozen=True)
class Market:
    """When which zone has spot machines.

    Attributes:
        zones: A value for each tick since the start, by zone; above 0: available.
        gap_s: Seconds of a tick.
        prices: Spot USD per hour by zone.
        on_demand_usd: The same on demand.
        ask_s: Only a request shows whether a zone is available, after this many seconds; None: it is visible.
        offset_s: How far into its first tick the job begins.
    """

    zones: Mapping[str, Sequence[int]]
    gap_s: float
    prices: Mapping[str, float]
    on_demand_usd: float
    ask_s: float | None = None
    offset_s: float = 0.0

    def is_up(self, zone: str, at_s: float) -> bool:
        """True if *zone* has machines *at_s* seconds after the start."""
        row, tick = self.zones[zone], int((at_s + self.offset_s + 1e-6) // self.gap_s)
        return tick < len(row) and row[tick] > 0

    def offers(self) -> tuple[Offer, ...]:
        """One type on demand, and on spot in each zone."""
        machine: dict[str, Any] = {
            "cloud": "scripted",
            "region": "r",
            "instance_type": "gpu-1",
            "vcpus": 8.0,
            "memory_gib": 61.0,
            "gpu_name": "V100-16GB",
            "gpus": 1,
        }
        spot = (
            Offer(**machine, zone=zone, capacity_type="spot", usd_per_hour=self.prices[zone])
            for zone in self.zones
        )
        return (Offer(**machine, capacity_type="on-demand", usd_per_hour=self.on_demand_usd), *spot)


class MarketBackend(ScriptedBackend):
    """Machines that come, are refused and are lost as a :class:`Market` says."""

    def __init__(self, market: Market, clock: ManualClock) -> None:
        """Offer what is on *market*, whose time begins now."""
        super().__init__(market.offers(), clock=clock)
        self.market, self.begun = market, clock.time()
        self.asked: dict[str, float] = {}
        self.zone_of: dict[str, str] = {}
        if market.ask_s is None:
            self.free_nodes = self._free_nodes

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock.time() - self.begun

    def _free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> Mapping[str, int]:
        del without
        return {offer.name: 99 if self._has(offer) else 0 for offer in offers}

    def _has(self, offer: Offer) -> bool:
        zone = offer.zone if offer.capacity_type == "spot" else None
        return zone is None or self.market.is_up(zone, self.elapsed_s())

    def submit(self, request: AttemptRequest) -> Handle:
        """Start it, if the zone has a machine now; where that is not visible, after the time of a request."""
        offer = request.allocation.offer
        if self.market.ask_s is None and not self._has(offer):
            raise CapacityError(f"InsufficientInstanceCapacity: {offer.name}")
        handle = super().submit(request)
        if offer.capacity_type == "spot":
            self.zone_of[handle.name] = str(offer.zone)
            if self.market.ask_s is not None and handle.name not in self.asked:
                self.asked[handle.name] = self.elapsed_s()
                self.set_state(handle, "pending", reason="scheduling")
        return handle

    def follow(self) -> None:
        """Answer requests, and lose the machines of zones that are no longer available."""
        for handle in self.live:
            zone = self.zone_of.get(handle.name)
            if zone is None:
                continue
            is_up = self.market.is_up(zone, self.elapsed_s())
            waits = self.observe(handle).nodes[0].state == "pending"
            if waits and self.elapsed_s() - self.asked[handle.name] >= (self.market.ask_s or 0.0):
                self._answer(handle, is_up=is_up)
            elif not waits and not is_up:
                self.lose(handle)

    def _answer(self, handle: Handle, *, is_up: bool) -> None:
        if is_up:
            self.set_state(handle, "running")
            self._life(handle).started = self.clock.time()
        else:
            detail = "InsufficientInstanceCapacity"
            self.set_state(handle, "pending", reason="capacity", detail=detail)

    def usage(self, handle: Handle) -> tuple[Any, ...]:
        """Bill nothing for a request that was never answered with a machine."""
        if any(one.state == "pending" for one in self.observe(handle).nodes):
            return ()
        found = super().usage(handle)
        return () if self._life(handle).nodes[0].reason in ("capacity", "scheduling") else found


@dataclass
class Training:
    """What trains: it works after *start_s*, saves every minute, and writes its status at every visit."""

    run: Run
    backend: MarketBackend
    start_s: float
    work_s: float
    begun: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    sequence: int = 0
    saved: int = 0
    saved_name: str | None = None
    ended: set[tuple[int, int]] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Steps of the whole work."""
        return math.ceil(self.work_s / STEP_S)

    def next_s(self, live: AttemptState | None) -> float:
        """Seconds until it has something to say: its first step, or its end."""
        if live is None or live.key not in self.begun:
            return math.inf
        at, first = self.begun[live.key]
        left = [at + self.start_s, at + self.start_s + (self.total - first) * STEP_S]
        return min(
            (one - self.backend.clock.time() for one in left if one > self.backend.clock.time()), default=0.0
        )

    def trained_s(self, live: AttemptState | None) -> float:
        """Seconds that it has trained in this attempt; infinite if that does not matter."""
        if live is None or live.key not in self.begun:
            return math.inf
        trained_s = self.backend.clock.time() - self.begun[live.key][0] - self.start_s
        return trained_s if trained_s >= 0 else math.inf

    def advance(self, live: AttemptState | None) -> None:
        """Train up to now, save, and end if it is done, lost or asked to."""
        if live is None or live.handle is None or live.key in self.ended:
            return
        state = self.backend.observe(live.handle).nodes[0].state
        if live.key not in self.begun:
            if state != "running":
                return
            self.begun[live.key] = (self.backend.clock.time(), self.saved)
        at, first = self.begun[live.key]
        trained_s = max(0.0, self.backend.clock.time() - at - self.start_s)
        step = min(self.total, first + int(trained_s / STEP_S + 1e-6))
        control = self.run.control(live.key)
        is_drained = control is not None and control.action in ("drain", "stop")
        is_lost, is_done = state == "lost", step >= self.total
        whole = (
            step
            if is_drained or is_done
            else first + int((step - first) * STEP_S // SAVED_S * SAVED_S / STEP_S)
        )
        if whole > self.saved:
            self.save(live, whole, is_needed=is_lost or is_drained)
        ended = None
        if not is_lost and is_done:
            ended = Ended(exit_code=0, reason="succeeded")
        elif not is_lost and is_drained:
            ended = Ended(exit_code=85, reason="drained")
        self.say(live, step, trained_s, first, ended)
        if is_lost or ended is not None:
            self.ended.add(live.key)
        if ended is not None:
            self.backend.end(live.handle, exit_code=ended.exit_code, reason=ended.reason)

    def save(self, live: AttemptState, step: int, *, is_needed: bool) -> None:
        """Complete a checkpoint; only those that a later attempt reads are written."""
        self.saved, self.saved_name = step, checkpoint_name(live.generation, step, live.number)
        if is_needed:
            manifest = Manifest(step=step, generation=live.generation, attempt=live.number)
            self.run.write(f"checkpoints/{self.saved_name}/manifest-c1.json", manifest.to_json())

    def say(self, live: AttemptState, step: int, trained_s: float, first: int, ended: Ended | None) -> None:
        """Write the status."""
        self.sequence += 1
        is_up = trained_s > 0
        own = (
            self.saved_name
            if self.saved_name and parse_checkpoint_name(self.saved_name)[2] == live.number
            else None
        )
        status = Status(
            generation=live.generation,
            attempt=live.number,
            node=0,
            sequence=self.sequence,
            phase="ended" if ended else "running" if is_up else "setup",
            progress=Progress(
                step=step if is_up else None,
                total_steps=self.total,
                elapsed_s=trained_s if is_up else None,
                first_step_s=min(STEP_S, trained_s) if is_up else None,
                save_s=0.0 if is_up else None,
            ),
            start_step=first,
            setup_s=self.start_s if is_up else None,
            last_checkpoint=own,
            last_checkpoint_step=self.saved if own else None,
            ended=ended,
        )
        self.run.write(status_name(live.generation, live.number, 0), status.to_json())


@dataclass(frozen=True)
class LiveRun:
    """One job, as :class:`~envscaler_airflow.simulate.spot.SpotRun`."""

    cost_usd: float
    finished_h: float
    is_late: bool
    attempts: int
    moves: int
    events: int


def live(
    market: Market,
    *,
    work_s: float,
    deadline_s: float,
    start_s: float,
    folder: str,
    spec: EnvSpec,
    trace: bool = False,
) -> LiveRun:
    """Run one job on *market* through the owner and the scaling watcher, in a store below *folder*."""
    clock = ManualClock()
    store = open_store(f"file://{folder}")
    check_store(store)
    run = Run(store, KEY, clock=clock.time)
    backend = MarketBackend(market, clock)
    stage = Stage(spec=spec, spec_source="train.yaml", strategy="deadline", deadline_s=deadline_s)
    owner = Owner(run=run, backend=backend, actor=Actor("ti-01", 1, 3, life="life-1"), stage=stage)
    training = Training(run, backend, start_s, work_s)
    sensor = ScalingWatcher(run=run, backend=backend, monotonic=clock.monotonic)
    result = owner.enter()
    while isinstance(result, Waiting):
        if trace:
            print(f"{backend.elapsed_s() / 3600:7.3f} h  {result.reason}")
        result = owner.resume(_watched(result, run, backend, training, sensor, trace=trace))
    assert isinstance(result, Delivered)
    state = run.events.load()
    finished_s = (state.attempts[-1].ended_at or clock.time()) - backend.begun
    usd = sum(attempt.end.usd or 0.0 for attempt in state.attempts)
    moves = sum(attempt.stop_reason == "move" for attempt in state.attempts)
    return LiveRun(
        usd, finished_s / 3600, finished_s > deadline_s + 1e-6, len(state.attempts), moves, state.number
    )


def _watched(
    waiting: Waiting,
    run: Run,
    backend: MarketBackend,
    training: Training,
    sensor: ScalingWatcher,
    *,
    trace: bool,
) -> Any:
    """Let time pass, with checks of the sensor, until the owner is needed."""
    clock = backend.clock
    watch = AttemptWatcher(run=run, backend=backend, watching=waiting.watching, monotonic=clock.monotonic)
    state = run.events.load()
    began, checked = clock.monotonic(), clock.monotonic()
    while True:
        backend.follow()
        training.advance(state.live)
        wake = watch.poll()
        if wake is not None:
            run.lease.renew(holder="ti-01", ages=watch.ages())
            clock.advance(SLOT_S)
            return wake
        wants = False
        if state.live is not None and state.live.handle is not None and clock.monotonic() >= checked:
            seen = sensor.snapshot()
            checked = clock.monotonic() + CHECK_S
            if seen.check is not None:
                decision = seen.check.decision
                wants = bool(decision.wanted)
                if decision.action == "move":
                    if trace:
                        told = f"{decision.target.name}: {decision.reason}"
                        print(f"{backend.elapsed_s() / 3600:7.3f} h  sensor: {told}")
                    because = {
                        "reason": decision.reason,
                        "numbers": dict(decision.numbers),
                        "check": seen.check.to_dict(),
                    }
                    attempt = (seen.check.observation.generation, seen.check.observation.attempt)
                    request_move(run, target=decision.target, from_attempt=attempt, because=because)
                    clock.advance(SLOT_S)
                    continue
        clock.advance(_idle_s(waiting, backend, training, state.live, began, wants=wants))


def _idle_s(
    waiting: Waiting,
    backend: MarketBackend,
    training: Training,
    live: AttemptState | None,
    began: float,
    *,
    wants: bool,
) -> float:
    """Seconds until something can happen."""
    elapsed, gap_s = backend.elapsed_s(), backend.market.gap_s
    if waiting.watching.stopping:
        return POLL_S
    if wants:
        return CHECK_S
    steps = [gap_s - (elapsed + backend.market.offset_s) % gap_s or gap_s]
    if training.trained_s(live) < MEASURED_S:
        steps.append(CHECK_S)
    if waiting.watching.backoff_s is not None:
        steps.append(began + waiting.watching.backoff_s - backend.clock.monotonic())
    asked = [at + (backend.market.ask_s or 0.0) - elapsed for at in backend.asked.values()]
    steps += [one for one in (*asked, training.next_s(live)) if one > 0]
    return max(1.0, min(steps))


def spec_in(folder: Path) -> EnvSpec:
    """The spec of the stage."""
    path = folder / "train.yaml"
    path.write_text(SPEC)
    return load_spec(path)


def pair(
    traces: Traces, window: Window, cell: SpotCell, *, offset_s: float = 0.0
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The same start, live and simulated; both billed by the second."""
    job = cell.job(window.gap_s)
    met = excerpt(traces, (window.zone,), window.start_tick, job.ticks + 1)
    market = Market(
        met.zones, window.gap_s, {window.zone: job.spot_usd}, job.on_demand_usd, cell.ask_s, offset_s
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        ran = live(
            market,
            work_s=job.work_s,
            deadline_s=job.ticks * job.gap_s,
            start_s=job.overhead_s,
            folder=f"{folder}/store",
            spec=spec_in(Path(folder)),
        )
    zones = {name: row[: job.ticks] for name, row in met.zones.items()}
    run = simulate_spot(job, zones, DeadlinePolicy(), history=met.past, ask_s=cell.ask_s)
    unused_h = len(run.answers) * job.gap_s / 3600 - run.finished_h
    usd = run.cost_usd - unused_h * (job.on_demand_usd if run.answers[-1] == ON_DEMAND else job.spot_usd)
    return (
        {"usd": ran.cost_usd, "late": ran.is_late, "attempts": ran.attempts, "moves": ran.moves},
        {"usd": usd, "late": run.is_late},
    )


def small(traces: Traces, windows: Sequence[Window], number: int) -> tuple[Window, SpotCell, float]:
    """Job *number* of 2 to 8 h of work with 0.3 to 2 h of slack, and how far into a tick it begins."""
    random = Random(number)  # jobs, not secrets
    window = random.choice(windows)
    work_h, slack_h = random.uniform(2.0, 8.0), random.uniform(0.3, 2.0)
    last = traces.first + len(traces.zones[window.zone]) - 80
    window = replace(window, start_tick=random.randint(traces.first, last))
    ticks = math.ceil((work_h + slack_h + 0.2) * 3600 / window.gap_s)
    cell = SpotCell(work_h, ticks * window.gap_s / 3600, 0.2, 3.06, 0.9731)
    return window, cell, random.uniform(0.0, window.gap_s)


def small_pair(
    traces: Traces, windows: Sequence[Window], number: int
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Job *number* of :func:`small`, live and simulated."""
    window, cell, offset_s = small(traces, windows, number)
    return pair(traces, window, cell, offset_s=offset_s)


def print_cell(name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> None:
    """One line."""
    ours, theirs = ([one[at] for one in pairs] for at in (0, 1))
    mean = [sum(one["usd"] for one in rows) / len(rows) for rows in (ours, theirs)]
    late = [sum(one["late"] for one in rows) for rows in (ours, theirs)]
    attempts = sum(one["attempts"] for one in ours) / len(ours)
    print(
        f"{name:24} {len(ours):5} jobs  live {mean[0]:7.2f}  simulated {mean[1]:7.2f}  "
        f"apart {mean[0] / mean[1] - 1:+.2%}  late {late[0]:.0f} {late[1]:.0f}  attempts {attempts:.1f}",
        flush=True,
    )


def cells_of(text: str) -> list[tuple[float, float]]:
    """``52x0.2,70x0.2``."""
    return [(float(one.split("x")[0]), float(one.split("x")[1])) for one in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every cell that was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spot", type=Path, required=True, help="folder with the spot traces")
    parser.add_argument("--cells", type=cells_of, default=cells_of("52x0.2,70x0.2"))
    parser.add_argument("--every", type=int, default=1, help="every n-th start")
    parser.add_argument(
        "--ask", default="", help="seconds of a request, where only that shows a zone's state"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--small", type=int, default=0, help="how many small jobs")
    asked = parser.parse_args(arguments)
    traces = read_traces(asked.spot / DATA)
    windows = of_dataset(read_windows(asked.spot / "windows.csv"), asked.spot / DATA)[:: asked.every]
    begun = time.monotonic()
    # All jobs of a process share the tables; those of a worker are as short-lived as its execution.
    deadline_policy.packed_table = lru_cache(maxsize=64)(deadline_policy.packed_table.__wrapped__)
    with ProcessPoolExecutor(asked.workers) as pool:
        for deadline_h, overhead_h in asked.cells:
            for ask in asked.ask.split(",") if asked.ask else [""]:
                cell = SpotCell(48.0, deadline_h, overhead_h, 3.06, 0.9731, float(ask) if ask else None)
                pairs = list(pool.map(partial(pair, traces, cell=cell), windows))
                print_cell(f"{deadline_h:g} h, {overhead_h:g} h" + (f", ask {ask} s" if ask else ""), pairs)
        if asked.small:
            numbers = range(asked.small)
            print_cell("2 to 8 h, 0.2 h", list(pool.map(partial(small_pair, traces, windows), numbers)))
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
