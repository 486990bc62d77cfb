"""The one place that acts: observe, decide, record the intent, act, record.

Only the owner of a stage calls it: the operator's executions on a worker, or a
waiting shell. Every step can be repeated: if an execution dies at any line, the
next one reads the events and continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from envscaler_agent import protocol
from envscaler_airflow.backends.base import MendsNodes, OffersLater, RunsMixed
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
    intent,
    limits,
    losses,
    report,
    validate_move,
)
from envscaler_airflow.owner.intent import Intending
from envscaler_airflow.owner.ownership import live_of
from envscaler_airflow.owner.stage import (
    Delivered,
    StoppedError,
    SupersededError,
    Waiting,
    Wake,
    Watching,
)
from envscaler_airflow.planning import Allocation
from envscaler_airflow.run import (
    Action,
    AttemptState,
    Facts,
    Observed,
    RunState,
    enter,
    fold,
    next_action,
    outcome_of,
)
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.store.claims import creates_exclusively
from envscaler_airflow.store.outputs import output_prefix
from envscaler_airflow.store.run import RESULT
from envscaler_airflow.store.stockouts import forget

log = logging.getLogger(__name__)

_Result = RunState | Waiting | Delivered


class Controller(Intending):
    """Acts on one run, on behalf of one try of the stage's task."""

    def enter(self) -> Waiting | Delivered:
        """Run what ``execute`` does: begin, adopt or deliver the run, then advance it as far as possible.

        Raises:
            RunFailedError, BudgetError, StoppedError: The run is over; never retry.
            SpecError, NoOfferError: The spec must change; never retry.
            SupersededError: Another try owns the run.
            StoreError, BackendError: No answer; retry if transient.
            ProtocolError: A newer version wrote events that this version does not know.
        """
        if self._stage.spec is None:
            raise RuntimeError("execute needs the spec")
        state = self._run.events.load()
        self._check_newest(state)
        frozen = freeze.freeze(self._stage.spec, self._run.store)
        try:
            state = self._entered(state, frozen)
        finally:
            frozen.discard()
        return self._advance(state, Wake("entry"))

    def _entered(self, state: RunState, frozen: freeze.Frozen) -> RunState:
        """Return the state in which this try is the owner, after checking events that others appended."""
        state = fold(self._run.events.read(after=state.number), state)  # packing a workdir takes time
        while not self._is_ours(state):
            state = self._entry(state, frozen)
        return state

    def check_newest(self) -> None:
        """Raise if a newer try owns the run; callers check this before they write anything.

        Raises:
            SupersededError: A newer try of this DAG run, or a later DAG run of the same name, owns it.
            StoreError: The store cannot be read.
        """
        self._check_newest(self._run.events.load())

    def _check_newest(self, state: RunState) -> None:
        entry = enter(state, self._actor)
        if entry.kind == "superseded":
            raise SupersededError(f"run {self._run.prefix}: {entry.reason}; it does nothing")

    def _entry(self, state: RunState, frozen: freeze.Frozen) -> RunState:
        self._check_newest(state)
        fresh = self._stage.restart == "fresh"
        entry = enter(state, self._actor, spec_hash=frozen.spec_hash, fresh=fresh)
        log.debug("run=%s entry=%s reason=%r", self._run.prefix, entry.kind, entry.reason)
        if entry.kind == "begin":
            freeze.write(self._run, frozen)
            return self._append(state, self._new_generation(state, frozen, entry.reason))
        spent = facts.spent_usd(state, self._backend, now=self._run.now())
        if (fault := choose.budget_fault(self._stage, spent)) is not None:
            log.warning("%s", fault)
        if entry.respec:
            freeze.write(self._run, frozen)
        elif frozen.spec_hash != state.spec_hash:
            self._say_how_spec_differs(state, frozen)
        if entry.kind == "deliver" and state.delivered:
            log.warning(
                "hands over the result of generation %d again; restart='fresh' trains from the start",
                state.generation,
            )
        spec_hash = frozen.spec_hash if entry.respec else state.spec_hash
        return self._append(state, bodies.NewOwner(reason=entry.reason, spec_hash=spec_hash))

    def _say_how_spec_differs(self, state: RunState, frozen: freeze.Frozen) -> None:
        try:
            where = freeze.differences(self._run, state.spec_hash, frozen)
        except ProtocolError as err:
            where = str(err)
        log.warning(
            "the spec differs from the one that the run was begun with (%s); that counts from the next clear",
            where,
        )

    def resume(self, wake: Wake) -> Waiting | Delivered:
        """Run what every later execution does. Raises as :meth:`enter`."""
        log.debug("run=%s wake=%s detail=%r", self._run.prefix, wake.kind, wake.detail)
        state = self._run.events.load()
        result = self._advance(state, wake)
        if isinstance(result, Waiting) and result.watching.number == state.number:  # the owner took no action
            return replace(result, watching=replace(result.watching, answered=tuple(wake.seen)))
        return result

    def time_out(self, reason: str) -> None:
        """Stop the run because the task's time is over: the live attempt saves and ends. Returns at once.

        The request is written to the events first. It then counts even if the attempt ends meanwhile, and
        also when no attempt is live.
        """
        self._check_owner(state := self._run.events.load())
        if state.status != "active":
            return
        if not any(item.is_timeout for item in state.pending):
            stop_now = bodies.StopRequested(reason=reason, by=f"ti {self._actor.ti_id}", why="timeout")
            self._run.events.append_request(stop_now, actor=None)
        self._check_owner(state := self._run.events.load())
        stop = next((item for item in state.pending if item.is_timeout), None)
        if stop is not None and state.live is not None and state.live.phase == "started":
            self._stop(state, Action("stop", why="timeout", reason=reason, request=stop))

    def _advance(self, state: RunState, wake: Wake) -> Waiting | Delivered:
        self._tried.clear()
        self._holding.clear()
        if state.begun_at is not None:
            self._stage = self._stage.since(state.begun_at)
        while True:
            self._check_owner(state)
            state = self._released(state)
            if state.status in ("succeeded", "failed", "stopped"):
                waiting = self._until_released(state)
                if waiting is not None:
                    return waiting
            action = next_action(state, self._facts(state, wake))
            log.debug(
                "run=%s event=%d action=%s reason=%r",
                self._run.prefix,
                state.number,
                action.kind,
                action.reason,
            )
            result = self._act(state, action)
            if isinstance(result, Waiting | Delivered):
                return result
            if action.kind in ("start", "end", "kill"):
                wake = Wake("status")
            elif action.kind in ("stop", "change"):  # the expired timer belonged to the previous phase
                wake = replace(wake, kind="status")
            state = result

    def _act(self, state: RunState, action: Action) -> _Result:
        """Return the state after *action*, or the result that ends this execution."""
        return self._ACTIONS[action.kind](self, state, action)

    def _facts(self, state: RunState, wake: Wake) -> Facts:
        live, last = state.live, state.current
        observed = None
        if live is not None and live.handle is not None:
            observed = self._observed(live, wake)
            if observed is not None and self._mend(live, observed, wake):
                observed = self._observed(live, wake)
        spec = self._spec(state)
        is_full = live is None and last is not None and outcome_of(last.outcome).recovery == "more-memory"
        return Facts(
            observed=observed,
            spent_usd=facts.spent_usd(state, self._backend, now=self._run.now()),
            budget_usd=self._stage.budget_usd,
            reserve_usd=self._reserve_usd(state, observed, wake),
            backoff_is_over=wake.kind in ("backoff", "entry"),
            is_overdue=wake.kind == "overdue",
            memory_limit_bytes=choose.memory_limit_bytes(spec, last),
            memory_cap_bytes=choose.memory_cap_bytes(spec, self._backend.offers() if is_full else ()),
            oom_memory_factor=spec.failure.oom_memory_factor,
            max_fruitless_attempts=spec.failure.max_fruitless_attempts,
        )

    def _reserve_usd(self, state: RunState, observed: Observed | None, wake: Wake) -> float:
        """Cost that the live attempt still causes if it is drained now, USD; 0 without a live attempt."""
        if self._stage.budget_usd is None or state.live is None or observed is None:
            return 0.0
        check_s = max(wake.check_s, limits.BUDGET_EVERY_S)
        known = limits.measured_s(state)
        usd = limits.reserve_usd(
            state.live.allocation, check_s=check_s, checkpoint_s=known, said=observed.head
        )
        return usd or 0.0

    def _observed(self, live: AttemptState, wake: Wake) -> Observed | None:
        ages: dict[str, Any] = {"silent_s": wake.silent_s, "quiet_s": wake.quiet_s}
        return facts.observe(self._run, self._backend, live, **ages)

    def _mend(self, live: AttemptState, observed: Observed, wake: Wake) -> bool:
        """Return True if the backend is recreating lost nodes of a live attempt; False if it cannot."""
        is_lost = any(node.state == "lost" or node.reason == "unneeded" for node in observed.nodes)
        if not is_lost or live.handle is None or not isinstance(self._backend, MendsNodes):
            return False
        try:
            mended = self._backend.mend(live.handle, quiet_s=wake.quiet_s)
        except BackendError as err:
            log.warning("the backend cannot replace the lost nodes: %s", err)
            return False
        if mended:
            log.info("replaced: %s", ", ".join(mended))
        return bool(mended)

    # -- actions: each returns the state after it, or the result that ends the execution

    def _start(self, state: RunState, action: Action) -> _Result:
        try:
            allocation = self._allocation(state, action)
            self._check_claims(allocation)
        except (SpecError, NoOfferError, BudgetError) as err:
            self._append(state, intent.failed(state, err))
            raise
        spec, begun = self._spec(state), state.attempts_of(state.generation)
        sizes = in_place_change.sizes_after(spec, begun[0].begun_on if begun else None, allocation)
        known = [one for one in (action.memory_bytes, sizes.memory_bytes) if one is not None]
        memory = max(known, default=None)  # what the last attempt needed, even beyond the spec's limit
        every_s = losses.checkpoint_every_s(spec, state, allocation, now=self._run.now())
        intended = bodies.AttemptIntended(
            generation=state.generation,
            attempt=len(begun) + 1,
            allocation=allocation,
            reason=action.reason,
            spec_hash=state.spec_hash,
            memory_bytes=memory,
            vcpus=sizes.vcpus,
            checkpoint_every_s=every_s,
            losses_per_hour=None if every_s is None else losses.losses_per_hour(state, now=self._run.now()),
        )
        return self._append(state, intended)

    def _check_claims(self, allocation: Allocation) -> None:
        """Refuse several or replaced nodes on a store where two pods could both get the same claim.

        Raises:
            SpecError: The store has no exclusive create.
        """
        is_replacing = isinstance(self._backend, MendsNodes)
        if (allocation.nodes > 1 or is_replacing) and not creates_exclusively(self._run.store):
            what = f"{allocation.nodes} nodes" + (
                f" that {self._backend.name} replaces" if is_replacing else ""
            )
            raise SpecError(
                f"store {self._run.store.url}: two writers can both create one name there, so a stage on "
                f"{what} is not safe; use s3://, gs://, abfs:// or a shared folder, or one node on another "
                "backend"
            )

    def _allocation(self, state: RunState, action: Action) -> Allocation:
        """Return the target unless it has too little memory now; without a target, the planner's choice."""
        target, memory, now = action.target, action.memory_bytes, self._run.now()
        spent = facts.spent_usd(state, self._backend, now=now)
        if (fault := choose.budget_fault(self._stage, spent)) is not None:
            raise BudgetError(fault)
        if target is not None and (memory is None or choose.least_memory_bytes(target) >= memory):
            return target
        spec, offers = self._spec(state), self._backend.offers()
        goal = choose.goal_of(state, self._stage, spent_usd=spent, now=now)
        sold_out = choose.sold_out_offers(self._run.store, offers, now=now)
        how: dict[str, Any] = {"memory_bytes": memory, "is_mixed": isinstance(self._backend, RunsMixed)}
        made = choose.make_plan(state, spec, offers, goal, sold_out=sold_out, **how)
        if made.chosen is None and isinstance(self._backend, OffersLater):
            offers = (*offers, *self._backend.later_offers())
            made = choose.make_plan(state, spec, offers, goal, sold_out=sold_out, **how)
        for warning in () if state.attempts else choose.warnings_of(spec, offers):
            log.warning("%s", warning)
        self._check_still_owner(state)
        choose.write_plan(self._run, made, spec, offers, **how)
        return made.pick()

    def _was_had(self, live: AttemptState) -> None:
        """Forget stockouts recorded for the offers of *live*: they were available."""
        for part in live.allocation.parts:
            forget(self._run.store, part.offer)

    def _end(self, state: RunState, action: Action) -> _Result:
        live, end = live_of(state), action.end
        if end is None or live.handle is None:
            raise RuntimeError("an end needs a started attempt")
        said: dict[str, Any] = asdict(end) | report.measured(self._run, live)
        if end.outputs is not None:
            said["outputs"] = self._own_outputs(state, live, end.outputs, claim=end.claim or 0)
        ended = bodies.AttemptEnded(generation=live.generation, attempt=live.number, **said)
        usage = facts.usage_of(self._backend, live)
        has_run = len(end.never_came or ()) < live.allocation.nodes
        if has_run and facts.is_missing(usage, live, now=self._run.now()):
            usage = facts.least_usage(self._run, live)
            ended = replace(ended, usage_is_least=None if usage is None else True)
        if end.outcome == "not-started":
            refused = choose.refused_by(live, end.never_came or ())
            ended = replace(ended, refused=tuple(offer.name for offer in refused))
            if end.failure == "capacity":  # a volume that no machine reaches says nothing about stock
                self._remember(refused, end.detail)
        else:
            self._was_had(live)
        reported = [item.now for item in usage or () if item.end is None and item.now is not None]
        usd = facts.usd_of(live, usage, now=self._run.now())
        usage_at = max(reported, default=None)
        return self._append(state, replace(ended, usage=facts.billed(usage), usage_at=usage_at, usd=usd))

    def _own_outputs(
        self, state: RunState, live: AttemptState, said: Mapping[str, str], *, claim: int
    ) -> dict[str, str]:
        """Where this run stores each reported output; URIs from the training's side are not trusted."""
        names = self._spec(state).outputs.keys() & said.keys()
        folders = {name: output_prefix(name, attempt=live.key, claim=claim) for name in sorted(names)}
        return {name: self._run.uri(folder) for name, folder in folders.items()}

    def _stop(self, state: RunState, action: Action) -> _Result:
        after = self._append(state, self._stopping(state, action, "now" if action.why == "stop" else "step"))
        return self._ask_to_go(after) if after.live and after.live.phase == "stopping" else after

    def _kill(self, state: RunState, action: Action) -> _Result:
        live = live_of(state)
        log.warning("attempt %d is killed: %s", live.number, action.reason)
        self._check_still_owner(state)
        if live.handle is not None:
            self._backend.stop(live.handle, grace_s=0)
        return self._waiting(state, action.reason)

    def _judge(self, state: RunState, action: Action) -> _Result:
        if action.request is None:
            raise RuntimeError("nothing to judge")
        live, spec = live_of(state), self._spec(state)
        verdict = validate_move.judge(self._run, state, spec, self._backend, action.request)
        answer: dict[str, Any] = {
            "request": action.request.number,
            "reason": verdict.reason,
            "numbers": verdict.numbers,
        }
        if verdict.target is None:
            return self._append(state, bodies.MoveRefused(**answer))
        way = in_place_change.way_of(spec, live, verdict.target, self._backend)
        leaving = self._leaving(live, verdict.target)
        is_last = in_place_change.are_last(leaving, live, verdict.target)
        if way == "rescale" and (not is_last or self._would_begin_anew(live)):
            way = "move"  # only the last nodes can be removed without restarting the rest
        answer |= {"generation": live.generation, "attempt": live.number}
        answer |= {"target": verdict.target, "leaving": leaving or None}
        if way == "next-start":
            return self._append(state, bodies.MoveDeferred(**answer, kind=way))
        if way != "move":
            return self._append(state, bodies.ChangeIntended(**answer, kind=way))
        stopping = self._stopping(state, replace(action, why="move"), spec.checkpoint_align)
        accepted = bodies.MoveAccepted(**answer, align=stopping.align, grace_s=stopping.grace_s)
        after = self._append(state, accepted)
        return self._ask_to_go(after) if after.live and after.live.phase == "stopping" else after

    def _go_on_changing(self, state: RunState, action: Action) -> _Result:
        return self._change(state, action)

    def _refuse(self, state: RunState, action: Action) -> _Result:
        if action.request is None:
            raise RuntimeError("nothing to refuse")
        return self._append(state, bodies.MoveRefused(request=action.request.number, reason=action.reason))

    def _wait(self, state: RunState, action: Action) -> _Result:
        if action.backoff_s:
            reason = f"{action.reason}; next start in {action.backoff_s:.0f} s"
            orphan_after_s = self._spec(state).failure.orphan_after_s
            watching = Watching(
                state.number, state.generation, backoff_s=action.backoff_s, orphan_after_s=orphan_after_s
            )
            return Waiting(watching, reason)
        if state.live is not None and state.live.phase == "stopping":
            self._ask_to_go(state)
        return self._waiting(state, action.reason)

    def _succeed(self, state: RunState, action: Action) -> _Result:
        outputs = action.extra.get("outputs", {})
        return self._append(state, bodies.Succeeded(generation=state.generation, outputs=outputs))

    def _fail(self, state: RunState, action: Action) -> _Result:
        if state.status != "failed":
            failed = bodies.Failed(generation=state.generation, reason=action.reason, failure=action.failure)
            return self._append(state, failed)
        message = report.failure_message(state)
        self._write_result(state, report.run_report(state, now=self._run.now()))
        raise BudgetError(message) if state.failure == "budget" else RunFailedError(message)

    def _halt(self, state: RunState, action: Action) -> _Result:
        if state.status != "stopped":
            return self._append(state, bodies.Stopped(generation=state.generation, reason=action.reason))
        self._write_result(state, report.run_report(state, now=self._run.now()))
        again = (
            "clear the task, or start the run again by its name, to take it up "
            "(a clear while a worker ran the task may count as a retry: clear it once more)"
        )
        raise StoppedError(f"the run was stopped: {state.reason}; {again}")

    def _deliver(self, state: RunState, action: Action) -> _Result:
        del action
        after = self._append(state, bodies.Delivered(generation=state.generation))
        if after.number == state.number or self._actor not in after.delivered:
            return after
        body = report.run_report(after, now=self._run.now())
        self._write_result(after, body)
        return Delivered(dict(after.outputs), body)

    def _mismatch(self, state: RunState, action: Action) -> _Result:
        raise ProtocolError(f"run {self._run.prefix}, event {state.number}: {action.reason}")

    def _write_result(self, state: RunState, body: Mapping[str, Any]) -> None:
        whole = {
            "schema": protocol.SCHEMA,
            "status": state.status,
            "generation": state.generation,
            "outputs": dict(state.outputs),
            "reason": state.reason,
            "report": body,
        }
        self._check_still_owner(state)
        self._run.write(RESULT, json.dumps(whole, indent=1).encode())

    def _new_generation(self, state: RunState, frozen: freeze.Frozen, reason: str) -> bodies.NewGeneration:
        now = self._run.now()
        self._stage.check_deadline(now)
        stage = self._stage.since(now)
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

    _ACTIONS: Mapping[str, Callable[[Controller, RunState, Action], _Result]] = {
        "start": _start,
        "carry-out": Intending.carry_out,
        "discard": Intending.discard,
        "end": _end,
        "stop": _stop,
        "kill": _kill,
        "judge": _judge,
        "refuse": _refuse,
        "change": _go_on_changing,
        "wait": _wait,
        "succeed": _succeed,
        "fail": _fail,
        "halt": _halt,
        "deliver": _deliver,
        "mismatch": _mismatch,
    }
