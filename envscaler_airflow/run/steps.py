"""What the owner does next. Pure: state and facts in, one action out.

The owner carries the action out, records it as events, and asks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from envscaler_airflow.run.actions import Action, Facts
from envscaler_airflow.run.event_bodies import Actor, MoveRequested, StopRequested
from envscaler_airflow.run.outcomes import NodeStatus, Recovery, end_of, outcome_of
from envscaler_airflow.run.recovery import after_failure, budget_words, still_fits
from envscaler_airflow.run.state import AttemptState, Request, RunState, is_cleared

EntryKind = Literal["begin", "adopt", "deliver", "superseded"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What ``execute`` finds and does first.

    Attributes:
        kind: ``begin`` a new generation, ``adopt`` the run, ``deliver`` its result.
        reason: For the log and the event.
        respec: True if the run continues with the new spec.
    """

    kind: EntryKind
    reason: str
    respec: bool = False


def enter(state: RunState, actor: Actor, *, spec_hash: str = "", fresh: bool = False) -> Entry:
    """Apply the table "at execute": what a new try of the stage's task does with the run that it finds.

    Args:
        state: Fold of the run's events.
        actor: This try.
        spec_hash: Of the spec that the DAG file contains now.
        fresh: ``restart="fresh"``: begin a generation once per clear, not once per retry.
    """
    if state.generation == 0:
        return Entry("begin", "first start")
    kind = _kin(state.owner, actor)
    if kind == "older":
        return Entry("superseded", f"try {actor.try_number} ({actor.ti_id}) is older than the owner")
    if kind == "another life":
        return Entry("begin", "the DAG run was deleted and recreated")
    cleared = is_cleared(state, actor)
    if fresh and cleared:
        return Entry("begin", "restart='fresh'")
    if state.status == "succeeded":
        return _after_success(state, actor, cleared=cleared)
    if state.status in ("failed", "stopped") and not cleared:
        return Entry("adopt", f"the run {_past(state.status)}, and only a clear of the task overrides that")
    respec = cleared and spec_hash != state.spec_hash
    if state.status in ("failed", "stopped"):
        return Entry("adopt", f"goes on after it {_past(state.status)}", respec=respec)
    return Entry("adopt", "taken over from the owner before", respec=respec)


def _after_success(state: RunState, actor: Actor, *, cleared: bool) -> Entry:
    if not state.delivered:
        return Entry("deliver", "succeeded before, not yet delivered")
    if actor.is_shell:  # a name that is typed again must not train, and cost, again
        return Entry("deliver", "it succeeded before, so nothing runs; --restart fresh trains from the start")
    if cleared and state.accepted:
        return Entry("begin", "cleared after success")
    if not state.accepted:
        return Entry("deliver", "delivered before to a try that Airflow did not count as a success")
    return Entry("deliver", "delivered before, and the task was not cleared")


def _past(status: str) -> str:
    return {"failed": "failed", "stopped": "was stopped"}[status]


def _kin(owner: Actor | None, actor: Actor) -> Literal["same life", "another life", "older"]:
    """Relate *actor* to the owner: a later try of the same DAG run, a try of another, or an older try.

    Within a life the higher try number is newer; between lives the later task instance id, a UUIDv7. If a
    life cannot be read, a later id with a try number not above the owner's is another life.
    """
    if owner is None or actor.is_try_of(owner):
        return "same life"
    is_above, is_later = actor.try_number > owner.try_number, actor.ti_id > owner.ti_id
    if None in (owner.life, actor.life):
        if actor.ti_id < owner.ti_id:
            return "older"
        return "same life" if is_above else "another life" if is_later else "older"
    if owner.life != actor.life:
        return "another life" if is_later else "older"
    is_newer = is_above or (actor.try_number == owner.try_number and is_later)
    return "same life" if is_newer else "older"


def next_action(state: RunState, facts: Facts) -> Action:
    """Return the next thing to do; the caller records it and asks again until it is a wait or an end.

    If a newer version wrote events that this version does not know, the owner watches what runs, delivers
    what succeeded, and neither starts nor stops anything.
    """
    action = _known_action(state, facts)
    return _cautious(state, action) if state.unknown else action


def _cautious(state: RunState, action: Action) -> Action:
    words = f"event {state.unknown[-1]} was written by a newer version of envscaler-airflow"
    if action.kind == "judge":
        return Action(
            "refuse", request=action.request, reason=f"{words}; until that takes over, nothing moves"
        )
    may_run = state.live is not None and state.live.handle is not None
    if action.kind in ("stop", "kill", "change") and may_run:
        return Action("wait", reason=f"{words}; it is only watched, and no request is sent: {action.reason}")
    is_new = action.kind in ("start", "carry-out", "discard", "stop") or (
        action.kind in ("fail", "halt") and state.status == "active"
    )
    return Action("mismatch", reason=f"{words}; install that version to go on") if is_new else action


def _known_action(state: RunState, facts: Facts) -> Action:
    if state.status == "succeeded":
        return Action("deliver")
    if state.status == "failed":
        return Action("fail", reason=state.reason, failure=state.failure)
    if state.status in ("stopped", "pruned"):
        return Action("halt", reason=state.reason)
    live = state.live
    if live is None:
        return _between_attempts(state, facts)
    if live.phase == "intended":
        return _must_go(state, live, facts) or Action("carry-out", reason=live.reason)
    if live.handle is None:
        return Action("discard", reason=f"was not started: {live.stop_detail or live.stop_reason}")
    return _while_live(state, live, facts)


def _while_live(state: RunState, live: AttemptState, facts: Facts) -> Action:
    end = end_of(facts.observed, stalled=live.stop_reason == "stalled") if facts.observed else None
    if end is not None:
        return Action("end", end=end)
    if live.phase == "stopping":
        moves = _first(state.pending, MoveRequested)
        if moves is not None:
            return Action(
                "refuse", request=moves, reason=f"the attempt is already going ({live.stop_reason})"
            )
        if facts.is_overdue:
            return Action("kill", reason="it did not go within its time")
        is_idle = outcome_of(live.stop_reason).never_starts and not _is_at_work(facts)
        if is_idle or _is_on_its_way(facts):
            return Action("kill", reason="nothing of it trains")
        return Action("wait", reason=f"waits for the attempt to go ({live.stop_reason})")
    if (node := _pending(facts, "fail")) is not None:
        return Action("stop", stop_reason=node.reason, reason=_why_missing(node))
    if (node := _pending(facts, "next-offer")) is not None:
        kind: Literal["stop", "kill"] = "stop" if _has_trained(facts) else "kill"
        return Action(kind, stop_reason="capacity", reason=_why_missing(node))
    lost = _lost_node(facts)
    if lost is not None:
        return Action("kill", reason=f"node {lost} is lost, and nothing recreates it")
    return _asked_of(state, live, facts) or Action("wait", reason=_sight(facts))


def _sight(facts: Facts) -> str:
    """Return the attempt's phase in a word: it may wait for a machine for a long time."""
    nodes = facts.observed.nodes if facts.observed else ()
    coming = [one for one in nodes if one.state in ("pending", "starting")]
    detail = next((one.detail for one in coming if one.detail), "")
    return (f"starts: {detail}" if detail else "starts") if coming else "runs"


def _lost_node(facts: Facts) -> int | None:
    """Return a node that is lost for good while others still run; None if all are present."""
    nodes = facts.observed.nodes if facts.observed else ()
    return next((one.node for one in nodes if one.state == "lost"), None)


def _pending(facts: Facts, recovery: Recovery) -> NodeStatus | None:
    """Return the first node that does not run yet, for a reason that calls for *recovery*."""
    nodes = facts.observed.nodes if facts.observed else ()
    waiting = (one for one in nodes if one.state in ("pending", "starting"))
    rows = ((one, outcome_of(one.reason)) for one in waiting)
    return next((one for one, row in rows if row.never_starts and row.recovery == recovery), None)


def _why_missing(node: NodeStatus) -> str:
    return f"{outcome_of(node.reason).text}: {node.detail}"


def _is_at_work(facts: Facts) -> bool:
    """Return True if a node has something to save, or is saving; the nodes beside a recreated one count."""
    nodes = facts.observed.nodes if facts.observed else ()
    at_work = (one.status for one in nodes if one.state in ("running", "unknown"))
    return any(said is not None and said.phase not in ("setup", "restoring", "ended") for said in at_work)


def _is_on_its_way(facts: Facts) -> bool:
    """Return True if no node has run yet: there is nothing to save."""
    nodes = facts.observed.nodes if facts.observed else ()
    return bool(nodes) and all(one.state in ("pending", "starting") for one in nodes)


def _has_trained(facts: Facts) -> bool:
    """Return True if a node at work has made steps or checkpoints, and does not wait for its first."""
    head = facts.observed.head if facts.observed else None
    if head is None or not _is_at_work(facts):
        return False
    return head.last_checkpoint is not None or (head.progress.step or 0) > (head.start_step or 0)


def _must_go(state: RunState, live: AttemptState, facts: Facts) -> Action | None:
    """Return the stop of an attempt that must not continue, nor start; None if it may."""
    stop = _first(state.pending, StopRequested)
    if stop is not None:
        return Action("stop", stop_reason=_why(stop), request=stop, reason=_reason(stop))
    if live.generation != state.generation:
        return Action("stop", stop_reason="stop", reason="it belongs to an earlier generation")
    if live.spec_hash != state.spec_hash:
        return Action("stop", stop_reason="spec-changed", reason="it goes on with a changed spec")
    if _is_over_budget(facts):
        return Action("stop", stop_reason="budget", reason=budget_words(facts))
    return None


def _asked_of(state: RunState, live: AttemptState, facts: Facts) -> Action | None:
    if (stop := _must_go(state, live, facts)) is not None:
        return stop
    head = facts.observed.head if facts.observed else None
    if head is not None and head.health == "stalled":
        return Action(
            "stop", stop_reason="stalled", reason=head.message or "no step for many times the usual time"
        )
    move = _first(state.pending, MoveRequested)
    if live.change is None:
        return Action("judge", request=move) if move is not None else None
    if move is not None:
        words = f"the attempt is being changed to {live.change.target.name}"
        return Action("refuse", request=move, reason=words)
    return Action("change", reason=live.change.reason, extra={"is_overdue": facts.is_overdue})


def _why(stop: Request) -> str:
    """Return ``timeout`` if the task's time is over, else ``stop``."""
    return "timeout" if stop.is_timeout else "stop"


def _reason(stop: Request) -> str:
    return stop.body.reason or "requested to stop"


def _is_over_budget(facts: Facts) -> bool:
    if facts.budget_usd is None or facts.spent_usd is None:
        return False
    return facts.spent_usd + facts.reserve_usd >= facts.budget_usd


def _first(pending: Iterable[Request], kind: type[MoveRequested | StopRequested]) -> Request | None:
    return next((item for item in pending if isinstance(item.body, kind)), None)


def _between_attempts(state: RunState, facts: Facts) -> Action:
    move, last = _first(state.pending, MoveRequested), state.current
    if move is not None:
        return Action("refuse", request=move, reason="no attempt is live; the request is stale")
    if last is not None and last.outcome == "succeeded":  # a stop that came with it has nothing to stop
        return Action("succeed", extra={"outputs": dict(last.end.outputs or {})})
    stop = _first(state.pending, StopRequested)
    if stop is not None:
        return _final(_why(stop), _reason(stop))
    if _is_over_budget(facts):
        return Action("fail", reason=budget_words(facts), failure="budget")
    if last is None:
        return _after_earlier(state) or Action("start", reason="first attempt of the generation")
    return _after_stop(state, last) or after_failure(state, last, facts)


def _after_stop(state: RunState, last: AttemptState) -> Action | None:
    """Return what follows an end that the owner requested; None if it requested none.

    A stop is final: only a clear of the task after it lets the run continue.
    """
    if outcome_of(last.stop_reason).is_final:
        requested_at = last.stop_number if last.stop_request is None else last.stop_request
        if requested_at <= state.overridden_number:
            return Action("start", reason=f"taken up again after a stop ({last.stop_reason})")
        return _final(last.stop_reason, last.stop_detail or "requested to stop")
    if last.stop_reason == "move" and last.target is not None:
        return Action("start", reason="moved", target=last.target, memory_bytes=still_fits(last, last.target))
    if last.stop_reason == "spec-changed":
        return Action("start", reason="the spec changed")
    return None


def _after_earlier(state: RunState) -> Action | None:
    """Return the end of a generation that was stopped while an attempt of an earlier one still ran."""
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.stop_request is None or last.stop_request <= state.overridden_number:
        return None
    return _final(last.stop_reason, last.stop_detail) if outcome_of(last.stop_reason).is_final else None


def _final(why: str, reason: str) -> Action:
    """Return the end of the run that a stop for *why* causes."""
    is_halt = outcome_of(why).recovery == "stop"
    return Action("halt", reason=reason) if is_halt else Action("fail", reason=reason, failure=why)
