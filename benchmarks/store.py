"""What 100 stages leave in the run store in a week, how long it takes to read, and what S3 charges for it.

    python benchmarks/store.py [--stages 100] [--days 7]

Objects: every stage trains for the whole time on one node, prints more often than once a minute, has a
ScalingSensor, and loses its machine every ten hours. The numbers follow from the product's own rules. They
are then made, as hard links to a few small files, in a folder on this machine.

Times on that folder: to list the runs (``envscaler status``), to fold the events of each, to find a run's
scaling checks, and to look for old runs (``envscaler prune``). Requirement: 50 ms to list, and 50 ms to fold
a run.

Requests: from the intervals of the product, as ``docs/explanation/store-cost.md`` counts them. Dollars: of S3
Standard in US East (N. Virginia).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from envscaler_agent.output import LOG_CHUNK_S, METRICS_CHUNK_S, chunk_age_s
from envscaler_agent.protocol import claim_name, control_name, log_name, metrics_name, status_name
from envscaler_airflow.owner.prune import prune
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, Event
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.sidecar.loop import STATUS_S
from envscaler_airflow.sidecar.owner_watch import CONTROL_S, LEASE_S, SUPERSEDED_S
from envscaler_airflow.store import RunKey, Store, open_store
from envscaler_airflow.store.decisions import CHUNK_S
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.lease import RENEW_EVERY_S
from envscaler_airflow.store.run import Run, run_prefixes
from envscaler_airflow.triggers.scaling_trigger import CHECK_S
from envscaler_airflow.triggers.stage_trigger import POLL_S

MOST_MS = 50.0
LIFE_S = 36_000.0
"""Seconds between two losses of a stage's machine. Chosen: as on a spot market that is used a lot."""
KEPT = 4
"""Checkpoints in the store: ``checkpoint.keep`` of 3 and the one that is being uploaded."""
FILES = 8
"""Files of a checkpoint and its manifest. Chosen: as the Trainer of transformers writes."""
MOST_LINKS = 60_000
"""Names for one file. Source: ext4 has 65,000 at most."""
USD_PER_WRITE, USD_PER_READ, USD_PER_GB_MONTH = 0.005 / 1000, 0.0004 / 1000, 0.023
"""Source: Amazon S3 pricing, S3 Standard, US East (N. Virginia), as of March 2026: PUT, COPY, POST and LIST;
GET and all others but DELETE, which is free; the first 50 TB of storage."""
OFFER = Offer("aws", "us-east-1", "g5.xlarge", "spot", 4, 16, gpu_name="A10G", gpus=1, usd_per_hour=0.4)
ACTOR = Actor("018f0000-0000-7000-8000-000000000000", 1, 3)


def closings(least_s: float, life_s: float) -> int:
    """Chunks that one attempt closes in *life_s* seconds of output without a pause."""
    count, at = 0, 0.0
    while at < life_s:
        count, at = count + 1, at + chunk_age_s(least_s, at)
    return count


def lives(seconds: float) -> list[float]:
    """Seconds of each attempt."""
    whole, rest = divmod(seconds, LIFE_S)
    return [LIFE_S] * int(whole) + ([rest] if rest else [])


def events(attempts: int) -> Iterator[Event]:
    """A run that lost its machine before each attempt but the first."""
    bodies = [("generation", {"generation": 1, "spec_hash": "0" * 64})]
    for number in range(1, attempts + 1):
        name, allocation = {"generation": 1, "attempt": number}, Allocation(OFFER).to_dict()
        begun = {"allocation": allocation, "reason": "after: lost", "spec_hash": "0" * 64}
        bodies += [
            ("attempt-intended", {**name, **begun}),
            ("attempt-started", {**name, "handle": {"backend": "vm", "name": f"run-g1-a{number}"}}),
            ("attempt-ended", {**name, "outcome": "lost", "step": number, "checkpoint_step": number}),
        ]
    for number, (kind, body) in enumerate(bodies, start=1):
        yield Event(number, read_body(kind, body), "writer", 0.0, ACTOR)


def names(seconds: float) -> Iterator[str]:
    """Every object of one stage, except its events."""
    yield from ("run.json", "plan.json", "spec-0000000000000000.json", "workdir-0.tar.zst")
    yield from ("lease/run.json", "lease/log.json", "lease/sensor.json", "tables/deadline.npz")
    for attempt, life_s in enumerate(lives(seconds), start=1):
        yield control_name(1, attempt)
        yield claim_name(1, attempt, 0, 1)
        yield status_name(1, attempt, 0, 1)
        yield from (log_name(1, attempt, 0, n + 1, 1) for n in range(closings(LOG_CHUNK_S, life_s)))
        yield from (metrics_name(1, attempt, 0, n + 1, 1) for n in range(closings(METRICS_CHUNK_S, life_s)))
    yield from (f"decisions/sensor-{n + 1:06d}.jsonl" for n in range(int(seconds / CHUNK_S)))
    for number in range(KEPT):
        folder = f"checkpoints/g1-step-{number:08d}-a1"
        yield from (f"{folder}/n0-c1/file-{n}" for n in range(FILES))
        yield f"{folder}/manifest-c1.json"


class Links:
    """Creates files fast: names of one small file, and of the next one when it has too many."""

    def __init__(self, folder: Path) -> None:
        """Keep the small files in *folder*."""
        self._folder, self._made, self._left = folder, 0, 0
        self._file = folder

    def link(self, path: Path) -> None:
        """Create *path*."""
        if not self._left:
            self._made, self._left = self._made + 1, MOST_LINKS
            self._file = self._folder / str(self._made)
            self._file.write_bytes(b"{}")
        self._left -= 1
        try:
            os.link(self._file, path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            os.link(self._file, path)


def build(root: Path, stages: int, seconds: float) -> dict[str, int]:
    """Make the store below *root*; return the number of one stage's objects by their first folder."""
    (root / "files").mkdir()
    links, found = Links(root / "files"), list(names(seconds))
    written = {event_name(event.number): event.to_json() for event in events(len(lives(seconds)))}
    for number in range(stages):
        folder = root / "store" / RunKey("prod", "retrain", f"scheduled-{number}", "train").prefix
        for name in found:
            links.link(folder / name)
        (folder / "events").mkdir()
        for name, text in written.items():
            (folder / name).write_bytes(text)
    counts: dict[str, int] = {}
    for name in [*found, *written]:
        part = name.split("/", 1)[0] if "/" in name else "others"
        counts[part] = counts.get(part, 0) + 1
    return counts


def median_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of *call*, milliseconds."""
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def measure(store: Store) -> None:
    """Print the times."""
    prefixes = run_prefixes(store)
    listing = median_ms(lambda: run_prefixes(store))
    folds = [median_ms(lambda prefix=prefix: Run(store, prefix).events.load(), 3) for prefix in prefixes]
    checks = median_ms(lambda: Run(store, prefixes[0]).children("decisions"))
    old = median_ms(lambda: list(prune(store, older_than_s=30 * 86_400.0, dry_run=True)), 3)
    state = Run(store, prefixes[0]).events.load()
    print(f"list {len(prefixes)} runs          {listing:8.1f} ms")
    fold_ms = statistics.median(folds)
    print(f"fold {state.number} events of a run   {fold_ms:8.1f} ms, longest {max(folds):.1f} ms")
    print(f"list its scaling checks  {checks:8.1f} ms")
    print(f"look for old runs        {old:8.1f} ms")
    met = listing <= MOST_MS and fold_ms <= MOST_MS
    print(f"held to {MOST_MS:g} ms: {'yes' if met else 'NO'}")


def requests_per_hour(age_h: float) -> tuple[float, float]:
    """Reads and writes of a stage that has run for so long: see ``docs/explanation/store-cost.md``."""
    hour = 3600.0
    logs = hour / chunk_age_s(LOG_CHUNK_S, age_h * hour)
    reads = 8 * hour / POLL_S + 2 * hour / RENEW_EVERY_S + hour / CONTROL_S + hour / LEASE_S
    reads += 2 * hour / SUPERSEDED_S + 4 * hour / CHECK_S
    writes = 2 * hour / RENEW_EVERY_S + hour / SUPERSEDED_S + hour / STATUS_S + hour / METRICS_CHUNK_S
    return reads, writes + 2 * logs + hour / CHUNK_S


def bill(stages: int) -> None:
    """Print the requests and their price."""
    for age_h in (0.5, 24.0):
        reads, writes = requests_per_hour(age_h)
        usd = 730 * (reads * USD_PER_READ + writes * USD_PER_WRITE)
        print(
            f"a stage of {age_h:4g} h: {reads:,.0f} reads, {writes:,.0f} writes an hour, ${usd:.2f} a month; "
            f"{stages} of them ${stages * usd:,.0f}"
        )
    saves = 730 * 6 * (2 * 10 * FILES + 10)
    print(
        f"a checkpoint of {FILES} files every 10 min: ${saves * USD_PER_WRITE:.2f} a month of a stage at most"
    )
    print(f"100 GB of checkpoints: ${100 * USD_PER_GB_MONTH:.2f} a month")


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stages", type=int, default=100)
    parser.add_argument("--days", type=float, default=7.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = build(Path(folder), options.stages, options.days * 86_400)
        for part, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{part:12} {count:7,} objects of a stage")
        total = sum(counts.values())
        print(f"{total:,} objects of a stage in {options.days:g} days, {options.stages * total:,} in all")
        measure(open_store(f"file://{folder}/store"))
    bill(options.stages)


if __name__ == "__main__":
    main()
