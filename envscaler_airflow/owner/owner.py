"""The one place that acts: observe, decide, record the intent, act, record.

Only the owner of a stage calls it: the operator's executions on a worker, or a
waiting shell. Every step can be repeated: if an execution dies at any line, the
next one reads the events and continues.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.backends.base import SILENT, Backend, ReplacesNodes
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    NoOfferError,
    ProtocolError,
    RunFailedError,
    SpecError,
)
from envscaler_airflow.owner import (
    choose,
    facts,
    freeze,
    in_place_change,
    learn,
    limits,
    move,
    report,
    resume,
    start,
    stop,
)
from envscaler_airflow.owner.owned_run import OwnedRun, live_of
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    StoppedError,
    SupersededError,
    Waiting,
    Wake,
    Watching,
)
from envscaler_airflow.run import (
    Action,
    Actor,
    AttemptState,
    Facts,
    Handle,
    Observed,
    RunState,
    enter,
    fold,
    next_action,
    outcome_of,
)
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.run.event_bodies import AttemptReleased, ReleaseFailed
from envscaler_airflow.store.availability import forget
from envscaler_airflow.store.outputs import output_prefix
from envscaler_airflow.store.run import RESULT, Run

log = logging.getLogger(__name__)

_Result = RunState | Waiting | Delivered

RELEASE_S = 600.0
"""How long a finished run waits for its machines to be released, seconds. Chosen: longer than an API
server takes to restart; the next stage need not wait longer for what `envscaler reap` can remove."""
RELEASE_EVERY_S = 30.0
"""Interval between two tries to release, seconds. Chosen: two statuses of a node."""


class Owner:
    """Starts and stops the attempts of one run, on behalf of one try of the stage's task."""

    def __init__(
        self,
        *,
        run: Run,
        backend: Backend,
        actor: Actor,
        stage: Stage,
        before: Callable[[Action], None] = lambda _action: None,
    ) -> None:
        """Act on *run*, through *backend*, as *actor*, for what *stage* requests: :attr:`owned`.

        *before* is called with each action before it is carried out; an error that it raises ends the
        execution.
        """
        self.owned = OwnedRun(run, backend, actor, stage)
        self._releaser = Releaser(self.owned)
        self._before = before

    def enter(self) -> Waiting | Delivered:
        """Run what ``execute`` does: begin, adopt or deliver the run, then advance it as far as possible.

        Raises:
            RunFailedError, BudgetError, StoppedError: The run is over; never retry.
            SpecError, NoOfferError: The spec must change; never retry.
            SupersededError: Another try owns the run.
            StoreError, BackendError: No answer; retry if transient.
            ProtocolError: A newer version wrote events that this version does not know.
        """
        if self.owned.stage.spec is None:
            raise RuntimeError("execute needs the spec")
        state = self.owned.run.events.load()
        self._check_newest(state)
        frozen = freeze.freeze(self.owned.stage.spec, self.owned.run.store)
        try:
            state = self._entered(state, frozen)
        finally:
            frozen.discard()
        return self._advance(state, Wake("entry"))

    def _entered(self, state: RunState, frozen: freeze.Frozen) -> RunState:
        """Return the state in which this try is the owner, after checking events that others appended."""
        state = fold(self.owned.run.events.read(after=state.number), state)  # packing a workdir takes time
        while not self.owned.is_ours(state):
            state = self._entry(state, frozen)
            self._log_kept_stop(state)
        return state

    def _log_kept_stop(self, state: RunState) -> None:
        if state.cleared_number != state.number:
            return
        for one in state.pending:
            if one.is_of_person and one.number > state.overridden_number:
                log.warning(
                    "%s: requested before this try began, and perhaps after the clear, so the run stops; "
                    "one more clear overrides that",
                    one.body.reason or "a stop",
                )

    def check_newest(self) -> None:
        """Raise if a newer try owns the run; callers check this before they write anything.

        Raises:
            SupersededError: A newer try of this DAG run, or a later DAG run of the same name, owns it.
            StoreError: The store cannot be read.
        """
        self._check_newest(self.owned.run.events.load())

    def _check_newest(self, state: RunState) -> None:
        self.owned.check_whole(state)
        entry = enter(state, self.owned.actor)
        if entry.kind == "superseded":
            raise SupersededError(f"run {self.owned.run.prefix}: {entry.reason}; it does nothing")

    def _entry(self, state: RunState, frozen: freeze.Frozen) -> RunState:
        self._check_newest(state)
        fresh = self.owned.stage.restart == "fresh"
        entry = enter(state, self.owned.actor, spec_hash=frozen.spec_hash, fresh=fresh)
        log.debug("run=%s entry=%s reason=%r", self.owned.run.prefix, entry.kind, entry.reason)
        if entry.kind == "begin":
            freeze.write(self.owned.run, frozen)
            return self.owned.append(state, self._new_generation(state, frozen, entry.reason))
        spent = self.owned.spent_usd(state)
        if (fault := choose.budget_fault(self.owned.stage, spent)) is not None:
            log.warning("%s", fault)
        if entry.respec:
            freeze.write(self.owned.run, frozen)
        elif frozen.spec_hash != state.spec_hash and not self.owned.actor.is_shell:
            self._log_differences(state, frozen)
        if entry.kind == "deliver" and self.owned.actor.is_shell:
            self._refuse_differences(state, frozen)
        elif entry.kind == "deliver" and state.delivered:
            log.warning(
                "hands over the result of generation %d again; restart='fresh' trains from the start",
                state.generation,
            )
        spec_hash = frozen.spec_hash if entry.respec else state.spec_hash
        return self.owned.append(state, bodies.NewOwner(reason=entry.reason, spec_hash=spec_hash))

    def _log_differences(self, state: RunState, frozen: freeze.Frozen) -> None:
        log.warning(
            "the spec differs from the one that the run was begun with (%s); that counts from the next clear",
            self._differences(state, frozen),
        )

    def _differences(self, state: RunState, frozen: freeze.Frozen) -> str:
        try:
            return freeze.differences(self.owned.run, state.spec_hash, frozen)
        except ProtocolError as err:
            return str(err)

    def _refuse_differences(self, state: RunState, frozen: freeze.Frozen) -> None:
        """Refuse to deliver a result that another spec made: a person would take it for that of this one.

        Raises:
            SpecError: The spec, its parameters, inputs or code differ.
        """
        if frozen.spec_hash != state.spec_hash:
            raise SpecError(
                f"run {self.owned.run.prefix}: succeeded before with another spec or code (differs: "
                f"{self._differences(state, frozen)}); write --restart fresh, or another --name"
            )

    def resume(self, wake: Wake) -> Waiting | Delivered:
        """Run what every later execution does. Raises as :meth:`enter`."""
        log.debug("run=%s wake=%s detail=%r", self.owned.run.prefix, wake.kind, wake.detail)
        state = self.owned.run.events.load()
        result = self._advance(state, wake)
        if isinstance(result, Waiting) and result.watching.number == state.number:  # the owner took no action
            return replace(result, watching=replace(result.watching, answered=tuple(wake.seen)))
        return result

    def time_out(self, reason: str) -> None:
        """Stop the run because the task's time is over: the live attempt saves and ends. Returns at once.

        The request is written to the events first. It then counts even if the attempt ends meanwhile, and
        also when no attempt is live.
        """
        self.owned.check_owner(state := self.owned.run.events.load())
        if state.status != "active":
            return
        if not any(item.is_timeout for item in state.pending):
            stop_now = bodies.StopRequested(
                reason=reason,
                by=f"ti {self.owned.actor.ti_id}",
                ti_id=self.owned.actor.ti_id,
                stop_reason="timeout",
            )
            self.owned.run.events.append_request(stop_now, actor=None)
        self.owned.check_owner(state := self.owned.run.events.load())
        asked = next((item for item in state.pending if item.is_timeout), None)
        if asked is not None and state.live is not None and state.live.phase == "started":
            stop.stop(self.owned, state, Action("stop", stop_reason="timeout", reason=reason, request=asked))

    def _advance(self, state: RunState, wake: Wake) -> Waiting | Delivered:
        self._releaser.begin()
        if state.begun_at is not None:
            self.owned.stage = self.owned.stage.since(state.begun_at)
        while True:
            self.owned.check_whole(state)
            state = self._releaser.release_all(state)
            self.owned.check_owner(state)  # also of what other tries wrote while machines were released
            if state.status in ("succeeded", "failed", "stopped"):
                waiting = self._releaser.waiting(state)
                if waiting is not None:
                    return waiting
            action = next_action(state, self._facts(state, wake))
            log.debug(
                "run=%s event=%d action=%s reason=%r",
                self.owned.run.prefix,
                state.number,
                action.kind,
                action.reason,
            )
            try:
                result = self._act(state, action)
            except (SpecError, NoOfferError, BudgetError):  # recorded: the run has failed
                waiting = self._releaser.waiting(self.owned.run.events.load())
                if waiting is None:
                    raise
                return waiting
            if isinstance(result, Waiting | Delivered):
                return result
            if action.kind in ("start", "end", "kill"):
                wake = Wake("status")
            elif action.kind in ("stop", "change"):  # the expired timer belonged to the previous phase
                wake = replace(wake, kind="status")
            state = result

    def _act(self, state: RunState, action: Action) -> _Result:
        """Return the state after *action*, or the result that ends this execution."""
        self._before(action)
        return _ACTIONS[action.kind](self.owned, state, action)

    def _facts(self, state: RunState, wake: Wake) -> Facts:
        live, last = state.live, state.current
        observed = None
        if live is not None and live.handle is not None:
            observed = self._observed(live, wake)
            if observed is not None and self._replace_lost(live, observed, wake):
                observed = self._observed(live, wake)
        spec = self.owned.spec(state)
        is_full = live is None and last is not None and outcome_of(last.outcome).recovery == "more-memory"
        return Facts(
            observed=observed,
            spent_usd=self.owned.spent_usd(state),
            budget_usd=self.owned.stage.budget_usd,
            reserve_usd=self._reserve_usd(state, observed, wake),
            backoff_is_over=wake.kind in ("backoff", "entry"),
            is_overdue=wake.kind == "overdue",
            memory_limit_bytes=choose.memory_limit_bytes(spec, last),
            memory_cap_bytes=choose.memory_cap_bytes(spec, self.owned.backend.offers() if is_full else ()),
            oom_memory_factor=spec.failure.oom_memory_factor,
            max_fruitless_attempts=spec.failure.max_fruitless_attempts,
            resume=resume.resume_of(self.owned, state) if live is None and last is not None else None,
        )

    def _reserve_usd(self, state: RunState, observed: Observed | None, wake: Wake) -> float:
        """Cost that the live attempt still causes if it is drained now, USD; 0 without a live attempt."""
        if self.owned.stage.budget_usd is None or state.live is None or observed is None:
            return 0.0
        check_s = max(wake.check_s, limits.BUDGET_EVERY_S)
        known = limits.measured_s(state)
        usd = limits.reserve_usd(
            state.live.allocation, check_s=check_s, checkpoint_s=known, status=observed.head
        )
        return usd or 0.0

    def _observed(self, live: AttemptState, wake: Wake) -> Observed | None:
        ages: dict[str, Any] = {"silent_s": wake.silent_s, "quiet_s": wake.quiet_s}
        return facts.observe(self.owned.run, self.owned.backend, live, **ages)

    def _replace_lost(self, live: AttemptState, observed: Observed, wake: Wake) -> bool:
        """Return True if the backend is recreating lost nodes of a live attempt; False if it cannot."""
        is_lost = any(node.state == "lost" or node.reason == "unneeded" for node in observed.nodes)
        if not is_lost or live.handle is None or not isinstance(self.owned.backend, ReplacesNodes):
            return False
        try:
            replaced = self.owned.backend.replace_nodes(live.handle, quiet_s=wake.quiet_s)
        except BackendError as err:
            log.warning("the backend cannot replace the lost nodes: %s", err)
            return False
        if replaced:
            log.info("replaced: %s", ", ".join(replaced))
        return bool(replaced)

    def _new_generation(self, state: RunState, frozen: freeze.Frozen, reason: str) -> bodies.NewGeneration:
        now = self.owned.run.now()
        self.owned.stage.check_deadline(now)
        stage = self.owned.stage.since(now)
        return bodies.NewGeneration(
            generation=state.generation + 1,
            reason=reason,
            spec_hash=frozen.spec_hash,
            spec_source=stage.spec_source,
            strategy=stage.strategy,
            restore_from=stage.restore_from,
            budget_usd=stage.budget_usd,
            deadline_s=stage.deadline_s,
        )


class Releaser:
    """Releases the machines of ended attempts, each once per execution, and bills what keeps running."""

    def __init__(self, owned: OwnedRun) -> None:
        """Release attempts of *owned*."""
        self._owned = owned
        self._tried_at: dict[tuple[int, int], float] = {}
        self._waits: dict[tuple[int, int], str] = {}
        """Attempts that will soon be released, each with what it waits for."""

    def begin(self) -> None:
        """Begin an execution: every attempt is tried again."""
        self._tried_at.clear()
        self._waits.clear()

    def release_all(self, state: RunState) -> RunState:
        """Return the state after trying to release every ended attempt that may still use machines."""
        if state.unknown or not self._owned.is_ours(state):  # another try may have taken over since the last
            return state
        for attempt in state.attempts:
            is_last = attempt is state.attempts[-1]
            if attempt.is_live or attempt.handle is None or attempt.released_at is not None:
                continue
            is_due = is_last or facts.is_unreleased(attempt)
            now = self._owned.run.now()
            if is_due and now - self._tried_at.get(attempt.key, -math.inf) >= RELEASE_EVERY_S:
                self._tried_at[attempt.key] = now
                return self.release_all(self._release(state, attempt, attempt.handle))
        return state

    def record(self, state: RunState, attempt: AttemptState) -> None:
        """Record that an ended attempt is released, with its last bill; the caller then removes it.

        Raises:
            BackendError: Some of it still runs, and is stopped; or the backend does not answer now.
        """
        if attempt.handle is None:
            return
        if why := self._why_held(attempt, attempt.handle):
            raise BackendError(why, transient=True)
        bill = self._bill(attempt, AttemptReleased(generation=attempt.generation, attempt=attempt.number))
        while any(one.key == attempt.key and facts.is_unreleased(one) for one in state.attempts):
            self._owned.actor = state.owner or self._owned.actor  # another try may have taken over meanwhile
            state = self._owned.append(state, bill)

    def _release(self, state: RunState, attempt: AttemptState, handle: Handle) -> RunState:
        bill = AttemptReleased(generation=attempt.generation, attempt=attempt.number)
        self._waits.pop(attempt.key, None)
        try:
            why = self._why_held(attempt, handle)
            if not why:
                bill = self._bill(attempt, bill)
                self._owned.backend.release(handle)
        except BackendError as err:
            why = str(err)
            if err.transient:
                self._waits[attempt.key] = why
        if not why:
            is_news = bill.usage is not None or facts.is_unreleased(attempt)
            return self._owned.append(state, bill) if is_news else state
        log.warning("attempt %d is not released, and is tried again: %s", attempt.number, why)
        if attempt.unreleased:
            return state
        failed = ReleaseFailed(generation=attempt.generation, attempt=attempt.number, detail=why)
        return self._owned.append(state, failed)

    def _why_held(self, attempt: AttemptState, handle: Handle) -> str:
        """Return why the machines of an ended attempt are not released yet; "" if nothing of it runs.

        An attempt recorded as lost that still runs is ended now: everything that it writes is void.
        """
        nodes = self._owned.backend.observe(handle).nodes
        lives = [str(one.node) for one in nodes if one.state in ("pending", "starting", "running")]
        if lives:
            self._owned.backend.stop(handle, grace_s=0)
            why = f"node {', '.join(lives)} still runs, and is stopped"
            self._waits[attempt.key] = why
            return why
        if silent := [str(one.node) for one in nodes if one.state == "lost" and one.reason == SILENT]:
            self._owned.backend.stop(handle, grace_s=0)
            return (
                f"node {', '.join(silent)} does not answer: it may still run, and is stopped once it answers"
            )
        is_unseen = attempt.outcome == "lost" and any(one.state == "unknown" for one in nodes)
        return "whether it still runs is unknown" if is_unseen else ""

    def _bill(self, attempt: AttemptState, released: AttemptReleased) -> AttemptReleased:
        """Return *released* with the backend's last bill, if the bill at the attempt's end was incomplete.

        After a release that failed, a pod that came in place of a silent one may have been billed too. The
        backend may have forgotten machines since, so a complete bill is replaced only by a larger one.

        Raises:
            BackendError: The backend does not answer now.
        """
        is_complete = attempt.end.usage is not None and not facts.may_be_held(attempt)
        if is_complete and not attempt.unreleased:
            return released
        usage, now = facts.final_usage(self._owned.backend, attempt), self._owned.run.now()
        if facts.is_missing(usage, self._owned.run, attempt, now=now):
            return released
        usd = facts.usd_of(attempt, usage, now=now)
        if is_complete and (usd is None or usd <= (attempt.end.usd or 0.0)):
            return released
        return replace(released, usage=facts.billed(usage), usd=usd)

    def waiting(self, state: RunState) -> Waiting | None:
        """Return a short wait while machines of an ended run must still be released; None otherwise."""
        now = self._owned.run.now()
        for attempt in state.attempts:
            why = self._waits.get(attempt.key)
            if why is None or attempt.ended_at is None:
                continue
            if now - max(attempt.ended_at, state.owner_at) < RELEASE_S:  # a later try tries as long again
                watching = Watching(state.number, state.generation, backoff_s=RELEASE_EVERY_S)
                return Waiting(watching, f"attempt {attempt.number} has ended and is not released: {why}")
        return None


def _end(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Record how a started attempt ended, and what it cost."""
    live, end = live_of(state), action.end
    if end is None or live.handle is None:
        raise RuntimeError("an end needs a started attempt")
    reported: dict[str, Any] = asdict(end) | report.measured(owned.run, live)
    if end.outputs is not None:
        reported["outputs"] = _own_outputs(owned, state, live, end.outputs, claim=end.claim or 0)
    ended = bodies.AttemptEnded(generation=live.generation, attempt=live.number, **reported)
    usage = facts.usage_of(owned.backend, live)
    has_run = len(end.missing_nodes or ()) < live.allocation.nodes
    if has_run and facts.is_missing(usage, owned.run, live, now=owned.run.now()):
        usage = facts.least_usage(owned.run, live)
        ended = replace(ended, usage_is_lower_bound=None if usage is None else True)
    if end.outcome == "not-started":
        refused = choose.refused_by(live, end.missing_nodes or ())
        ended = replace(ended, refused=tuple(offer.name for offer in refused))
        if end.failure == "capacity":  # a volume that no machine reaches says nothing about stock
            start.remember_refused(owned, refused, end.detail)
    else:
        _forget_stockouts(owned, live)
    open_until = [item.now for item in usage or () if item.end is None and item.now is not None]
    usd = facts.usd_of(live, usage, now=owned.run.now())
    usage_at = max(open_until, default=None)
    return owned.append(state, replace(ended, usage=facts.billed(usage), usage_at=usage_at, usd=usd))


def _forget_stockouts(owned: OwnedRun, live: AttemptState) -> None:
    """Forget stockouts recorded for the offers of *live*: they were available."""
    for part in live.allocation.parts:
        forget(owned.run.store, part.offer)


def _own_outputs(
    owned: OwnedRun, state: RunState, live: AttemptState, reported: Mapping[str, str], *, claim: int
) -> dict[str, str]:
    """Where this run stores each reported output; URIs from the training's side are not trusted."""
    names = owned.spec(state).outputs.keys() & reported.keys()
    folders = {name: output_prefix(name, attempt=live.key, claim=claim) for name in sorted(names)}
    return {name: owned.run.uri(folder) for name, folder in folders.items()}


def _succeed(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    outputs = action.extra.get("outputs", {})
    return owned.append(state, bodies.Succeeded(generation=state.generation, outputs=outputs))


def _fail(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    if state.status != "failed":
        failed = bodies.Failed(generation=state.generation, reason=action.reason, failure=action.failure)
        return owned.append(state, failed)
    message = report.failure_message(state)
    _write_result(owned, state)
    raise BudgetError(message) if state.failure == "budget" else RunFailedError(message)


def _halt(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    if state.status != "stopped":
        return owned.append(state, bodies.Stopped(generation=state.generation, reason=action.reason))
    _write_result(owned, state)
    again = (
        "start it again by its name to go on"
        if owned.actor.is_shell
        else "clear the task to take it up "
        "(a clear while a worker ran the task may count as a retry: clear it once more)"
    )
    raise StoppedError(f"the run was stopped: {state.reason}; {again}")


def _deliver(owned: OwnedRun, state: RunState, action: Action) -> _Result:
    del action
    after = owned.append(state, bodies.Delivered(generation=state.generation))
    if after.number == state.number or owned.actor not in after.delivered:
        return after
    return Delivered(dict(after.outputs), _write_result(owned, after))


def _mismatch(owned: OwnedRun, state: RunState, action: Action) -> NoReturn:
    raise ProtocolError(f"run {owned.run.prefix}, event {state.number}: {action.reason}")


def _write_result(owned: OwnedRun, state: RunState) -> report.Report:
    found = report.run_report(state, now=owned.run.now())
    whole = {
        "schema": SCHEMA,
        "status": state.status,
        "generation": state.generation,
        "outputs": dict(state.outputs),
        "reason": state.reason,
        "report": found.to_dict(),
    }
    owned.check_still_owner(state)
    owned.run.write(RESULT, json.dumps(whole, indent=1).encode())
    learn.learn(owned, state)
    return found


_ACTIONS: Mapping[str, Callable[[OwnedRun, RunState, Action], _Result]] = {
    "start": start.intend,
    "carry-out": start.carry_out,
    "discard": start.discard,
    "end": _end,
    "stop": stop.stop,
    "kill": stop.kill,
    "judge": move.answer,
    "refuse": move.refuse,
    "change": in_place_change.change,
    "wait": stop.wait,
    "succeed": _succeed,
    "fail": _fail,
    "halt": _halt,
    "deliver": _deliver,
    "mismatch": _mismatch,
}
"""How each action is carried out: the function returns the state after it, or what ends the execution."""
