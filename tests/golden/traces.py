"""What follows from recorded events: the state, the owner's next action after each, and the messages.

The stored events are the input, independent of the code that writes events now.
"""

from __future__ import annotations

import json

from golden.files import json_text, stored
from golden.runs import RUNS

from envscaler_agent.protocol import Ended, Progress, Status
from envscaler_airflow.run import Event, Facts, NodeStatus, Observed, fold, next_action
from envscaler_airflow.run.cost import Bill
from envscaler_airflow.run.narration import describe, totals

GIB = 1 << 30
MEMORY = {"memory_limit_bytes": 4 * GIB, "memory_cap_bytes": 8 * GIB}


def bytes_of(event):
    """A stored event as in a store."""
    return json.dumps(event, separators=(",", ":")).encode()


def read_events(name):
    """The recorded events of the run *name*."""
    found = json.loads(stored(f"runs/{name}/events.json"))
    return [Event.from_json(bytes_of(event), where=f"{name} {event['number']}") for event in found]


def golden_files(name):
    """Golden files from the events of the run *name*."""
    return {
        f"runs/{name}/trace.json": json_text(trace(name)),
        f"runs/{name}/narration.txt": narration(name),
    }


def trace(name):
    """State after each event in a few words with the next actions, and the last state in full."""
    state, steps = fold([]), []
    for event in read_events(name):
        state = fold([event], state)
        live = state.live
        steps.append(
            {
                "event": f"{event.number} {event.type}",
                "live": None if live is None else f"g{live.generation}-a{live.number} {live.phase}",
                "next": {case: action_words(next_action(state, facts)) for case, facts in _cases(live)},
                "status": state.status,
            }
        )
    return {"steps": steps, "state": _state(state)}


def narration(name):
    """The line of each event, and of the bill of a run that left a result."""
    state, lines = fold([]), []
    for event in read_events(name):
        state = fold([event], state)
        lines.append(f"{event.number:2} {describe(event, state)}")
    result = json.loads(stored(f"runs/{name}/result.json"))
    return "\n".join([*lines, *totals(Bill.from_dict(result["report"]["bill"]))]) + "\n"


def _cases(live):
    """Facts that an owner may have; those of nodes only while an attempt lives."""
    spent = Facts(spent_usd=2.0, budget_usd=2.0, backoff_is_over=True, **MEMORY)
    cases = {"back-off": Facts(**MEMORY), "nothing seen": Facts(backoff_is_over=True, **MEMORY)}
    cases["budget spent"] = spent
    if live is not None:
        cases |= {
            "runs": _seen("running", step=40),
            "overdue": _seen("running", step=40, is_overdue=True),
            "stalled": _seen("running", step=40, health="stalled"),
            "no capacity": _seen("pending", reason="capacity", detail="0/3 nodes are free"),
            "no image": _seen("pending", reason="image", detail="manifest unknown"),
            "lost": _seen("lost", step=40),
            "drained": _seen("ended", step=40, ended=Ended(exit_code=85, reason="drained")),
            "crashed": _seen(
                "ended", step=40, ended=Ended(exit_code=1, reason="failed", detail="ValueError")
            ),
            "succeeded": _seen("ended", step=99, ended=Ended(exit_code=0, reason="succeeded")),
        }
    return cases.items()


def _seen(state, *, step=None, ended=None, health="ok", is_overdue=False, **node):
    phase = "ended" if ended else "running"
    reported = Status(phase=phase, health=health, progress=Progress(step=step), start_step=0, ended=ended)
    status = None if step is None else reported
    if ended is not None:
        node |= {"reason": ended.reason, "exit_code": ended.exit_code}
    return Facts(observed=Observed((NodeStatus(0, state, status=status, **node),)), is_overdue=is_overdue)


def action_words(action):
    """One line: the kind, and every field with an unusual value."""
    facts = {
        "stop_reason": action.stop_reason,
        "failure": action.failure,
        "target": action.target and action.target.name,
        "memory_bytes": action.memory_bytes,
        "backoff_s": action.backoff_s,
        "request": action.request and action.request.number,
        "end": action.end and json.dumps(action.end.to_dict()),
        "extra": action.extra and json.dumps(action.extra),
    }
    details = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    return (
        action.kind + (f" ({details})" if details else "") + (f": {action.reason}" if action.reason else "")
    )


def _state(state):
    """The description of a state, in the words of its events."""
    return {
        "accepted": state.accepted,
        "attempts": [_attempt(one) for one in state.attempts],
        "begun": fields_of(state.begun),
        "begun_at": state.begun_at,
        "begun_by": state.begun_by.to_dict(),
        "cleared_number": state.cleared_number,
        "delivered": [actor.to_dict() for actor in state.delivered],
        "failure": state.failure,
        "generation": state.generation,
        "number": state.number,
        "outputs": dict(state.outputs),
        "owner": state.owner.to_dict(),
        "pending": [f"{one.number} {one.body.type}" for one in state.pending],
        "reason": state.reason,
        "refused": [f"{one.times} x {one.target} at {one.at}" for one in state.refused],
        "spec_hash": state.spec_hash,
        "status": state.status,
        "unknown": list(state.unknown),
    }


def fields_of(body):
    """The fields of an event, as in its JSON."""
    return {name: value for name, value in body.to_dict().items() if name != "type"}


def _attempt(one):
    return {
        "allocation": one.allocation.to_dict(),
        "checkpoint_every_s": one.checkpoint_every_s,
        "checkpoint_step": one.checkpoint_step,
        "earlier": [f"{was.allocation.name} until {was.until}, step {was.step}" for was in one.earlier],
        "ended": {} if one.ended is None else fields_of(one.ended),
        "handle": one.handle and one.handle.to_dict(),
        "memory_bytes": one.memory_bytes,
        "name": f"g{one.generation}-a{one.number}",
        "next_allocation": one.next_allocation and one.next_allocation.name,
        "numbers": {"stop": one.stop_number, "ended": one.ended_number},
        "outcome": one.outcome,
        "phase": one.phase,
        "reason": one.reason,
        "released_at": one.released_at,
        "spec_hash": one.spec_hash,
        "step": one.step,
        "stop_reason": one.stop_reason,
        "target": one.target and one.target.name,
        "times": [one.intended_at, one.started_at, one.stopping_at, one.ended_at],
        "unreleased": one.unreleased,
        "vcpus": one.vcpus,
    }


def all_files():
    """Golden files of every recorded run."""
    return {path: text for name in RUNS for path, text in golden_files(name).items()}
