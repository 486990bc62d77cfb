"""One triggerer's event loop with a thousand stages and their sensors: how long is it kept from other work?

    python benchmarks/triggerer.py [--stages 1000] [--seconds 60] [--freeze] [--threshold 700]

A fake API server in its own process (real HTTP) serves a Job and its pod for each stage. Nine in ten of them
run, and the others wait for a node. Each stage has a run in a store on this machine's disk, a StageTrigger
that polls every 5 s, and a ScalingTrigger that checks every 30 s: the product's own, with their own thread
pools. Only Airflow's answers about task states are made up, and nothing trains, so no status changes.
Halfway, the server cuts every watch and forgets every resource version (410), so that everything is listed
again. A coroutine that sleeps 1 ms measures how late it wakes up; another one does what Airflow's watchdog
does.

The causes of a delay are measured separately. The CPU time of the loop's own thread shows what the loop
itself did. Garbage collections stop every thread of the process: those of the oldest generation, the full
ones, are shown apart. A separate process that only sleeps shows the delays of the machine. The rest is
waiting for the interpreter's lock.

``--freeze`` calls ``gc.freeze`` once everything is loaded, ``--threshold`` sets the first threshold of the
collector: both are for the operator of a triggerer to decide, see ``docs/reference/scale.md``.

Requirement: one list and one watch of each kind, no warning of the watchdog at 1,000 stages, and at 5,000 no
delay over 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from envscaler_agent.messages import SCHEMA
from envscaler_agent.protocol import Progress, Status, claim_name, status_name
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.job_reader import close_views
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner.stage import Watching
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, Event, Handle
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store import RunKey, open_store
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.lease import Claim
from envscaler_airflow.store.run import spec_name
from envscaler_airflow.testing import FaultyStore
from envscaler_airflow.triggers import scaling_checks, scaling_trigger, stage_watch
from envscaler_airflow.triggers.scaling_trigger import ScalingTrigger
from envscaler_airflow.triggers.stage_trigger import StageTrigger

MOST_MS = 50.0
WATCHDOG_S = 0.2
"""Source: ``[triggerer] blocked_main_thread_warning_threshold`` of Airflow 3.3.2, which sleeps 0.1 s each."""
WAITING = 10
"""One in this many stages waits for its node; the others run."""
OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0, usd_per_hour=0.05)
OTHER = Offer("kubernetes", "", "node:cpu-2", "on-demand", vcpus=2.0, memory_gib=2.0, usd_per_hour=0.10)
SPEC = {
    "version": "v1",
    "name": "train",
    "entrypoint": ["python", "train.py"],
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}},
    "outputs": {"model": "/output/model"},
    "checkpoint": {"path": "/output/checkpoints"},
    "scaling": {"policy": "cost-to-finish", "max_nodes": 4},
}
SPEC_HASH = "0" * 64
ACTOR = Actor("018f0000-0000-7000-8000-000000000000", 1, 3)
COUNTS: Counter[str] = Counter()


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod that the Job controller would create, with a scheduling gate so that the server ignores it."""
    metadata, template = job["metadata"], job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    labels = {**template["metadata"]["labels"], names.INDEX: "0", names.JOB_NAME: metadata["name"]}
    return {
        "metadata": {
            "name": f"{metadata['name']}-0-abcde",
            "labels": labels,
            "ownerReferences": [owner],  # without `controller`, which would end it while the Job is suspended
        },
        "spec": {**template["spec"], "schedulingGates": [{"name": "benchmark"}]},
    }


def run_pod(cluster: Any, name: str) -> None:
    """Report that it runs, as a kubelet would."""
    from fakes.kubernetes import PODS  # noqa: PLC0415 - only the server's process has it

    main = {"name": "main", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    status = {"phase": "Running", "containerStatuses": [main]}
    cluster.api.patch(PODS, "default", name, "application/merge-patch+json", {"status": status}, "status")


def serve(stages: int, config: str, pipe: Connection) -> None:
    """Run the cluster in its own process: return the handles, forget and count on request."""
    from fakes.kubernetes import CONFIG_MAPS, JOBS, PODS, Cluster  # noqa: PLC0415 - only this process has it

    with Cluster(nodes=1, speed=1) as cluster:
        path = cluster.kubeconfig(Path(config))
        maker = KubernetesBackend(kubeconfig=str(path), image="train:1")
        handles = []
        for number in range(stages):
            request = AttemptRequest(
                "file:///store", key_of(number).prefix, "dag.train", 1, 1, Allocation(OFFER)
            )
            rendered = maker.render(request)
            job = cluster.create(JOBS, rendered["job"])
            pod = cluster.create(PODS, pod_of(job))
            if number % WAITING:
                run_pod(cluster, pod["metadata"]["name"])
            handles.append(rendered["name"])
        jobs = {job["metadata"]["name"]: job for job in cluster.list(JOBS, "default")}
        pipe.send([handle_of([jobs[name]]).to_dict() for name in handles])
        while (word := pipe.recv()) != "end":
            if word == "forget":
                cluster.create(CONFIG_MAPS, {"metadata": {"name": "newer"}, "data": {}})
                cluster.compact()
                cluster.cut_watches()
            pipe.send([path for _, path in cluster.requests])


@dataclass(frozen=True, slots=True)
class Delays:
    """Excess milliseconds of each sleep of 1 ms, and the milliseconds that the loop's own thread used."""

    late: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)


async def measure(seconds: float, delays: Delays) -> None:
    """Sleep for 1 ms repeatedly."""
    until = time.monotonic() + seconds
    while (before := time.monotonic()) < until:
        ran = time.thread_time()
        await asyncio.sleep(0.001)
        delays.late.append((time.monotonic() - before - 0.001) * 1e3)
        delays.own.append((time.thread_time() - ran) * 1e3)


def sleep_beside(seconds: float, pipe: Connection) -> None:
    """A loop in its own process that does nothing else: it measures the delays of the machine."""
    delays = Delays()
    asyncio.run(measure(seconds, delays))
    pipe.send(delays.late)


@contextlib.contextmanager
def searches() -> Iterator[dict[str, list[float]]]:
    """Milliseconds of each garbage collection, the full ones apart; in CPython every thread waits for it."""
    found: dict[str, list[float]] = {"young": [], "full": []}
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            found["full" if info["generation"] == 2 else "young"].append((time.monotonic() - began) * 1e3)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def key_of(number: int) -> RunKey:
    """Key of a stage's run."""
    return RunKey("dep", "dag", str(number), "train")


def build(root: Path, handles: list[Handle]) -> None:
    """Write the run of each stage: begun, started, and reporting."""
    spec = json.dumps(EnvSpec.from_dict(SPEC).to_dict()).encode()
    targets = [Allocation(OTHER).to_dict(), Allocation(OFFER, 2).to_dict()]
    plan = json.dumps({"schema": SCHEMA, "value_of_hour_usd": 1.0, "targets": targets}).encode()
    progress = Progress(step=500, total_steps=100_000, steps_per_s=2.0, elapsed_s=250.0)
    status = Status(generation=1, attempt=1, sequence=9, phase="running", progress=progress, start_step=0)
    for number, handle in enumerate(handles):
        key = key_of(number)
        attempt = {"generation": 1, "attempt": 1}
        bodies = [
            ("generation", {"generation": 1, "spec_hash": SPEC_HASH}),
            (
                "attempt-intended",
                {**attempt, "allocation": Allocation(OFFER).to_dict(), "spec_hash": SPEC_HASH},
            ),
            ("attempt-started", {**attempt, "handle": handle.to_dict()}),
        ]
        files = {
            "run.json": json.dumps({"schema": SCHEMA, "key": key.to_dict()}).encode(),
            spec_name(SPEC_HASH): spec,
            "plan.json": plan,
            claim_name(1, 1, 0, 1): Claim(uid="pod").to_json(),
            status_name(1, 1, 0): status.to_json(),
        }
        for event, (kind, body) in enumerate(bodies, start=1):
            files[event_name(event)] = Event(event, read_body(kind, body), "w", time.time(), ACTOR).to_json()
        for name, text in files.items():
            path = root / key.prefix / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)


class Counting(FaultyStore):
    """A store without faults that counts its calls instead of keeping them."""

    def _pass(self, _method: str, _name: str, act: Callable[[], Any]) -> Any:
        COUNTS["store requests"] += 1
        return act()


def wire(url: str, config: str) -> None:
    """Let triggers open this store and this cluster, and count what they do."""
    for module in (stage_watch, scaling_checks):
        module.store_place = lambda *_: type("Place", (), {"open": lambda _self: Counting(open_store(url))})()
        module.open_backend = lambda _name: KubernetesBackend(kubeconfig=config, image="train:1")
    scaling_trigger.task_states = lambda *_: {"-1": "deferred"}
    StageTrigger._task_state = lambda _self: "deferred"  # noqa: SLF001 - Airflow's answer

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any) -> Any:
            COUNTS[name] += 1
            return call(*args)

        return counts

    StageTrigger._poll = counted("polls", StageTrigger._poll)  # noqa: SLF001 - only counts
    ScalingTrigger._check = counted("checks", ScalingTrigger._check)  # noqa: SLF001 - only counts


def triggers_of(number: int, handle: Handle) -> tuple[StageTrigger, ScalingTrigger]:
    """Both triggers of a stage, as a triggerer makes them from their serialized arguments."""
    prefix = key_of(number).prefix
    watching = Watching(3, 1, 1, handle=handle).to_dict()
    stage = StageTrigger(prefix=prefix, watching=watching, ti_id=ACTOR.ti_id, compute="kubernetes")
    folder = prefix.rpartition("/")[0]
    where = {"dag_id": "dag", "run_id": str(number), "task_id": "train", "map_index": -1}
    return stage, ScalingTrigger(folder=folder, compute="kubernetes", **where)


async def watch(trigger: StageTrigger | ScalingTrigger, start_s: float) -> None:
    """Run a trigger; nothing ends in this benchmark, so an event is a fault of it."""
    await asyncio.sleep(start_s)
    async for event in trigger.run():
        COUNTS["events"] += 1
        print("event:", str(event.payload)[:300])


async def watchdog() -> None:
    """Count the warnings that Airflow's own watchdog would log."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.1)
        COUNTS["watchdog warnings"] += time.monotonic() - before > WATCHDOG_S


def rss_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run(handles: list[Handle], options: argparse.Namespace, pipe: Connection) -> None:
    """Run everything and print the result."""
    gc.collect()  # imports are in the oldest generation once a triggerer has run for a while
    idle, delays = Delays(), Delays()
    await measure(5.0, idle)
    memory, objects = rss_mib(), len(gc.get_objects())
    print(f"{objects:,} objects of the collector before the first trigger")
    tasks = []
    for number, handle in enumerate(handles):
        start_s = options.start * number / len(handles)
        tasks += [asyncio.create_task(watch(one, start_s)) for one in triggers_of(number, handle)]
    await asyncio.sleep(options.start + 10.0)
    await settled(handles)
    print(f"memory of a stage's two triggers: {(rss_mib() - memory) / len(handles) * 1024:.0f} KiB,", end=" ")
    print(f"{(len(gc.get_objects()) - objects) / len(handles):.0f} objects of the collector")
    began = time.monotonic()
    gc.collect()
    print(f"a full collection, made here: {(time.monotonic() - began) * 1e3:.0f} ms")
    if options.freeze:
        gc.freeze()
        began = time.monotonic()
        gc.collect()
        print(f"another one after gc.freeze: {(time.monotonic() - began) * 1e3:.0f} ms")
    COUNTS.clear()
    seconds = options.seconds
    tasks.append(asyncio.create_task(watchdog()))
    forget = asyncio.get_running_loop().call_later(seconds / 2, pipe.send, "forget")
    ours, theirs = multiprocessing.Pipe()
    beside = multiprocessing.get_context("spawn").Process(target=sleep_beside, args=(seconds, theirs))
    beside.start()
    cpu = time.process_time()
    with searches() as found:
        await measure(seconds, delays)
    cpu = time.process_time() - cpu
    counts = Counter(COUNTS)
    machine = await asyncio.to_thread(ours.recv)
    beside.join(20)
    forget.cancel()
    for task in tasks:
        task.cancel()
    calls = await asyncio.to_thread(pipe.recv)
    pipe.send("count")
    calls = await asyncio.to_thread(pipe.recv)
    rows = {
        "loop asleep": idle.late,
        "loop at work": delays.late,
        "its own work": delays.own,
        "young garbage": found["young"],
        "full garbage": found["full"],
        "machine": machine,
    }
    report(rows, counts, seconds, cpu)
    kinds = [call for call in calls if "labelSelector" in call]
    watches = sum("watch=true" in call for call in kinds)
    print(f"calls of the API server: {len(kinds)} lists and watches ({watches} watches); {len(calls)} in all")


async def settled(handles: list[Handle]) -> None:
    """Wait until every stage has been polled and checked once."""
    while COUNTS["polls"] < len(handles) or COUNTS["checks"] < len(handles):  # noqa: ASYNC110 - rarely twice
        await asyncio.sleep(1.0)


def report(rows: dict[str, list[float]], counts: Counter[str], seconds: float, cpu: float) -> None:
    """Print the figures."""
    for name, values in rows.items():
        thousandth = (
            statistics.quantiles(values, n=1000, method="inclusive")[-1]
            if len(values) > 1
            else max(values, default=0.0)
        )
        longest = max(values, default=0.0)
        print(f"{name:13} longest {longest:7.1f} ms   99.9 % within {thousandth:6.1f} ms   ({len(values):,})")
    for name in ("polls", "checks", "store requests"):
        print(f"{counts[name] / seconds:,.1f} {name} a second")
    print(f"{100 * cpu / seconds:.0f} % of a core")
    print(f"{counts['watchdog warnings']} watchdog warnings, {counts['events']} events")
    late = max(rows["loop at work"])
    print(f"held to {MOST_MS:g} ms: {'yes' if late <= MOST_MS else 'NO'}")
    print(f"longest delay, of the machine's own: {late / max(rows['machine']):.1f} times")


def main() -> None:
    """Start the server, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--start", type=float, default=30.0, help="seconds within which the triggers start")
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--threshold", type=int, default=gc.get_threshold()[0])
    options = parser.parse_args()
    gc.set_threshold(options.threshold, *gc.get_threshold()[1:])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        config = str(Path(folder) / "config")
        pipe, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(options.stages, config, theirs)
        )
        server.start()
        try:
            handles = [Handle.from_dict(body) for body in pipe.recv()]
            build(Path(folder) / "store", handles)
            wire(f"file://{folder}/store", config)
            asyncio.run(run(handles, options, pipe))
        finally:
            with contextlib.suppress(OSError):
                pipe.send("end")
            server.join(20)
            close_views()


if __name__ == "__main__":
    main()
