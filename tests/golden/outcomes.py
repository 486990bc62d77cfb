"""How attempts end, and what follows: every reason of a node, every pair, every outcome of an attempt."""

from __future__ import annotations

from fakes.run_events import begun, ended, intended, life, run, started, stopping
from golden.files import json_text
from golden.traces import action_words

from envscaler_agent.protocol import END_REASONS, Ended, Progress, Status
from envscaler_airflow.run import OUTCOMES, Facts, NodeStatus, Observed, end_of, next_action

GIB = 1 << 30
FACTS = Facts(backoff_is_over=True, memory_limit_bytes=4 * GIB, memory_cap_bytes=8 * GIB)
ENDS = sorted(name for name, row in OUTCOMES.items() if row.kind == "end")
WAITS = {name for name, row in OUTCOMES.items() if row.kind == "node" and row.recovery != "replace"}
REASONS = sorted({*END_REASONS, *ENDS, *WAITS, "", "SomeWordOfACloud"})
STOPS = ("move", "stop", "budget", "spec-changed", "stalled", "timeout", "image", "refused", "capacity")


def golden_files():
    """The table of ends."""
    return {"outcomes.json": json_text(table())}


def table():
    """The outcome of each reason, which of two explains an attempt, and what the owner does next."""
    return {
        "after": {outcome: _after(outcome) for outcome in ENDS},
        "after a stop": {why: _after_stop(why) for why in STOPS},
        "node": {reason: _node(reason) for reason in REASONS},
        "pending": {reason: _pending(reason) for reason in REASONS},
        "worse": {one: _worse(one) for one in ENDS},
    }


def _node(reason):
    """An end reported by the backend, alone, beside a success, and beside a failure, of the node itself."""
    reports = {
        "nothing": None,
        "succeeded": Ended(0, reason="succeeded"),
        "failed": Ended(1, reason="failed"),
    }
    return {word: _end_words(_ended(0, reason, said)) for word, said in reports.items()}


def _worse(one):
    """The outcome of two nodes, the other of which ended in each way."""
    return {other: _end_words(_ended(0, one, None), _ended(1, other, None)) for other in ENDS}


def _ended(node, reason, said):
    status = None if said is None else Status(phase="ended", ended=said)
    return NodeStatus(node, "ended", reason=reason, status=status)


def _end_words(*nodes):
    end = end_of(Observed(nodes))
    return None if end is None else f"{end.outcome} {end.failure or ''}: {end.detail}"


def _after(outcome):
    """The next action after such an end before any step, after steps, twice at one step, and five times."""
    facts = {"exit_code": 1, "start_step": 0}
    stepped = {**facts, "step": 7}
    return {
        "1 before any step": _next(*life(outcome, **facts)),
        "2 after steps": _next(*life(outcome, **stepped)),
        "3 twice at one step": _next(*life(outcome, **stepped), *life(outcome, 2, **stepped)),
        "4 five times": _next(
            *(event for number in range(1, 6) for event in life(outcome, number, exit_code=1, step=number))
        ),
        "5 with a newer checkpoint": _next(*life(outcome, **stepped, checkpoint_step=5)),
    }


def _after_stop(why):
    return _next(intended(), started(), stopping(why), ended("drained", step=7))


def _pending(reason):
    """The next action while a node waits for that reason, before the training and during it."""
    head = Status(phase="running", start_step=0, progress=Progress(step=3))
    waits = NodeStatus(1, "pending", reason=reason, detail="the cloud's words")
    others = {"all": NodeStatus(0, "pending"), "one": NodeStatus(0, "running", status=head)}
    state = run(begun(), intended(), started())
    return {
        word: action_words(next_action(state, Facts(observed=Observed((first, waits)))))
        for word, first in others.items()
    }


def _next(*steps):
    return action_words(next_action(run(begun(), *steps), FACTS))
