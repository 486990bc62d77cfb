"""Faults inside of pods of the fake cluster, by exec: ``make drills``."""

from __future__ import annotations

import os

import pytest
from fakes.drilled import InPods
from fakes.kubernetes import Cluster
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """One run, broken by every test after the other."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    folder = tmp_path_factory.mktemp("pods")
    with Cluster(nodes=1, executor=Processes(folder / "state")) as cluster:
        made = InPods(folder, cluster)
        made.await_status()
        yield made
        made.close()


@pytest.mark.parametrize(("fault", "outcome"), [("stall", "stalled"), ("oom", "out-of-memory")])
def test_a_fault_in_the_container_ends_the_attempt_and_loses_no_saved_step(pods, fault, outcome):
    """A suspended training, and one whose container exceeds its memory limit (G4)."""
    code, shown = pods.drill(fault)

    assert code == 0, (shown, pods.said())
    assert shown[fault]["detect_s"] > 0
    assert [one.outcome for one in pods.state().attempts][-2] == outcome


def test_a_pod_trains_on_while_its_sidecar_has_no_store(pods):
    """For a minute; the attempt stays."""
    code, shown = pods.drill("store-away")

    assert code == 0, (shown, pods.said())
    assert shown["store-away"]["before"] == shown["store-away"]["after"]
