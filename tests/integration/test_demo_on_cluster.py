"""What the demo does to a cluster: an eviction during a stage, and nothing left at the end."""

from __future__ import annotations

import time

import pytest
from fakes.kubernetes import JOBS, PODS, Cluster, Program

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.cli.demo_places import OnCluster
from envscaler_airflow.planning.offers import Allocation


@pytest.fixture
def cluster():
    """One node; the training plays the wrapper."""
    with Cluster(nodes=1, speed=5) as made:
        made.script(Program(seconds=0), container="install")
        made.script(Program(term_code=0), container="sidecar")
        made.script(Program(term_code=143), container="main")
        yield made


@pytest.fixture
def place(cluster, tmp_path, monkeypatch):
    """From the environment, as a user sets it."""
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "config")))
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("ENVSCALER_DEMO_IMAGE", "everything:1")
    for name in ("ENVSCALER_CONFIG", "ENVSCALER_NAMESPACE", "ENVSCALER_IMAGE", "ENVSCALER_SIDECAR_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return OnCluster()


def start(place, deployment):
    """An attempt of a run of that deployment."""
    offer = place._backend.offers()[0]
    prefix = f"{deployment}/dag/run/train/-1"
    return place._backend.submit(
        AttemptRequest(place.store.url, prefix, "dag.train", 1, 1, Allocation(offer))
    )


def uids(cluster):
    """Running pods that do not terminate."""
    pods = [pod for pod in cluster.list(PODS, "default") if pod["status"].get("phase") == "Running"]
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def eventually(claim):
    """Return once *claim* is true."""
    until = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_evicted_pod_is_made_again(cluster, place):
    """Another pod of the same Job."""
    handle = start(place, place.deployment)
    eventually(lambda: uids(cluster))
    before = uids(cluster)

    said = place.lose(handle)

    eventually(lambda: uids(cluster) and not uids(cluster) & before)
    assert said.format(attempt=1, step=7) == "evicted the pod of attempt 1 at step 7"
    assert len(cluster.list(JOBS, "default")) == 1


def test_only_its_own_jobs_are_removed(cluster, place):
    """Other users' objects in the namespace stay."""
    start(place, place.deployment)
    other = start(place, "somebodys")

    place.close()

    assert [job["metadata"]["name"] for job in cluster.list(JOBS, "default")] == [other.name]
    assert place.notes[0].endswith("namespace default")
    assert "nearest published cloud type" in place.notes[1]
