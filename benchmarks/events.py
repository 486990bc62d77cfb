"""How long a run of 2,000 attempts takes to fold from its folder.

Run: ``python benchmarks/events.py``. Prints seconds for a reader without memory, with and without the
snapshots that the first reader wrote. Target: under 1 s with snapshots (the usual case).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, Event, RunState
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store import EventLog, RunKey, Store, open_store
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.run import Run

ATTEMPTS = 2000
OFFER = Offer("aws", "us-east-1", "g5.xlarge", "spot", 4, 16, gpu_name="A10G", gpus=1, usd_per_hour=0.4)


def events(attempts: int) -> list[Event]:
    """A run that changes its owner and loses its machine *attempts* times: four events each."""
    bodies = [("generation", {"generation": 1, "spec_hash": "0" * 64})]
    for number in range(1, attempts + 1):
        name = {"generation": 1, "attempt": number}
        allocation = Allocation(OFFER).to_dict()
        bodies += [
            ("owner", {"reason": "taken over"}),
            (
                "attempt-intended",
                {**name, "allocation": allocation, "reason": "after: lost", "spec_hash": "0" * 64},
            ),
            ("attempt-started", {**name, "handle": {"backend": "local", "name": f"run-g1-a{number}"}}),
            ("attempt-ended", {**name, "outcome": "lost", "step": number, "checkpoint_step": number}),
        ]
    actor = Actor("018f0000-0000-7000-8000-000000000000", 1, 3)
    return [Event(n, read_body(kind, body), "writer", 0.0, actor) for n, (kind, body) in enumerate(bodies, 1)]


def seconds(call: Callable[[], RunState], repeats: int) -> tuple[float, RunState]:
    """Median wall time of *repeats* calls, and the last result."""
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = call()
        took.append(time.perf_counter() - start)
    return statistics.median(took), state


def measure(store: Store, repeats: int) -> None:
    """Fold the events of *store* in the three ways, and print."""
    bare, plain = seconds(lambda: EventLog(store, snapshots=False).load(), repeats)
    first, _ = seconds(lambda: EventLog(store).load(), 1)
    later, folded = seconds(lambda: EventLog(store).load(), repeats)
    assert folded == plain
    print(f"{folded.number} events, {len(folded.attempts)} attempts, {os.cpu_count()} cores")
    print(f"without snapshots   {bare:6.3f} s")
    print(f"writing them        {first:6.3f} s")
    print(f"with snapshots      {later:6.3f} s")


def main() -> None:
    """Write the events to a temporary folder and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attempts", type=int, default=ATTEMPTS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key = RunKey("deployment", "retrain", "scheduled__2026-01-01T00:00:00+00:00", "train")
        store = Run(open_store(folder), key)
        for event in events(arguments.attempts):
            store.create(event_name(event.number), event.to_json())
        measure(store, arguments.repeats)


if __name__ == "__main__":
    main()
