"""Record eleven runs of the owner on scripted machines, event by event.

Each runs in a temporary store with a clock set by hand. Writers, hashes of specs and the store's place are
replaced by names; the order of fields stays, so that the bytes of each event are frozen too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden.files import json_text, replaced

from envscaler_agent.protocol import (
    Ended,
    Manifest,
    Progress,
    Status,
    checkpoint_name,
    status_name,
)
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import BackendError, BudgetError, CapacityError, RunFailedError
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import accept_delivery, request_move, request_stop
from envscaler_airflow.owner.stage import Delivered, Stage, StoppedError, Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import PruneIntended
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend, ManualClock

KEY = RunKey("golden", "dag", "run", "train")
STORE = "file:///golden/store"
RECORDED = ("events.json", "result.json")
"""Files that the run itself writes."""
DERIVED = ("trace.json", "narration.txt")
"""Files that are computed from its events."""
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}, limits: {memory: 6Gi}}
num_nodes: 1..4
entrypoint: [python, train.py]
outputs: {model: /output/model}
checkpoint: {every: 10m}
distributed: {launcher: torchrun, elastic: true}
scaling: {policy: %s, cooldown: 10s, stabilization: 1s}
"""
SMALL = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=4.0, usd_per_hour=1.0)
LARGE = replace(SMALL, instance_type="node:cpu-2", vcpus=2.0, memory_gib=8.0, usd_per_hour=1.5)
SPOT = replace(SMALL, capacity_type="spot", usd_per_hour=0.3)


class FrozenStore(FileStore):
    """A folder with the clock's time, so that requests are dated by it too."""

    clock = ManualClock()

    def now(self):
        """The clock's."""
        return self.clock.time()


class Recorder:
    """One run with its store, its machines and the training on them."""

    def __init__(self, folder: Path, *, policy="cost-to-finish", offers=(SMALL, LARGE)) -> None:
        """Prepare a run in the empty *folder*; nothing is started."""
        (folder / "store").mkdir(parents=True)
        self.folder, self.clock = folder, ManualClock()
        (folder / "train.yaml").write_text(SPEC % policy)
        self.store = FrozenStore(folder / "store")
        self.store.clock = self.clock
        self.backend = ElasticBackend(offers, clock=self.clock, ends_on_stop=False)
        self.log = Run(self.store, KEY).events
        self.tries = self.most = 0
        self.saved = {}

    def owner(self, *, max_tries=3, budget_usd=None, more=""):
        """The next try of the task; another *max_tries* is a clear, *more* is added to its spec."""
        self.tries, self.most = self.tries + 1, max_tries
        spec = self.folder / "train.yaml"
        spec.write_text(spec.read_text() + more)
        return Owner(
            run=Run(self.store, KEY, clock=self.clock.time),
            backend=self.backend,
            actor=self.actor,
            stage=Stage(spec=load_spec(spec), spec_source="train.yaml", budget_usd=budget_usd),
        )

    @property
    def actor(self):
        """The newest try."""
        return Actor(f"ti-{self.tries:02d}", self.tries, self.most, life="life-1")

    @property
    def live(self):
        """The live attempt."""
        return self.log.load().live

    @property
    def handle(self):
        """Of the live attempt."""
        return self.live.handle

    def report(self, step, *, ended=None, save=False, after_s=60.0):
        """After *after_s* seconds every node has made *step* steps, and saved where *save* is set."""
        self.clock.advance(after_s)
        live = self.live
        name = checkpoint_name(live.generation, step, live.number)
        begun_from = max(
            (
                step
                for (life, number), step in self.saved.items()
                if life == live.generation and number < live.number
            ),
            default=0,
        )
        if save:
            self.saved[live.generation, live.number] = step
            manifest = Manifest(step=step, generation=live.generation, attempt=live.number)
            self.store.write(f"{KEY.prefix}/checkpoints/{name}/manifest-c1.json", manifest.to_json())
        last = self.saved.get((live.generation, live.number))
        for node in range(live.allocation.nodes):
            path = f"{KEY.prefix}/{status_name(live.generation, live.number, node)}"
            old = self.store.read(path)
            status = Status(
                generation=live.generation,
                attempt=live.number,
                node=node,
                sequence=Status.from_json(old, where=path).sequence + 1 if old else 1,
                phase="ended" if ended else "running",
                progress=Progress(
                    step=step, total_steps=1000, epoch=step // 100, epochs=10, elapsed_s=30.0 + step
                ),
                start_step=begun_from,
                setup_s=5.0,
                checkpoint_s=None if last is None else 2.0,
                last_checkpoint=None if last is None else checkpoint_name(live.generation, last, live.number),
                last_checkpoint_step=last,
                ended=ended,
                outputs={"model": "file:///ignored"} if ended and ended.exit_code == 0 else {},
            )
            self.store.write(path, status.to_json())

    def end(self, step, reason, *, exit_code=None, signal=None, save=False, lines=()):
        """Let the live attempt end on every node."""
        ended = Ended(exit_code=exit_code, signal=signal, reason=reason, last_lines=tuple(lines))
        self.report(step, ended=ended, save=save)
        self.backend.end(self.handle, exit_code=exit_code, signal=signal, reason=reason)

    def succeed(self, owner):
        """Let the live attempt succeed, and Airflow take the delivered result."""
        self.end(1000, "succeeded", exit_code=0, save=True)
        got = owner.resume(Wake("status"))
        assert isinstance(got, Delivered), got
        accept_delivery(Run(self.store, KEY), self.actor)

    def drain(self, step):
        """Let the live attempt save and end, as the owner requests."""
        self.end(step, "drained", exit_code=85, save=True)

    def request_move(self, target, *, forced=True):
        """Request *target*, as the sensor does."""
        live = self.live
        because = {"reason": f"{target.name} saves $1.00", "numbers": {}, "forced": forced}
        attempt = (live.generation, live.number)
        request_move(Run(self.store, KEY), target=target, from_attempt=attempt, because=because)

    def events(self):
        """All events of the store, with names in place of random values."""
        found, names, number = [], {f"file://{self.folder}/store": STORE}, 1
        writers, specs = {}, {}
        while (text := self.store.read(f"{KEY.prefix}/events/{number:06d}.json")) is not None:
            event = json.loads(text)
            writers.setdefault(event["writer"], f"writer-{len(writers) + 1}")
            if spec_hash := event["body"].get("spec_hash"):
                specs.setdefault(spec_hash, f"spec-{len(specs) + 1}")
            found.append(event)
            number += 1
        return json.loads(replaced(json.dumps(found), names | writers | specs))


def success(run):
    """From the first start to the delivery."""
    owner = run.owner()
    owner.enter()
    run.report(400, save=True)
    run.succeed(owner)


def spot_loss(run):
    """A spot machine is lost; its release fails at first; the next attempt resumes and succeeds."""
    owner = run.owner()
    owner.enter()
    run.report(400, save=True)
    run.report(430)
    run.backend.lose(run.handle)
    run.backend.fail_next("release", BackendError("the API server does not answer", transient=True))
    owner.resume(Wake("status"))
    run.clock.advance(10)
    owner.resume(Wake("backoff"))
    run.report(700, save=True)
    run.succeed(owner)


def crash_twice(run):
    """The same exception at the same step ends it twice: the run fails."""
    owner = run.owner()
    lines = ("Traceback (most recent call last):", "ValueError: no such column")
    owner.enter()
    run.report(30, save=True)
    run.end(42, "failed", exit_code=3, lines=lines)
    owner.resume(Wake("status"))
    run.clock.advance(10)
    owner.resume(Wake("backoff"))
    run.report(40, save=True)
    run.end(42, "failed", exit_code=3, lines=lines)
    with pytest.raises(RunFailedError):
        owner.resume(Wake("status"))


def out_of_memory(run):
    """Memory runs out at 6 GiB: the next attempt has more, and succeeds."""
    owner = run.owner()
    owner.enter()
    run.report(50, save=True)
    run.end(70, "out-of-memory", signal=9)
    owner.resume(Wake("status"))
    run.clock.advance(10)
    owner.resume(Wake("backoff"))
    run.succeed(owner)


def budget(run):
    """The budget is spent: the attempt saves and stops, and the run fails."""
    owner = run.owner(budget_usd=2.0)
    owner.enter()
    run.report(100, save=True)
    run.clock.advance(7200)
    owner.resume(Wake("status"))
    run.drain(120)
    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))


def cancel(run):
    """A user cancels: the attempt saves and stops; a clear resumes the run, with another spec."""
    owner = run.owner()
    owner.enter()
    run.report(100)
    request_stop(Run(run.store, KEY), reason="cancelled", by="user")
    owner.resume(Wake("request"))
    run.drain(120)
    with pytest.raises(StoppedError):
        owner.resume(Wake("status"))
    again = run.owner(max_tries=7, more="env: [{name: ROUND, value: '2'}]\n")
    again.enter()
    run.succeed(again)


def move(run):
    """A move is refused, another one accepted; a machine is not available; then it succeeds elsewhere."""
    owner = run.owner()
    owner.enter()
    run.report(100)
    run.request_move(Allocation(replace(SMALL, instance_type="node:cpu-64", vcpus=64.0)), forced=False)
    owner.resume(Wake("request"))
    run.report(140)
    run.request_move(Allocation(LARGE, 2))
    owner.resume(Wake("request"))
    run.drain(150)
    run.backend.fail_next("submit", CapacityError("InsufficientInstanceCapacity: none left"))
    owner.resume(Wake("status"))
    run.clock.advance(10)
    owner.resume(Wake("backoff"))
    run.succeed(owner)


def in_place(run):
    """Larger, four nodes that do not come, two, and one, without a restart; then smaller at a start."""
    owner = run.owner()
    owner.enter()
    run.report(100)
    run.request_move(Allocation(LARGE))
    owner.resume(Wake("request"))
    run.report(200, save=True)
    run.backend.fail_next("rescale", CapacityError("0/3 nodes are free"))
    run.request_move(Allocation(LARGE, 4))
    owner.resume(Wake("request"))
    run.report(300, save=True)
    run.request_move(Allocation(LARGE, 2))
    owner.resume(Wake("request"))
    run.report(400, save=True)
    run.request_move(Allocation(LARGE))
    owner.resume(Wake("request"))
    run.report(450, save=True)
    run.request_move(Allocation(SMALL))
    owner.resume(Wake("request"))
    run.report(500, save=True)
    run.backend.lose(run.handle)
    owner.resume(Wake("status"))
    run.clock.advance(10)
    owner.resume(Wake("backoff"))
    run.succeed(owner)


def retry(run):
    """The worker dies, and the task's next try adopts the live attempt."""
    run.owner().enter()
    run.report(100)
    again = run.owner()
    again.enter()
    run.report(200, save=True)
    run.succeed(again)


def clear(run):
    """A succeeded task is cleared: a new generation starts, and its time runs out."""
    owner = run.owner()
    owner.enter()
    run.succeed(owner)
    again = run.owner(max_tries=7)
    again.enter()
    run.report(100)
    again.time_out("the task's time is over")
    run.drain(110)
    with pytest.raises(RunFailedError):
        again.resume(Wake("status"))


def prune(run):
    """A stage succeeds, and its run is removed from the store long afterwards."""
    success(run)
    log = Run(run.store, KEY).events
    run.clock.advance(40 * 86_400)
    log.append(log.load().number, PruneIntended(reason="succeeded 40 d ago"))


RUNS = {
    "success": (success, {}),
    "spot-loss": (spot_loss, {"offers": (SPOT, LARGE)}),
    "crash-twice": (crash_twice, {}),
    "out-of-memory": (out_of_memory, {}),
    "budget": (budget, {}),
    "cancel": (cancel, {}),
    "move": (move, {}),
    "in-place": (in_place, {"policy": "vertical"}),
    "retry": (retry, {}),
    "clear": (clear, {}),
    "prune": (prune, {}),
}


def record(name, folder):
    """Events of the run *name*, made in *folder*, and its ``result.json``, None where it left none."""
    play, options = RUNS[name]
    run = Recorder(folder, **options)
    play(run)
    result = run.store.read(f"{KEY.prefix}/result.json")
    names = {f"file://{folder}/store": STORE}
    return run.events(), None if result is None else json.loads(replaced(result.decode(), names))


def golden_files(name, folder):
    """Golden files of the run *name* from its store; *folder* is empty."""
    events, result = record(name, folder)
    found = {f"runs/{name}/events.json": json_text(events, sort_keys=False)}
    return found if result is None else found | {f"runs/{name}/result.json": json_text(result)}
