"""One event loop that looks at 1,000 stages of a cluster: how long is it ever kept from its other work?

    python benchmarks/triggerer.py [--stages 1000] [--seconds 60]

A fake API server in its own process (real HTTP) serves a Job and its pod for each stage. Nine in ten of them
run, and the others wait for a node. Each stage has its own backend, as a trigger has, and checks every 5 s
from a thread; all share one view of the namespace. Halfway, the server cuts every watch and forgets every
resource version (410), so that everything is listed again. A coroutine that sleeps 1 ms measures how late it
wakes up.

The causes of a delay are measured separately. The CPU time of the loop's own thread shows what the loop
itself did. Garbage collections stop every thread of the process. A separate process that only sleeps shows
the delays of the machine. The rest is waiting for the interpreter's lock.

Reported: the longest delay and its 99.9th percentile, the same for a loop that only sleeps, the three causes,
and the calls that reached the server. Requirement: one list and one watch of each kind, and no delay over 50
ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import KubernetesBackend, names
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.shared_watch import close_views
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Handle

EVERY_S = 5.0
MOST_MS = 50.0
WAITING = 10
"""One in this many stages waits for its node; the others run."""
OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0)


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
            prefix, allocation = f"dep/dag/{number}/train/-1", Allocation(OFFER)
            request = AttemptRequest("file:///store", prefix, "dag.train", 1, 1, allocation)
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
def searches() -> Iterator[list[float]]:
    """Milliseconds of each garbage collection; in CPython every thread waits for it."""
    found: list[float] = []
    began = 0.0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            found.append((time.monotonic() - began) * 1e3)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


async def look(backend: KubernetesBackend, handle: Handle, seconds: float, start_s: float) -> int:
    """One trigger: a check every 5 s, from a thread; counts how often it saw its stage."""
    until, seen = time.monotonic() + seconds, 0
    await asyncio.sleep(start_s)
    while time.monotonic() < until:
        status = await asyncio.to_thread(backend.observe, handle)
        seen += bool(status.nodes)
        await asyncio.sleep(EVERY_S)
    return seen


async def run(handles: list[Handle], config: str, seconds: float, pipe: Connection) -> None:
    """Run everything and print the result."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))
    backends = [KubernetesBackend(kubeconfig=config, image="train:1", watches=True) for _ in handles]
    await asyncio.to_thread(lambda: [backend.cluster for backend in backends])  # as the hook gives them
    gc.collect()  # imports are in the oldest generation once a triggerer has run for a while
    idle, delays = Delays(), Delays()
    await measure(5.0, idle)
    looks = [
        look(backend, handle, seconds, EVERY_S * index / len(handles))
        for index, (backend, handle) in enumerate(zip(backends, handles, strict=True))
    ]
    forget = asyncio.get_running_loop().call_later(seconds / 2, pipe.send, "forget")
    ours, theirs = multiprocessing.Pipe()
    beside = multiprocessing.get_context("spawn").Process(target=sleep_beside, args=(seconds, theirs))
    beside.start()
    with searches() as found:
        _, *seen = await asyncio.gather(measure(seconds, delays), *looks)
    machine = await asyncio.to_thread(ours.recv)
    beside.join(20)
    forget.cancel()
    calls = await asyncio.to_thread(pipe.recv)
    pipe.send("count")
    calls = await asyncio.to_thread(pipe.recv)
    rows = {
        "loop asleep": idle.late,
        "loop looking": delays.late,
        "its own work": delays.own,
        "garbage": found,
        "machine": machine,
    }
    report(rows, seen, [call for call in calls if "labelSelector" in call])


def report(rows: dict[str, list[float]], seen: list[int], calls: list[str]) -> None:
    """Print the figures."""
    for name, values in rows.items():
        thousandth = (
            statistics.quantiles(values, n=1000, method="inclusive")[-1]
            if len(values) > 1
            else max(values, default=0.0)
        )
        longest = max(values, default=0.0)
        print(f"{name:12} longest {longest:7.1f} ms   99.9 % within {thousandth:6.1f} ms")
    watches = [call for call in calls if "watch=true" in call]
    print(f"stages {len(seen)}, looks {sum(seen)}; calls {len(calls)}, of them watches {len(watches)}")
    late = max(rows["loop looking"])
    print(f"held to {MOST_MS:g} ms: {'yes' if late <= MOST_MS else 'NO'}")
    print(f"longest delay, of the machine's own: {late / max(rows['machine']):.1f} times")


def main() -> None:
    """Start the server, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = str(Path(folder) / "config")
        pipe, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(options.stages, config, theirs)
        )
        server.start()
        try:
            handles = [Handle.from_dict(body) for body in pipe.recv()]
            asyncio.run(run(handles, config, options.seconds, pipe))
        finally:
            with contextlib.suppress(OSError):
                pipe.send("end")
            server.join(20)
            close_views()


if __name__ == "__main__":
    main()
