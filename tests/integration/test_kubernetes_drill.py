"""``envscaler drill`` on pods of the fake cluster, whose containers are processes of this machine."""

from __future__ import annotations

import os

import pytest
from fakes.drilled import InPods
from fakes.kubernetes import Cluster
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pods(tmp_path):
    """A run that is about to train."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    with Cluster(nodes=1, executor=Processes(tmp_path / "state")) as cluster:
        made = InPods(tmp_path, cluster)
        made.await_status()
        yield made
        made.close()


def test_an_evicted_pod_is_replaced_and_a_dead_sidecar_is_restarted(pods):
    """The Job makes another pod within the attempt, which resumes from the checkpoint (D5) (feature G4)."""
    code, shown = pods.drill("kill-sidecar,lose-node")

    alone, lost = shown["kill-sidecar"], shown["lose-node"]
    assert code == 0, (shown, pods.said())
    assert (alone["before"], alone["pause_s"]) == (alone["after"], 0)
    assert 0 < lost["detect_s"] <= lost["resume_s"] < 600
    assert lost["committed_steps_lost"] == 0
    assert (lost["before"], lost["after"]) == (alone["before"], alone["before"])
    assert [(one.number, one.phase) for one in pods.state().attempts] == [(1, "started")]
