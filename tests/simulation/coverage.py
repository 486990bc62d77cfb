"""Which pairs of event, state and writer the seeds have reached, of all possible ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from envscaler_airflow.run import Event, RunState

PREFIX = "pair "
_ACTIVE = ("between", "intended", "started", "changing", "stopping")
_OVER = ("succeeded", "delivered", "accepted", "failed", "stopped")
_BEGUN = (*_ACTIVE, *_OVER)
_ENDED = ("between", *_OVER)
"""States in which a release may fail first: it is tried before anything else follows the end."""
_LATER = ("between", "intended", "started", "stopping", *_OVER)
"""States in which an earlier attempt may still be released."""
POSSIBLE: Mapping[str, tuple[str, ...]] = {
    "generation": ("none", *_BEGUN),
    "owner": _BEGUN,
    "attempt-intended": ("between",),
    "attempt-started": ("intended", "stopping"),
    "attempt-stopping": ("intended", "started", "changing"),
    "attempt-ended": ("intended", "started", "changing", "stopping"),
    "release-failed": _ENDED,
    "attempt-released": (*_LATER, "changing"),
    "move-accepted": ("started",),
    "move-refused": ("between", "started", "changing", "stopping"),
    "move-deferred": ("started",),
    "change-intended": ("started",),
    "changed": ("changing",),
    "change-undone": ("changing",),
    "succeeded": ("between",),
    "failed": ("between",),
    "stopped": ("between",),
    "delivered": ("succeeded", "delivered", "accepted"),
    "accepted": ("delivered",),
}
"""States in which each event may be written. Source: ``run.steps`` and the table "at execute"."""
REQUESTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "move-requested": {"person": _ACTIVE, "worker": ("started", "stopping")},
    "stop-requested": {
        "person": _ACTIVE,
        "triggerer": _ACTIVE,
        "worker": _ACTIVE,
    },
}
"""The same for requests, by the kind of the actor that writes them: a sensor's worker, a task's own worker at
its time-out, a killed trigger."""
RACES = (
    *(f"{request} {state} {who}" for request, by in REQUESTS.items() for who in by for state in _OVER),
    "move-requested between worker",
    "move-requested intended worker",
)
"""What is possible only if the run or the attempt ends between a writer's look and its request, which has no
effect then.
"""
UNREACHED: Mapping[str, str] = {
    "change-undone changing owner": "no simulated cloud changes the number of nodes in place",
    "release-failed accepted owner": "an attempt is nearly always released by the time of the acceptance",
    "move-requested stopping worker": "both have to be written within a second",
}
"""Pairs that no seed reaches, each with the reason."""


def state_of(state: RunState) -> str:
    """Name of the state that decides what may follow."""
    if state.generation == 0:
        return "none"
    if state.status == "succeeded":
        return "accepted" if state.accepted else "delivered" if state.delivered else "succeeded"
    if state.status in ("failed", "stopped"):
        return state.status
    if state.live is None:
        return "between"
    return "changing" if state.live.change is not None and state.live.phase == "started" else state.live.phase


def pair_of(event: Event, before: RunState, writer: str) -> str:
    """Key of what happened, for ``World.counts``; *writer* is the kind of the actor that wrote it."""
    who = writer if event.type in REQUESTS else "owner"
    return f"{PREFIX}{event.type} {state_of(before)} {who}"


def possible() -> list[str]:
    """Every pair that may occur."""
    by_owner = {event: {"owner": states} for event, states in POSSIBLE.items()}
    return [
        f"{PREFIX}{event} {state} {who}"
        for event, writers in (by_owner | dict(REQUESTS)).items()
        for who, states in writers.items()
        for state in states
    ]


def report(counts: Mapping[str, int]) -> list[str]:
    """Lines of what was reached, what was not, and what should not have been possible."""
    expected = possible()
    missed = [pair for pair in expected if not counts.get(pair)]
    known = {*expected, *(PREFIX + pair for pair in RACES)}
    strange = [pair for pair in counts if pair.startswith(PREFIX) and pair not in known]
    share = 100 * (1 - len(missed) / len(expected))
    return [
        f"coverage: {len(expected) - len(missed)} of {len(expected)} pairs ({share:.1f} %)",
        *_lines("not reached", missed),
        *_lines("reached, and not in the table", strange),
    ]


def _lines(what: str, pairs: Iterable[str]) -> list[str]:
    names = [pair.removeprefix(PREFIX) for pair in pairs]
    return [f"  {what}: {name}" + (f" ({UNREACHED[name]})" if name in UNREACHED else "") for name in names]
