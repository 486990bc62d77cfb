"""One event loop that looks at 1,000 stages of a cluster: how long is it ever kept from its other work?

    python benchmarks/triggerer.py [--stages 1000] [--seconds 60]

A fake API server in a process of its own (real HTTP) holds a Job and its pod for each stage. Each
stage has a backend of its own, as a trigger has, and looks every 5 s from a thread; all share the one view of
the namespace. In the middle every watch is cut and every resource version is forgotten (410), so that all is
listed anew. A coroutine that sleeps 1 ms measures how much later it wakes.

Reported: longest and 99.9th percentile of the delay, with what the same loop shows when it only sleeps; calls
that reached the server. To hold: one list and one watch of each kind, and no delay over 50 ms.
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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from envscaler_airflow.backends.base import AttemptRequest, Handle
from envscaler_airflow.backends.kubernetes import KubernetesBackend, names
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.watch import close_views
from envscaler_airflow.planning.offers import Allocation, Offer

EVERY_S = 5.0
MOST_MS = 50.0
OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod that the Job controller would make, held by a gate: the server has no more to do with it."""
    metadata, template = job["metadata"], job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    labels = {**template["metadata"]["labels"], names.INDEX: "0", names.JOB_NAME: metadata["name"]}
    return {
        "metadata": {
            "name": f"{metadata['name']}-0-abcde",
            "labels": labels,
            "ownerReferences": [owner],  # not its controller, which would end it while the Job is suspended
        },
        "spec": {**template["spec"], "schedulingGates": [{"name": "benchmark"}]},
    }


def serve(stages: int, config: str, pipe: Connection) -> None:
    """The cluster, in its own process: say the handles, forget and count when asked."""
    from fakes.kubernetes import CONFIG_MAPS, JOBS, PODS, Cluster  # noqa: PLC0415 - only this process has it

    with Cluster(nodes=1, speed=1) as cluster:
        path = cluster.kubeconfig(Path(config))
        maker = KubernetesBackend(kubeconfig=str(path), image="train:1")
        handles = []
        for number in range(stages):
            prefix, allocation = f"dep/dag/{number}/train/-1", Allocation(OFFER)
            request = AttemptRequest("file:///store", prefix, "dag.train", 1, 1, allocation, ("train",))
            rendered = maker.render(request)
            job = cluster.create(JOBS, rendered["job"])
            cluster.create(PODS, pod_of(job))
            handles.append(rendered["name"])
        jobs = {job["metadata"]["name"]: job for job in cluster.list(JOBS, "default")}
        pipe.send([handle_of([jobs[name]]).to_dict() for name in handles])
        while (word := pipe.recv()) != "end":
            if word == "forget":
                cluster.create(CONFIG_MAPS, {"metadata": {"name": "newer"}, "data": {}})
                cluster.compact()
                cluster.cut_watches()
            pipe.send([path for _, path in cluster.requests])


async def measure(seconds: float, delays: list[float]) -> None:
    """Milliseconds that a sleep of 1 ms took too long."""
    until = time.monotonic() + seconds
    while (before := time.monotonic()) < until:
        await asyncio.sleep(0.001)
        delays.append((time.monotonic() - before - 0.001) * 1e3)


async def look(backend: KubernetesBackend, handle: Handle, seconds: float, start_s: float) -> int:
    """One trigger: a look every 5 s, from a thread; how often it saw its stage."""
    until, seen = time.monotonic() + seconds, 0
    await asyncio.sleep(start_s)
    while time.monotonic() < until:
        status = await asyncio.to_thread(backend.observe, handle)
        seen += bool(status.nodes)
        await asyncio.sleep(EVERY_S)
    return seen


async def run(handles: list[Handle], config: str, seconds: float, pipe: Connection) -> None:
    """Everything; prints what came of it."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))
    backends = [KubernetesBackend(kubeconfig=config, image="train:1", watches=True) for _ in handles]
    await asyncio.to_thread(lambda: [backend.cluster for backend in backends])  # as the hook gives them
    gc.collect()  # what was imported is old by the time that a triggerer has run for a while
    idle: list[float] = []
    await measure(5.0, idle)
    delays: list[float] = []
    looks = [
        look(backend, handle, seconds, EVERY_S * index / len(handles))
        for index, (backend, handle) in enumerate(zip(backends, handles, strict=True))
    ]
    forget = asyncio.get_running_loop().call_later(seconds / 2, pipe.send, "forget")
    _, *seen = await asyncio.gather(measure(seconds, delays), *looks)
    forget.cancel()
    calls = await asyncio.to_thread(pipe.recv)
    pipe.send("count")
    calls = await asyncio.to_thread(pipe.recv)
    report(idle, delays, seen, [call for call in calls if "labelSelector" in call])


def report(idle: list[float], delays: list[float], seen: list[int], calls: list[str]) -> None:
    """Print the figures."""
    for name, values in (("asleep", idle), ("looking", delays)):
        thousandth = statistics.quantiles(values, n=1000)[-1]
        print(f"loop {name:8} longest {max(values):7.1f} ms   99.9 % within {thousandth:6.1f} ms")
    watches = [call for call in calls if "watch=true" in call]
    print(f"stages {len(seen)}, looks {sum(seen)}; calls {len(calls)}, of them watches {len(watches)}")
    print(f"held to {MOST_MS:g} ms: {'yes' if max(delays) <= MOST_MS else 'NO'}")


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
