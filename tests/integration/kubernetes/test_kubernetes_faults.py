"""What a drill breaks on a cluster, with which rights, and what it cannot break."""

import copy

import pytest
from fakes.kubernetes import PODS
from integration.kubernetes.rig import eventually, request_for, running

from envscaler_airflow.backends.kubernetes.job_changes import fault_obstacle
from envscaler_airflow.backends.kubernetes.security import rbac
from envscaler_airflow.errors import BackendError


def rules():
    """The Role for stages, as shipped."""
    return [rule for document in rbac("default") for rule in document.get("rules", ())]


def test_a_lost_node_is_an_evicted_pod_that_its_job_replaces(cluster, connect):
    """With the mark of a disruption, so that the attempt goes on (feature D5)."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    [(_, before)] = backend.pods(handle)

    assert backend.obstacle(handle, "lose-node", node=0) == ""
    made = backend.inject(handle, "lose-node", node=0)

    assert made.did == f"evicted pod {before['metadata']['name']} with 1 s of grace"
    uid = before["metadata"]["uid"]
    eventually(
        lambda: [one["metadata"]["uid"] for one in cluster.list(PODS, "default")],
        lambda found: found and uid not in found,
    )
    assert not backend.observe(handle).is_over
    running(backend, handle)


@pytest.mark.parametrize(("fault", "right"), [("lose-node", "pods/eviction"), ("stall", "pods/exec")])
def test_an_identity_without_the_right_is_told_which(cluster, connect, fault, right):
    """The Role for stages grants neither: a drill is another task than an owner's."""
    handle = connect().submit(request_for())
    running(connect(), handle)
    owner = connect(token=cluster.user("owner", rules()))

    assert owner.obstacle(handle, fault, node=0).startswith(f"this identity may not create {right} in")


def test_memory_without_a_limit_is_not_filled(connect):
    """The kernel would kill processes of others."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    [(_, pod)] = backend.pods(handle)
    free = copy.deepcopy(pod)
    free["spec"]["containers"][0]["resources"].pop("limits")

    assert fault_obstacle(backend.cluster, pod, "oom") == ""
    assert fault_obstacle(backend.cluster, free, "oom").endswith("has no memory limit")


def test_a_node_without_a_running_pod_cannot_be_broken(connect):
    """It is not there yet, or ended meanwhile."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    assert backend.obstacle(handle, "lose-node", node=3) == "it has no running pod"
    with pytest.raises(BackendError, match="lose-node: the node has no running pod"):
        backend.inject(handle, "lose-node", node=3)


def test_a_command_that_cannot_be_run_in_the_container_is_an_error(connect):
    """Nothing was injected, and the message names pod and container."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    with pytest.raises(BackendError, match=r"/exec, container sidecar: "):
        backend.inject(handle, "kill-sidecar", node=0)
