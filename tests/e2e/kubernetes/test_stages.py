"""Stages on a real cluster: the one of KUBECONFIG. See tests/e2e/kubernetes/README.md."""

import time

import pytest
from e2e.kubernetes.place import Place

from envscaler_airflow.errors import RunFailedError
from envscaler_airflow.owner.stage import StoppedError
from envscaler_airflow.planning.offers import Allocation

COUNT = """
import json, pathlib, time
from envscaler_agent import Session
with Session() as session:
    path = session.restore()
    step = int((pathlib.Path(path) / "step").read_text()) if path else 0
    print("begins at", step, flush=True)
    def save(folder):
        (pathlib.Path(folder) / "step").write_text(str(step))
    while step < {steps}:
        time.sleep(0.2)
        step += 1
        session.step(samples=1)
        session.checkpoint(save)
    print("ends at", step, flush=True)
"""


MEET = """
import os, socket, time
host, _, port = os.environ["ENVSCALER_RENDEZVOUS"].rpartition(":")
place, node = (host.strip("[]"), int(port)), os.environ["ENVSCALER_NODE"]
print("node", node, "of", os.environ["ENVSCALER_NODES"], "at", port, flush=True)
if node == "0":
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.create_server(place, family=family) as server:
        server.settimeout(120)
        print("met node", server.accept()[0].recv(8).decode(), flush=True)
else:
    until = time.monotonic() + 90
    while True:
        try:
            socket.create_connection(place, timeout=10).sendall(node.encode())
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.5)
"""
"""Node 0 listens at the rendezvous, and node 1 connects to it."""


@pytest.fixture(scope="module")
def place():
    """The cluster of the environment."""
    made = Place.of_environment()
    yield made
    made.close()


def test_a_stage_trains_and_its_output_survives_the_pod(place):
    """Output, log and report are in the store; the pods are gone."""
    script = (
        "import os, pathlib; print('hello from', os.environ['ENVSCALER_NODE'], flush=True);"
        "pathlib.Path(os.environ['ENVSCALER_OUTPUT_MODEL']).write_text('weights')"
    )
    run = place.run(script, outputs={"model": "/output/model"}).start()

    result = run.end()

    assert "hello from 0" in run.output()
    assert result.outputs["model"].endswith("/outputs/g1-a1-c1/model")
    assert place.store.read(f"{run.key.prefix}/outputs/g1-a1-c1/model/model") == b"weights"
    until = time.monotonic() + 60
    while run.pods():
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_failure_is_told_with_code_and_last_line(place):
    """It fails before the first step: one attempt is enough."""
    run = place.run("import sys; print('it broke', flush=True); sys.exit(3)").start()

    with pytest.raises(RunFailedError, match="exit code 3") as caught:
        run.end()

    assert "it broke" in str(caught.value)


def test_memory_over_the_limit_is_told_as_such(place):
    """It fails at its cap: no attempt gets more memory."""
    run = place.run(
        "held = []\nwhile True: held.append(bytearray(b'x' * (8 << 20)))",
        resources={
            "requests": {"cpu": "200m", "memory": "128Mi"},
            "limits": {"memory": "128Mi"},
        },
        failure={"oom_memory_cap": "128Mi"},
    ).start()

    with pytest.raises(RunFailedError, match="out of memory"):
        run.end()


def test_a_stop_ends_the_pod_within_a_minute_of_its_grace(place):
    """By uid."""
    run = place.run("import time; print('runs', flush=True); time.sleep(3600)").start()
    run.shows("runs")
    uids = {pod["metadata"]["uid"] for pod in run.pods()}

    run.stop()

    until = time.monotonic() + 90
    while uids & {pod["metadata"]["uid"] for pod in run.pods()}:
        assert time.monotonic() < until, run.state()
        time.sleep(0.5)
    with pytest.raises(StoppedError):
        run.end()


def test_an_evicted_pod_is_made_again_and_resumes(place):
    """The same attempt resumes from its newest checkpoint; the log continues."""
    run = place.run(COUNT.format(steps=80), checkpoint={"path": "/output/saves", "every": "2s"}).start()
    run.shows("begins at 0")
    until = time.monotonic() + 90
    while not place.store.children(f"{run.key.prefix}/checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.5)
    [pod] = run.pods()

    run.evict(pod)
    run.end(seconds=240)

    lines = run.output().splitlines()
    begins = [int(line.split()[-1]) for line in lines if line.startswith("begins at")]
    assert len(begins) == 2
    assert begins[0] == 0 < begins[1]
    assert lines[-1] == "ends at 80"
    assert len(run.state().attempts) == 1


def test_two_nodes_meet_without_dns(place):
    """They use the address of node 0."""
    run = place.run(MEET, num_nodes=2).start()

    run.end()

    assert run.output(node=0).splitlines() == ["node 0 of 2 at 29400", "met node 1"]
    assert run.output(node=1).splitlines() == ["node 1 of 2 at 29400"]


def test_gpus_are_taken_by_their_resource(place):
    """On a cluster with GPUs the pod requests one, and gets it for itself."""
    if not any(offer.gpus for offer in place.backend.offers()):
        pytest.skip("no node has GPUs")
    requests = {"cpu": "200m", "memory": "128Mi", "gpu": {"count": 1}}
    run = place.run("import time; print('runs', flush=True); time.sleep(5)", resources={"requests": requests})

    run.start().shows("runs")
    [pod] = run.pods()
    run.end()

    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert {name: value for name, value in limits.items() if name.endswith("/gpu")} in (
        {"nvidia.com/gpu": "1"},
        {"amd.com/gpu": "1"},
    )


def test_nodes_of_two_offers_are_numbered_on_and_meet(place):
    """Two Jobs of one attempt; node 1, of the second, finds node 0, of the first."""
    run = place.run(MEET)
    offer = place.backend.offers()[0]

    handle = run.alone(Allocation(offer, nodes=2, rest=offer, rest_nodes=1))
    until = time.monotonic() + 120
    while not (status := place.backend.observe(handle)).is_over:
        assert time.monotonic() < until, status
        time.sleep(0.5)

    assert [node.reason for node in status.nodes] == ["succeeded", "succeeded"], status
    assert run.output(node=0).splitlines() == ["node 0 of 2 at 29400", "met node 1"]
    assert run.output(node=1).splitlines() == ["node 1 of 2 at 29400"]
    assert len([job for job in place.jobs() if run.is_mine(job)]) == 2


def test_cpu_grows_in_place(place):
    """The same pod; a cluster that cannot resize reports it."""
    run = place.run("import time; print('runs', flush=True); time.sleep(600)").start()
    run.shows("runs")
    [before] = run.pods()

    state = place.backend.resize(run.handle(), vcpus=0.3, memory_bytes=None)
    until = time.monotonic() + 90
    while state == "going":
        assert time.monotonic() < until
        time.sleep(0.5)
        state = place.backend.resized(run.handle())

    assert state in ("done", "infeasible")
    [after] = run.pods()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    if state == "done":
        [main] = [one for one in after["status"]["containerStatuses"] if one["name"] == "main"]
        assert main["resources"]["requests"]["cpu"] == "300m"
    run.stop()
    with pytest.raises(StoppedError):
        run.end()


def test_a_deleted_job_is_followed_by_the_next_attempt(place):
    """A user deletes it: the owner knows that it is gone, and the stage resumes from its checkpoint."""
    run = place.run(COUNT.format(steps=60), checkpoint={"path": "/output/saves", "every": "2s"}).start()
    run.shows("begins at 0")
    until = time.monotonic() + 90
    while not place.store.children(f"{run.key.prefix}/checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.5)

    for job in place.jobs():
        if run.is_mine(job):
            place.delete(job)
    run.end(seconds=200)

    assert [attempt.outcome for attempt in run.state().attempts] == ["lost", "succeeded"]
    assert "begins at 0" not in run.output(attempt=2)
    assert "ends at 60" in run.output(attempt=2)


def test_an_elastic_attempt_grows_and_shrinks_in_place(place):
    """Node 1 joins node 0 and leaves again; the pod of node 0 stays the same."""
    fields = {"distributed": {"launcher": "torchrun", "elastic": True}, "num_nodes": {"min": 1, "max": 2}}
    run = place.run("import time; print('runs', flush=True); time.sleep(600)", **fields)
    handle = run.alone(Allocation(place.backend.offers()[0]))
    begun(place, handle, nodes=1)
    [(_, first)] = place.backend.pods(handle)

    grown = place.backend.rescale(handle, 2)
    begun(place, grown, nodes=2)
    until = time.monotonic() + 60
    while "runs" not in run.output(node=1):
        assert time.monotonic() < until
        time.sleep(0.5)
    shrunk = place.backend.rescale(grown, 1)
    until = time.monotonic() + 90
    while len(pods := place.backend.pods(shrunk)) > 1:
        assert time.monotonic() < until
        time.sleep(0.5)

    assert [(node, pod["metadata"]["uid"]) for node, pod in pods] == [(0, first["metadata"]["uid"])]
    place.backend.stop(shrunk, grace_s=0)


def begun(place, handle, *, nodes):
    """Wait until so many nodes run."""
    until = time.monotonic() + 120
    while True:
        status = place.backend.observe(handle)
        if [node.state for node in status.nodes] == ["running"] * nodes:
            return
        assert time.monotonic() < until, status
        time.sleep(0.5)
