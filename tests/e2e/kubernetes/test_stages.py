"""Stages on a real cluster: whatever KUBECONFIG names. See tests/e2e/kubernetes/README.md."""

import os
import time

import pytest
from e2e.kubernetes.place import Place

from envscaler_airflow.controller.stage import StoppedError
from envscaler_airflow.errors import RunFailedError

NEEDED = ("KUBECONFIG", "ENVSCALER_IMAGE", "ENVSCALER_STORE_URL")

COUNT = """
import json, pathlib, time
from envscaler_airflow.agent import Session
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


@pytest.fixture(scope="module")
def place():
    """The cluster of the environment."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"no cluster: {', '.join(missing)} not set")
    made = Place.of_environment()
    yield made
    made.close()


def test_a_stage_trains_and_its_output_survives_the_pod(place):
    """Output, log and report are in the store; its pods are gone."""
    script = (
        "import os, pathlib; print('hello from', os.environ['ENVSCALER_NODE'], flush=True);"
        "pathlib.Path(os.environ['ENVSCALER_OUTPUT_MODEL']).write_text('weights')"
    )
    run = place.run(script, outputs={"model": "/output/model"}).start()

    result = run.end()

    assert "hello from 0" in run.output()
    assert result.outputs["model"].endswith("/outputs/g1/model")
    assert place.store.read(f"{run.key.prefix}/outputs/g1/model/model") == b"weights"
    until = time.monotonic() + 60
    while run.pods():
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_failure_is_told_with_code_and_last_line(place):
    """Before the first step: once is enough."""
    run = place.run("import sys; print('it broke', flush=True); sys.exit(3)").start()

    with pytest.raises(RunFailedError, match="exit code 3") as caught:
        run.end()

    assert "it broke" in str(caught.value)


def test_memory_over_the_limit_is_told_as_such(place):
    """At its cap: no attempt with more."""
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
    """The same attempt, from its newest checkpoint; the log goes on where it was."""
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
    """Both know the address of node 0."""
    script = (
        "import json, os, time; print(json.dumps([os.environ['ENVSCALER_NODE'], "
        "os.environ['ENVSCALER_RENDEZVOUS']]), flush=True); time.sleep(5)"
    )
    run = place.run(script, num_nodes=2).start()

    run.end()

    (zero, address), (one, same) = run.address(0), run.address(1)
    assert (zero, one) == ("0", "1")
    assert address == same
    assert address.endswith(":29400")
