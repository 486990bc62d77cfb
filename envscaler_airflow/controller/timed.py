"""A limit on the time of policies that other packages bring: decisions are pure, those may not be."""

from __future__ import annotations

import queue
import threading

from envscaler_airflow.scaling import Observation, Policy, Proposal, Propose

LIMIT_S = 20.0
"""Longest time for one answer, seconds. Chosen: ours take milliseconds."""
MOST_AT_ONCE = 32
"""Most calls of one policy that run at a time. Chosen: as many as a triggerer has threads for checks."""


def timed(name: str, propose: Propose) -> Propose:
    """*propose*, in a thread of its own that nobody waits for at exit: a call that hangs cannot be ended."""
    room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def within(observation: Observation, policy: Policy) -> Proposal:
        if not room.acquire(blocking=False):
            return Proposal(reason=f"policy {name!r}: {MOST_AT_ONCE} calls of it have not come back")
        answers: queue.SimpleQueue[Proposal] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put(propose(observation, policy))
            finally:
                room.release()

        threading.Thread(target=answer, name=f"envscaler-{name}", daemon=True).start()
        try:
            return answers.get(timeout=LIMIT_S)
        except queue.Empty:
            return Proposal(reason=f"policy {name!r} did not answer within {LIMIT_S:g} s")

    return within
