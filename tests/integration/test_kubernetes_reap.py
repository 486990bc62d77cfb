"""The reaper removes orphaned objects of a cluster, and no others."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from fakes.kubernetes import JOBS, PODS, Cluster, Program
from integration.kubernetes.rig import eventually, running

from envscaler_agent.messages import SCHEMA
from envscaler_airflow import ReapOperator
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.hooks import states
from envscaler_airflow.owner import reap as reap_module
from envscaler_airflow.owner.reap import reap
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import Failed, NewGeneration, read_body
from envscaler_airflow.store import RunKey, check_store, open_store
from envscaler_airflow.store.run import Run

ALLOCATION = Allocation(Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0))


SPEC = {"version": "v1", "name": "train", "entrypoint": ["train"]}


class World:
    """A cluster, a store, and runs that each have a live attempt."""

    def __init__(self, cluster, folder):
        """Nothing runs."""
        self.cluster = cluster
        self.store = open_store(f"file://{folder}/store")
        check_store(self.store)
        self.kubeconfig = str(cluster.kubeconfig(folder / "config"))
        self.backend = KubernetesBackend(
            kubeconfig=self.kubeconfig, image="train:1", wait_for_node_s=0, sleep=lambda _s: time.sleep(0.01)
        )

    def run(self, key):
        """Start an attempt of the run *key*; the name of its Job."""
        log, owner = Run(self.store, key).events, Actor("ti-1", 1, 3)
        self.store.write(f"{key.prefix}/spec-h.json", json.dumps(SPEC).encode())
        self.store.write(
            f"{key.prefix}/run.json", json.dumps({"schema": SCHEMA, "key": key.to_dict()}).encode()
        )
        request = AttemptRequest(self.store.url, key.prefix, "dag.train", 1, 1, ALLOCATION)
        handle = self.backend.submit(request)
        running(self.backend, handle)  # the Job recreates a pod that is deleted before it runs
        attempt = {"generation": 1, "attempt": 1}
        log.append(0, NewGeneration(generation=1, spec_hash="h"), actor=owner)
        log.append(
            1, read_body("attempt-intended", {**attempt, "allocation": ALLOCATION.to_dict()}), actor=owner
        )
        log.append(2, read_body("attempt-started", {**attempt, "handle": handle.to_dict()}), actor=owner)
        return handle.name

    def live(self):
        """Names of Jobs whose pods run."""
        pods = [
            pod for pod in self.cluster.list(PODS, "default") if "deletionTimestamp" not in pod["metadata"]
        ]
        return {
            pod["metadata"]["labels"]["batch.kubernetes.io/job-name"]
            for pod in pods
            if pod["status"].get("phase") in ("Pending", "Running")
        }


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Jobs are old from the start."""
    monkeypatch.setattr(reap_module, "YOUNG_S", -1e6)  # for any difference of the two clocks
    with Cluster(nodes=1, speed=5) as cluster:
        cluster.script(Program(seconds=0), container="install")
        cluster.script(Program(term_code=0), container="sidecar")
        cluster.script(Program(term_code=87), container="main")
        yield World(cluster, tmp_path)


GOOD, GONE = RunKey("prod", "dag", "good", "train"), RunKey("prod", "dag", "gone", "train")
OTHER = RunKey("staging", "dag", "gone", "train")


def test_a_live_attempt_whose_task_is_over_is_asked_to_go(world):
    """It may still save; then the reaper records its end and removes its Job (D6). Others stay."""
    good, gone = world.run(GOOD), world.run(GONE)

    def over(key):
        return "its task is failed in Airflow" if key == GONE else None

    only_said = list(reap(world.store, world.backend, task_is_over=over, dry_run=True))
    assert world.live() == {good, gone}
    first = list(reap(world.store, world.backend, task_is_over=over))
    eventually(world.live, lambda live: gone not in live)
    world.cluster.advance(60)
    list(reap(world.store, world.backend, task_is_over=over))

    assert [(one.handle.name, one.reason) for one in first] == [(gone, "its task is failed in Airflow")]
    assert only_said == first
    assert [one["metadata"]["name"] for one in world.cluster.list(JOBS, "default")] == [good]
    state = Run(world.store, GONE).events.load()
    assert (state.status, [attempt.outcome for attempt in state.attempts]) == ("stopped", ["stopped"])
    assert state.attempts[0].end.usage


def test_a_job_whose_run_has_ended_is_removed(world):
    """Airflow is not asked: the run's events show the end."""
    name = world.run(GONE)
    Run(world.store, GONE).events.append(3, Failed(generation=1, reason="r"), actor=None)
    ended = {"generation": 1, "attempt": 1, "outcome": "lost", "usd": 0.1, "usage": [[0, 1.0, 2.0]]}
    Run(world.store, GONE).events.append(4, read_body("attempt-ended", ended), actor=None)

    assert [one.handle.name for one in reap(world.store, world.backend)] == [name]
    assert world.cluster.list(JOBS, "default") == []


def test_the_operator_asks_airflow_for_tasks_of_its_own_deployment(world, monkeypatch):
    """A run of another Airflow on the same store is judged by its events alone."""
    good, gone, other = (world.run(key) for key in (GOOD, GONE, OTHER))
    asked = []

    def task_state(dag_id, run_id, task_id, map_index):
        asked.append((dag_id, run_id, task_id, map_index))
        return "removed" if run_id == "gone" else "deferred"

    monkeypatch.setattr(states, "task_state", task_state)
    monkeypatch.setenv("KUBECONFIG", world.kubeconfig)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", world.store.url)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "prod")

    found = ReapOperator(task_id="reap").execute(SimpleNamespace())

    assert found == [{"attempt": gone, "run": GONE.prefix, "reason": "its task is removed in Airflow"}]
    assert sorted(asked) == [("dag", "gone", "train", -1), ("dag", "good", "train", -1)]
    eventually(world.live, lambda live: live == {good, other})


def test_a_store_that_holds_nothing_of_a_deployment_ends_nothing(world, tmp_path):
    """A folder that is not mounted here, or another cluster's at the same path: its runs are unknown."""
    name = world.run(GOOD)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    empty = open_store(world.store.url)
    Run(empty, OTHER).events.append(0, NewGeneration(generation=1, spec_hash="h"), actor=None)

    assert list(reap(empty, world.backend)) == []
    assert world.live() == {name}


@pytest.mark.parametrize("text", [None, b"torn"], ids=["newer-event", "torn-event"])
def test_a_run_that_cannot_be_told_is_left_alone(world, text):
    """Events of a newer version, or without an owner: the run stays, all others are removed as before."""
    good, gone = world.run(GOOD), world.run(GONE)
    ended = {"generation": 1, "attempt": 1, "outcome": "lost", "usd": 0.1, "usage": [[0, 1.0, 2.0]]}
    for key in (GOOD, GONE):
        Run(world.store, key).events.append(3, read_body("attempt-ended", ended), actor=None)
    if text is None:
        Run(world.store, GOOD).events.append(4, read_body("attempt-revived", {}), actor=None)
    else:
        world.store.write(f"{GOOD.prefix}/events/000005.json", text)

    assert [one.handle.name for one in reap(world.store, world.backend)] == [gone]
    assert [one["metadata"]["name"] for one in world.cluster.list(JOBS, "default")] == [good]


def test_a_start_that_nobody_recorded_is_ended(world):
    """The owner died between the Job and its event: without a handle, only the Job shows what to stop."""
    name = world.run(GONE)
    world.store.delete(f"{GONE.prefix}/events/000003.json")
    gone = {"task_is_over": lambda _key: "its task is failed in Airflow"}

    assert [one.handle.name for one in reap(world.store, world.backend, **gone)] == [name]
    eventually(world.live, lambda live: name not in live)
    world.cluster.advance(60)
    list(reap(world.store, world.backend, **gone))

    assert world.cluster.list(JOBS, "default") == []


def test_a_run_from_a_shell_is_no_task(monkeypatch):
    """Airflow does not know the run, and that is not a reason to end it."""
    monkeypatch.setattr(states, "task_state", lambda *_: "removed")

    assert states.why_over(RunKey("prod", "shell", "first", "train")) is None
    assert states.why_over(GONE) == "its task is removed in Airflow"
