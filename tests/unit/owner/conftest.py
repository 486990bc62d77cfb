"""A run with its store, its scripted machines, and a training that keeps running across owners."""

from __future__ import annotations

import pytest

from envscaler_agent.protocol import (
    Control,
    Ended,
    Manifest,
    Progress,
    Status,
    checkpoint_name,
    control_name,
    status_name,
)
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store
from envscaler_airflow.testing import ManualClock, ScriptedBackend
from envscaler_airflow.testing.scripted_backend import cpu_offer

KEY = RunKey("deployment", "dag", "run", "train")
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
entrypoint: [python, train.py]
outputs: {model: /output/model}
checkpoint: {every: 10m}
scaling: {policy: cost-to-finish, cooldown: 10s, stabilization: 1s, speedup: [
  {offer: scripted/cpu-2/on-demand, relative_to: scripted/cpu-1/on-demand, mean: 1.9, stdev: 0.05,
   source: test}]}
"""


class Killed(BaseException):
    """The worker process is gone; nothing after this line ran."""


class Mortal:
    """Pass calls on, and die before or after the n-th one."""

    def __init__(self, target, methods, lives):
        """Watch *methods* of *target*; all calls of one process share *lives*."""
        self._target, self._methods, self._lives = target, methods, lives

    def __getattr__(self, name):
        """Return the target's attribute; calls to *methods* count."""
        found = getattr(self._target, name)
        if name not in self._methods:
            return found

        def call(*args, **kwargs):
            self._lives["calls"] += 1
            dies = self._lives["calls"] == self._lives["dies_at"]
            if dies and not self._lives["after"]:
                raise Killed
            answer = found(*args, **kwargs)
            if dies:
                raise Killed
            return answer

        return call


class World:
    """A run with its store, its scripted machines, and a training that keeps running across owners."""

    key = KEY
    prefix = KEY.prefix
    killed = Killed

    def __init__(self, tmp_path, *, offers=None, spec=SPEC, backend=ScriptedBackend):
        """Prepare a run that has not begun."""
        (tmp_path / "train.yaml").write_text(spec)
        self.spec_path = tmp_path / "train.yaml"
        self.clock = ManualClock()
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.backend = backend(offers, clock=self.clock, ends_on_stop=False)
        self.tries = 0
        self.life, self.born = "life-1", 0
        self.log = Run(self.store, KEY).events

    def owner(self, *, max_tries=3, budget_usd=None, lives=None, value_of_hour=100.0, restart="resume"):
        """Return an owner for the next try of the task; a different *max_tries* means a clear."""
        self.tries, self.born = self.tries + 1, self.born + 1
        actor = Actor(f"ti-{self.born:02d}", self.tries, max_tries, life=self.life)
        store, backend = self.mortal(lives)
        stage = Stage(
            spec=load_spec(self.spec_path),
            spec_source="train.yaml",
            budget_usd=budget_usd,
            value_of_hour=value_of_hour,
            restart=restart,
        )
        return Owner(run=Run(store, KEY, clock=self.clock.time), backend=backend, actor=actor, stage=stage)

    def mortal(self, lives):
        """Return store and backend as seen by a process that dies as *lives* says; None: it does not die."""
        if lives is None:
            return self.store, self.backend
        return (
            Mortal(self.store, ("write", "create", "put_file"), lives),
            Mortal(self.backend, ("submit", "stop", "release", "resize", "rescale"), lives),
        )

    def recreate_dag_run(self):
        """Delete the DAG run and create it again: tries count from 1, with a new DAG run id."""
        self.tries, self.life = 0, "life-2"

    def files(self):
        """Return every file in the run's folder with its content."""
        return {name: self.store.read(name) for name in self.store.names(KEY.prefix)}

    @property
    def output(self):
        """Return the URI of the last attempt's model, in the first generation; node states do not matter."""
        last = self.state.attempts_of(1)[-1].number
        return self.store.uri(f"{KEY.prefix}/outputs/g1-a{last}-c1/model")

    @property
    def state(self):
        """Return the state folded from the run's events."""
        return self.log.load()

    @property
    def handle(self):
        """Return the handle of the running attempt."""
        return self.state.live.handle

    def say(
        self,
        *,
        node=0,
        ended=None,
        step=10,
        checkpoint=None,
        outputs=None,
        health="ok",
        phase="running",
        **more,
    ):
        """Write a status for a node of the running attempt; *more* adds progress, *training* is its phase."""
        checkpoint_s, training = more.pop("checkpoint_s", None), more.pop("training", None)
        usage = more.pop("usage", {})
        live = self.state.live
        name = f"{KEY.prefix}/{status_name(live.generation, live.number, node)}"
        old = self.store.read(name)
        sequence = Status.from_json(old, where="t").sequence + 1 if old else 1
        status = Status(
            generation=live.generation,
            attempt=live.number,
            node=node,
            sequence=sequence,
            checkpoint_s=checkpoint_s,
            phase="ended" if ended else phase,
            health=health,
            progress=Progress(
                step=step, total_steps=1000, epoch=step // 10, epochs=100, phase=training, **more
            ),
            start_step=0,
            last_checkpoint=checkpoint,
            last_checkpoint_step=step if checkpoint else None,
            ended=ended,
            outputs=outputs or {},
            usage=usage,
        )
        self.store.write(name, status.to_json())

    def save(self, step):
        """Complete a checkpoint of the running attempt and return its name."""
        live = self.state.live
        name = checkpoint_name(live.generation, step, live.number)
        manifest = Manifest(step=step, generation=live.generation, attempt=live.number)
        self.store.write(f"{KEY.prefix}/checkpoints/{name}/manifest-c1.json", manifest.to_json())
        return name

    def succeed(self):
        """End the running attempt with success on every node."""
        for node in range(len(self.backend.observe(self.handle).nodes)):
            ended = Ended(exit_code=0, reason="succeeded")
            self.say(node=node, ended=ended, step=1000, outputs={"model": "file:///etc"})
        self.backend.end(self.handle)

    def leave(self, step=50):
        """Do what a drain requests of the running attempt: save, report the save, exit."""
        name = self.save(step)
        self.say(ended=Ended(exit_code=85, reason="drained"), step=step, checkpoint=name)
        self.backend.end(self.handle, exit_code=85, reason="drained")

    def control(self):
        """Return the owner's latest request to the running attempt."""
        live = self.state.live
        text = self.store.read(f"{KEY.prefix}/{control_name(live.generation, live.number)}")
        return Control.from_json(text, where="t")

    def ask_move(self, vcpus=2, *, target=None):
        """Request a move of the running attempt, as the sensor does."""
        live = self.state.live
        because = {"reason": "faster", "numbers": {}, "forced": True}
        return request_move(
            Run(self.store, KEY),
            target=target or Allocation(cpu_offer(vcpus)),
            from_attempt=(live.generation, live.number),
            because=because,
        )

    def answer(self, request):
        """Return the owner's answer to *request*."""
        return next(
            event for event in self.log.read() if getattr(event.body, "request", None) == request.number
        )

    def watch(self, waiting):
        """Return what a trigger sees first."""
        return AttemptWatcher(
            run=Run(self.store, KEY, clock=self.clock.time),
            backend=self.backend,
            watching=waiting.watching,
            monotonic=self.clock.monotonic,
        )


@pytest.fixture
def new_world(tmp_path):
    """Makes a run that has not begun; takes the offers (None: the usual ones), a spec and a backend."""
    return lambda offers=None, **more: World(tmp_path, offers=offers, **more)


@pytest.fixture
def world(new_world):
    """A run that has not begun."""
    return new_world()
