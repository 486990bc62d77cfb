"""``drill``: break a running stage on purpose, and measure how it comes back."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import click

from envscaler_agent.protocol import Status
from envscaler_airflow.backends.base import Backend, InjectsFaults, NodeFault
from envscaler_airflow.cli.cancel import backend_of
from envscaler_airflow.cli.common import duration_option, echo_json, not_empty, output_option, store_option
from envscaler_airflow.cli.inspect import followed, statuses
from envscaler_airflow.cli.shell_owner import owner_of, watcher_of
from envscaler_airflow.cli.tables import print_rehearsals
from envscaler_airflow.errors import BackendError, ProtocolError, SpecError, StoreError, refuse
from envscaler_airflow.owner import choose
from envscaler_airflow.owner.report import run_bill
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run.event_bodies import MoveDeferred, MoveRefused
from envscaler_airflow.run.recovery import fruitless
from envscaler_airflow.run.rehearsal import (
    FAULTS,
    Bounds,
    Fault,
    NodeSample,
    Rehearsal,
    Sample,
    has_resumed,
    is_detected,
    is_steady,
    judge,
)
from envscaler_airflow.store.run import PLAN, Run
from envscaler_airflow.store.run_store import Store

POLL_S = 1.0
"""How often the run is read, seconds. Chosen: finer than the 15 s between two statuses without a change."""
STEADY_S = 600.0
"""Longest wait for a stage that trains, besides two of its checkpoint intervals, seconds. Chosen."""
ASK_S = 60.0
AGAIN_S = 5.0
"""For how long, and how often, a refused move is requested again, seconds. Chosen: a save is over by then."""
SLACK_S = 30.0
"""For how long a missed bound is watched further, seconds. Chosen: the figure says more than its absence."""
MISSED = 1
"""Exit code where a bound was missed, or a fault could not be injected."""


class CannotError(BackendError):
    """A fault cannot be injected now, or had no effect."""


@dataclass(slots=True)
class Injected:
    """A fault that was injected.

    Attributes:
        did: What was done, on one line.
        undo: Takes it back.
        lasts_s: Seconds until it ends by itself.
        target: Name of the allocation that was requested.
        detect_s: When the owner accepted the request, seconds.
    """

    did: str
    undo: Callable[[], None] = lambda: None
    lasts_s: float = 0.0
    target: str = ""
    detect_s: float | None = None


def _known_faults(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[Fault, ...]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in FAULTS]:
        raise click.BadParameter(f"{unknown[0]!r} is not a fault; write some of {', '.join(FAULTS)}")
    if not names:
        raise click.BadParameter(f"is empty; write some of {', '.join(FAULTS)}")
    return tuple(FAULTS[name] for name in names)


@click.command()
@click.option("--run", "name", required=True, callback=not_empty, help="Run to break; as in `status`.")
@click.option(
    "--faults",
    required=True,
    callback=_known_faults,
    metavar="FAULT,...",
    help=f"What to inject, one after another: {', '.join(FAULTS)}.",
)
@click.option("--node", type=click.IntRange(min=0), help="Node to break; the default is the last one.")
@click.option(
    "--replace-within", "replace_s", default="10m", show_default=True, callback=duration_option,
    metavar="TIME", help="Longest time from a fault to the first new step.",
)  # fmt: skip
@click.option(
    "--pause-within", "pause_s", default="5m", show_default=True, callback=duration_option,
    metavar="TIME", help="Longest time without a step during a move.",
)  # fmt: skip
@click.option("--triggerer", type=click.IntRange(min=2), help="Process id of Airflow's triggerer.")
@click.option(
    "--restart", callback=not_empty, help="Command that starts the process that watched the run again."
)
@click.option("--yes", is_flag=True, help="Do not ask before the start.")
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON report here too."
)
@output_option
@store_option
def drill(
    name: str, *, faults: tuple[Fault, ...], replace_s: float, pause_s: float, yes: bool,
    report: Path | None, as_json: bool, store: Store, **options: Any,
) -> None:  # fmt: skip
    """Break a live run on purpose and measure how it comes back: the exit code is 0 if it kept the bounds.

    It costs the time and the steps that it reports. Only the named run is touched, except by `triggerer`.
    """
    found, state = followed(store, name)
    live = _check(found, state)
    bounds = Bounds(replace_s, pause_s)
    made = _Drill(found, backend_of(found, state), bounds, lambda line: click.echo(line, err=True), **options)
    _announce(found, live, faults, bounds)
    made.check(faults, state)
    if not yes:
        click.confirm("Break it now?", abort=True, err=True)
    results: list[Rehearsal] = []
    try:
        for fault in faults:
            results.append(made.rehearse(fault))  # noqa: PERF401  (an interrupt keeps what is done)
    finally:
        body = {
            "run": found.prefix,
            "passed": len(results) == len(faults) and all(one.is_passed for one in results),
            "bounds": bounds.to_dict(),
            "faults": [one.to_dict() for one in results],
        }
        _print_report(body, results, report, as_json=as_json)
    if not body["passed"]:
        click.get_current_context().exit(MISSED)


def _print_report(
    body: dict[str, Any], results: Sequence[Rehearsal], path: Path | None, *, as_json: bool
) -> None:
    """Print what was done so far, and write it to *path*."""
    if as_json:
        echo_json(body)
    else:
        print_rehearsals(results)
    if path is not None:
        path.write_text(f"{json.dumps(body, indent=1)}\n", encoding="utf-8")


def _check(run: Run, state: RunState) -> AttemptState:
    """The live attempt of a run that can be drilled.

    Raises:
        SpecError: The run has ended, has no owner, or trains nowhere now.
        ProtocolError: Its key, its spec or an event cannot be read.
    """
    if state.status != "active":
        why = f": {state.reason}" if state.reason else ""
        raise SpecError(f"{run.prefix}: {state.status}{why}; a drill needs a run that trains now")
    run.key()
    run.spec(state.spec_hash)
    if state.unknown:
        raise ProtocolError(
            f"{run.prefix}: event {state.unknown[0]} is of a newer version, so its owner only watches: "
            "upgrade envscaler-airflow first"
        )
    owner = owner_of(run, state)
    if owner.presence == "gone":
        raise SpecError(
            f"{run.prefix}: no owner watches it ({owner.name}, {owner.why}), so nothing would replace what a "
            "drill breaks; start it again by its name first"
        )
    if state.live is None:
        raise SpecError(f"{run.prefix}: no attempt of it runs now; wait until `envscaler status` shows one")
    return state.live


def _announce(run: Run, live: AttemptState, faults: Sequence[Fault], bounds: Bounds) -> None:
    """Print what will be done to which run, before anything is."""
    owner = owner_of(run, run.events.load())
    lines = [f"{run.prefix}: attempt {live.number} on {live.allocation.name}, owner {owner.name}"]
    lines += [f"  {fault.name}: {fault.text}" for fault in faults]
    replaced, pause = duration_text(bounds.replace_s), duration_text(bounds.pause_s)
    lines.append(f"bounds: a new step within {replaced}, moves pause at most {pause}, no saved step is lost")
    if run.spec(live.spec_hash).checkpoint is None:
        lines.append("the stage saves no checkpoint: a fault that ends its attempt restarts it at step 0")
    click.echo("\n".join(lines), err=True)


@dataclass(slots=True)
class _Drill:
    """Faults on one run, one after another.

    Attributes:
        run, backend: What runs, and where.
        bounds: What it must keep to.
        say: Prints a line.
        node: The node to break; None for the last one.
        triggerer: Process id of the triggerer; None for a run from a shell.
        restart: Command that starts what watched the run again; None if something else does.
    """

    run: Run
    backend: Backend
    bounds: Bounds
    say: Callable[[str], None]
    node: int | None = None
    triggerer: int | None = None
    restart: str | None = None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    _zero: float = field(init=False, default=0.0)

    def check(self, faults: Sequence[Fault], state: RunState) -> None:
        """Refuse faults that cannot be injected, before any of them is.

        Raises:
            SpecError: Names each with its reason.
        """
        found, has_moved = [], False
        for fault in faults:
            try:
                if fault.course != "moved":
                    self._check_node(fault, state)
                elif not has_moved:  # after a move, other ones are possible
                    self._target(fault, state)
            except (CannotError, SpecError) as err:
                found.append(f"{fault.name}: cannot be injected here: {err}")
            has_moved = has_moved or fault.course == "moved"
        refuse(found)

    def rehearse(self, fault: Fault) -> Rehearsal:
        """Wait until the stage trains, inject *fault*, watch the run, and judge what was seen."""
        try:
            steady = self._await_steady(fault)
            injected = self._inject(fault)
        except BackendError as err:
            self.say(f"-- {fault.name}: {err}")
            return Rehearsal(fault=fault.name, missed=(str(err),))
        self.say(f"-- {fault.name}: {injected.did}")
        try:
            before = replace(steady, at_s=0.0)
            if fault.course == "undisturbed":
                before = replace(self._sample(), at_s=-injected.lasts_s)
            self._zero += injected.lasts_s
            seen = self._watch(fault, before, injected)
        finally:
            injected.undo()
        return self._judged(fault, before, seen, injected)

    def _judged(self, fault: Fault, before: Sample, seen: Sequence[Sample], injected: Injected) -> Rehearsal:
        state = self.run.events.load()
        ended = next((one.step for one in state.attempts if one.key == before.attempt), None)
        found = judge(
            fault,
            before,
            seen,
            bounds=self.bounds,
            target=injected.target,
            node=self._node(state) if self.node is None else self.node,
            last_step=ended,
            detect_s=injected.detect_s,
        )
        self.say(f"-- {fault.name}: " + ("; ".join(found.missed) or "all bounds kept"))
        return replace(found, did=injected.did)

    # -- what is seen

    def _sample(self) -> Sample:
        """The run now. Raises StoreError."""
        state = self.run.events.load()
        live = state.live
        said = [] if live is None or live.phase == "intended" else statuses(self.run, live)
        return Sample(
            at_s=self.monotonic() - self._zero,
            status=state.status,
            reason=state.reason,
            attempt=None if live is None else live.key,
            is_started=live is not None and live.phase == "started" and live.change is None,
            allocation="" if live is None else live.allocation.name,
            usd_per_hour=None if live is None else live.allocation.usd_per_hour,
            nodes=tuple(None if node is None else _reported(node) for node in said),
            lease=self.run.lease.known().counter,
            usd=_usd_by_attempt(state, now=self.run.now()),
        )

    def _await_steady(self, fault: Fault) -> Sample:
        """The run once it trains; after a loss, the next one needs a checkpoint, so that the run goes on.

        Raises:
            CannotError: It does not in time, or has ended.
        """
        spec = self.run.spec(self.run.events.load().spec_hash)
        every = spec.checkpoint.every.seconds if spec.checkpoint is not None else None
        needs_checkpoint = fault.course == "replaced" and spec.checkpoint is not None
        patience_s = STEADY_S + (2 * (every or 0.0) if needs_checkpoint else 0.0)
        began, is_said = self.monotonic(), False
        while True:
            sample = self._sample()
            if is_steady(sample, needs_checkpoint=needs_checkpoint):
                return sample
            if sample.status != "active":
                raise CannotError(f"the run has ended: {sample.status}")
            if self.monotonic() - began >= patience_s:
                saved = " and has saved a checkpoint" if needs_checkpoint else ""
                raise CannotError(f"not within {duration_text(patience_s)} was it seen that it trains{saved}")
            if not is_said:
                saved = ", and for a checkpoint of this attempt" if needs_checkpoint else ""
                self.say(f"-- {fault.name}: waiting for a step{saved}")
            is_said = True
            self.sleep(POLL_S)

    def _watch(self, fault: Fault, before: Sample, injected: Injected) -> list[Sample]:
        """Samples up to the first new step, the end of the run, or the end of the longest bound."""
        seen: list[Sample] = []
        most_s, is_told = self.bounds.replace_s + SLACK_S, False
        while not seen or (seen[-1].status == "active" and seen[-1].at_s < most_s):
            try:
                seen.append(self._sample())
            except StoreError as err:
                self.say(f"-- the store does not answer: {err}")
            if seen and not is_told and is_detected(fault.course, before, seen[-1]):
                is_told = True
                self.say(f"-- {fault.name}: detected after {seen[-1].at_s:.0f} s")
            if seen and has_resumed(fault, before, seen, target=injected.target):
                break
            self.sleep(POLL_S)
        return seen

    # -- what is injected

    def _node(self, state: RunState) -> int:
        return 0 if state.live is None else state.live.allocation.nodes - 1

    def _inject(self, fault: Fault) -> Injected:
        """Inject it; times count from here.

        Raises:
            BackendError: It cannot be injected.
        """
        state = self.run.events.load()
        self._zero = self.monotonic()
        if fault.course == "moved":
            return self._move(fault)
        self._check_node(fault, state)
        if fault.name == "triggerer":
            return self._kill_watcher(state)
        backend, live = self.backend, state.live
        if not isinstance(backend, InjectsFaults) or live is None or live.handle is None:
            raise CannotError("its attempt has ended meanwhile")
        node = self._node(state) if self.node is None else self.node
        made = backend.inject(live.handle, cast("NodeFault", fault.name), node=node)
        if made.by_hand:
            self.say(f"-- if this command is killed: {made.by_hand}")
        return Injected(made.did, made.undo, made.lasts_s)

    def _check_node(self, fault: Fault, state: RunState) -> None:
        """Raises CannotError or SpecError for an obstacle."""
        if fault.name == "triggerer":
            watcher_of(self.run, state, self.triggerer)
            return
        backend, live = self.backend, state.live
        if not isinstance(backend, InjectsFaults):
            raise CannotError(f"backend {backend.name} cannot inject faults")
        if live is None or live.handle is None:
            raise CannotError("its attempt has not started")
        node = self._node(state) if self.node is None else self.node
        if obstacle := backend.obstacle(live.handle, cast("NodeFault", fault.name), node=node):
            raise CannotError(obstacle)
        spec = self.run.spec(live.spec_hash)
        most = spec.failure.max_fruitless_attempts
        if fault.course == "replaced" and spec.checkpoint is None and fruitless(state) + 1 >= most:
            raise CannotError(f"the run saves nothing, and {most} lost attempts in a row end it")
        if fault.name == "oom":
            limit, cap = (
                choose.memory_limit_bytes(spec, live),
                choose.memory_cap_bytes(spec, backend.offers()),
            )
            if limit is not None and cap is not None and limit >= cap:
                raise CannotError("the run is at its memory cap, and would fail instead of being resumed")

    def _kill_watcher(self, state: RunState) -> Injected:
        """Kill what watches the run; then start it again, if there is a command for it."""
        process = watcher_of(self.run, state, self.triggerer)
        before = self._sample()
        process.signal(signal.SIGKILL)
        did = f"killed process {process.pid}, which watched the run"
        until = self.monotonic() + ASK_S
        while (self._sample().step or 0) <= (before.step or 0) and self.monotonic() < until:
            self.sleep(POLL_S)
        if self.restart is None:
            self.say(f"-- {did}; waiting until it is started again")
            return Injected(did)
        log = Path(tempfile.mkstemp(prefix="envscaler-drill-", suffix=".log")[1])
        with log.open("wb") as output:
            started = subprocess.Popen(
                shlex.split(self.restart),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return Injected(f"{did}; process {started.pid} was started for it, with its output in {log}")

    def _target(self, fault: Fault, state: RunState) -> Allocation:
        """What the move goes to, among the targets of the run's plan.

        Raises:
            CannotError: There is none.
        """
        live = state.live
        if live is None:
            raise CannotError("no attempt of it runs now")
        here = live.allocation
        try:
            targets = [Allocation.from_dict(one) for one in self.run.plan().get("targets", ())]
        except (ProtocolError, ValueError, TypeError) as err:
            raise CannotError(f"{self.run.uri(PLAN)} cannot be read: {err}") from err
        if fault.name == "change-type":
            others = [one for one in targets if one.nodes == here.nodes and one.offer.name != here.offer.name]
            if not others:
                raise CannotError(f"the plan has no other offer for {here.nodes} node(s)")
            return min(others, key=lambda one: (one.usd_per_hour is None, one.usd_per_hour, one.name))
        nodes = here.nodes + (1 if fault.name == "grow" else -1)
        found = [one for one in targets if one.nodes == nodes and one.offer.name == here.offer.name]
        if not found:
            raise CannotError(f"the plan has no allocation of {nodes} node(s) of {here.offer.name}")
        return min(found, key=lambda one: one.is_mixed is not here.is_mixed)

    def _move(self, fault: Fault) -> Injected:
        """Request the move, as a person would; again if it is refused, as it is during a save.

        Raises:
            CannotError: The owner refused it for :data:`ASK_S`, or put it off.
        """
        until, why = self.monotonic() + ASK_S, ""
        while self.monotonic() < until:
            state = self.run.events.load()
            target = self._target(fault, state)
            live = cast("AttemptState", state.live)
            self._zero = self.monotonic()
            because = {"reason": f"drill: {fault.text}", "forced": True}
            asked = request_move(self.run, target=target, from_attempt=live.key, because=because)
            why = self._answer(asked.number)
            if not why:
                detect_s = self.monotonic() - self._zero
                return Injected(f"requested a move to {target.name}", target=target.name, detect_s=detect_s)
            self.sleep(AGAIN_S)
        raise CannotError(f"the owner refused the move: {why}")

    def _answer(self, request: int) -> str:
        """Why the owner refused the request; "" once it accepted it.

        Raises:
            CannotError: It put the move off, or gave no answer in time.
        """
        until = self.monotonic() + self.bounds.replace_s
        while self.monotonic() < until:
            for event in self.run.events.read(after=request):
                body = event.body
                if getattr(body, "request", None) != request:
                    continue
                if isinstance(body, MoveDeferred):
                    raise CannotError(f"the owner put the move off until the next start: {body.reason}")
                return (body.reason or "without a reason") if isinstance(body, MoveRefused) else ""
            self.sleep(POLL_S)
        raise CannotError(f"the owner gave no answer within {duration_text(self.bounds.replace_s)}")


def _usd_by_attempt(state: RunState, *, now: float) -> dict[tuple[int, int], float | None]:
    """Cost so far of each attempt, its changes in place included; None: unknown."""
    found: dict[tuple[int, int], float | None] = {}
    for line in run_bill(state, now=now).lines:
        key = (line.use.generation, line.use.attempt)
        before = found.get(key, 0.0)
        found[key] = None if before is None or line.usd is None else before + line.usd
    return found


def _reported(node: Status) -> NodeSample:
    speed = node.progress.steps_per_s
    return NodeSample(
        claim=node.claim,
        sequence=node.sequence,
        phase=node.phase,
        step=node.progress.step,
        start_step=node.resumed_at,
        saved_step=node.last_checkpoint_step,
        step_s=node.progress.step_time_s or (1 / speed if speed else None),
        first_step_s=node.progress.first_step_s,
    )
