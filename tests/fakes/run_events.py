"""Events of a run in short form: ``run(begun(), *life("lost"))`` is the state after them."""

from __future__ import annotations

from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, Event, fold
from envscaler_airflow.run.event_bodies import read_body

SMALL = Allocation(Offer("local", "", "cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=0.05))
LARGE = Allocation(Offer("local", "", "cpu-2", "on-demand", vcpus=2, memory_gib=8, usd_per_hour=0.10))
FIRST = Actor("ti-1", try_number=1, max_tries=3, life="one")
RETRY = Actor("ti-2", try_number=2, max_tries=3, life="one")
CLEARED = Actor("ti-3", try_number=3, max_tries=5, life="one")
SHELL_AGAIN = Actor("ti-5", try_number=8, max_tries=8, life="shell")
RECREATED = Actor("ti-9", try_number=1, max_tries=3, life="two")


def run(*steps):
    """State after events given as ``(type, body)`` or ``(type, body, actor)``."""
    events = [
        Event(number, read_body(step[0], step[1]), writer="w", actor=step[2] if len(step) > 2 else FIRST)
        for number, step in enumerate(steps, start=1)
    ]
    return fold(events)


def begun(generation=1, actor=FIRST):
    """Start of a generation."""
    return ("generation", {"generation": generation, "spec_hash": "A"}, actor)


def intended(attempt=1, allocation=SMALL, generation=1):
    """Intent of an attempt."""
    body = {
        "generation": generation,
        "attempt": attempt,
        "allocation": allocation.to_dict(),
        "spec_hash": "A",
    }
    return ("attempt-intended", body)


def started(attempt=1, generation=1):
    """Act after the intent."""
    handle = {"backend": "local", "name": f"r-g{generation}-a{attempt}"}
    return ("attempt-started", {"generation": generation, "attempt": attempt, "handle": handle})


def ended(outcome, attempt=1, **more):
    """End of an attempt."""
    return ("attempt-ended", {"generation": 1, "attempt": attempt, "outcome": outcome, **more})


def life(outcome, attempt=1, **more):
    """Intent, act and end."""
    return [intended(attempt), started(attempt), ended(outcome, attempt, **more)]


SUCCEEDED = ("succeeded", {"generation": 1, "outputs": {"model": "file:///m"}})
DELIVERED = ("delivered", {"generation": 1})
ACCEPTED = ("accepted", {"generation": 1})


def owner(actor):
    """Another try takes over."""
    return ("owner", {"reason": "r"}, actor)


def requested(why="stop", **more):
    """A user requests a stop, or with *ti_id* the end of a try."""
    return ("stop-requested", {"reason": "enough", "by": "me", "stop_reason": why, **more}, None)


def stopping(why, attempt=1, **more):
    """The owner requests a save and stop of the attempt."""
    return (
        "attempt-stopping",
        {"generation": 1, "attempt": attempt, "stop_reason": why, "reason": "enough", **more},
    )
