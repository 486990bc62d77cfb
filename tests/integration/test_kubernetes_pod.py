"""The containers of a pod as real processes: install, launcher and sidecar, on a store in a folder."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from envscaler_agent.protocol import Control, Status, control_name, status_name
from envscaler_airflow.backends.kubernetes import install
from envscaler_airflow.store import open_store
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run

PREFIX = "team/dag/run/task/0"
TRAIN = """
import os, pathlib, sys
import envscaler_agent
print("node", os.environ["ENVSCALER_NODE"], "of", os.environ["ENVSCALER_NODES"], flush=True)
print("meet at", os.environ.get("ENVSCALER_RENDEZVOUS"), sys.argv[1:], flush=True)
pathlib.Path(os.environ["ENVSCALER_OUTPUT_MODEL"]).write_text("weights")
sys.exit(int(os.environ.get("CODE", "0")))
"""

WAIT = """
import os, pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
pathlib.Path(os.environ["ENVSCALER_OUTPUT_MODEL"]).write_text("weights")
"""


class Pod:
    """One pod: its folder, its sidecar and its training."""

    def __init__(self, root, store, name, *, node=0, nodes=1, **env):
        """Install the agent, as the init container does."""
        self.home = root / name
        self.store = store
        install.install(self.home)
        self.spool = self.home / "spool"
        self.output = self.home / "model"
        layout = {"work": str(self.home / "work")}
        layout["outputs"] = {"model": str(self.output)}
        (self.home / "layout.json").write_text(json.dumps(layout))
        common = {name: value for name, value in os.environ.items() if not name.startswith("ENVSCALER_")}
        self.env = common | {
            "JOB_COMPLETION_INDEX": str(node),
            "POD_IP": f"10.0.0.{node + 1}",
            "ENVSCALER_SPOOL": str(self.spool),
            "ENVSCALER_NODES": str(nodes),
            "ENVSCALER_OUTPUT_MODEL": str(self.output),
            **env,
        }
        self.nodes = nodes
        self.processes = []

    def sidecar(self):
        """Start the sidecar."""
        options = {
            "spool": self.spool,
            "store": self.store.url.removesuffix(f"/{PREFIX}"),
            "prefix": PREFIX,
            "generation": 1,
            "attempt": 1,
            "nodes": self.nodes,
            "layout": self.home / "layout.json",
        }
        command = [sys.executable, "-m", "envscaler_airflow.backends.kubernetes.pod_sidecar"]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return self._start(command, "sidecar")

    def training(self, *words, script=TRAIN):
        """Start the training's container."""
        launcher = self.home / "agent" / "pod_main.py"
        command = [sys.executable, "-S", str(launcher), "--grace", "5", "--drain", "30", "--"]
        return self._start([*command, sys.executable, "-c", script, *words], "main")

    def _start(self, command, name):
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env, cwd=self.home)
        self.processes.append(process)
        return process

    def close(self):
        """Leave no process behind."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def pods(tmp_path):
    """Makes pods on one store, and ends their processes."""
    url = f"file://{tmp_path}/store"
    store = Run(open_store(url), PREFIX)
    store.write(control_name(1, 1), Control().to_json())
    Run(open_store(url), PREFIX).lease.renew(holder="test")
    made = []

    def make(name, **options):
        made.append(Pod(tmp_path, store, name, **options))
        return made[-1]

    make.store = store
    yield make
    for pod in made:
        pod.close()


def ends(process, *, seconds=40):
    """Its exit code."""
    return process.wait(timeout=seconds)


def output(store, node=0):
    """All output of a node, from the store."""
    root = open_store(store.url.removesuffix(f"/{PREFIX}"))
    return read_logs(Run(root, PREFIX), attempt=(1, 1), node=node, budget=1 << 20)[0].decode()


def status(store, node=0):
    """A node's last status."""
    return Status.from_json(store.read(status_name(1, 1, node)), where="status")


def test_a_pod_trains_and_goes_when_everything_is_uploaded(pods):
    """The agent is found without an installation; the container ends after its uploads."""
    pod = pods("a")
    sidecar, main = pod.sidecar(), pod.training("--flag")

    assert ends(main) == 0, (pod.home / "main.log").read_text()
    sidecar.send_signal(signal.SIGTERM)  # as the kubelet does
    assert ends(sidecar) == 0
    assert "node 0 of 1\nmeet at None ['--flag']\n" in output(pods.store)
    assert status(pods.store).ended.reason == "succeeded"
    assert pods.store.read("outputs/g1-a1-c1/model/model") == b"weights"


def test_a_failure_keeps_its_exit_code(pods):
    """The container's exit code is the command's."""
    pod = pods("a", CODE="3")
    pod.sidecar()

    assert ends(pod.training()) == 3
    assert (status(pods.store).ended.exit_code, status(pods.store).ended.reason) == (3, "failed")


def test_a_training_that_is_killed_is_told_by_its_sidecar(pods):
    """SIGKILL leaves no report: the sidecar reports it, and uploads the existing output."""
    pod = pods("a")
    sidecar = pod.sidecar()
    main = pod.training(script="import time; print('begun', flush=True); time.sleep(600)")
    deadline = time.monotonic() + 30
    while "begun" not in (pod.home / "main.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)

    main.kill()
    main.wait()
    sidecar.send_signal(signal.SIGTERM)

    assert ends(sidecar) == 0
    assert status(pods.store).ended.reason == "killed"
    assert "begun" in output(pods.store)


def test_a_pod_that_comes_instead_goes_on_with_the_log(pods):
    """An empty disk, and yet no output of the first one is overwritten."""
    first = pods("a", CODE="3")
    first.sidecar()
    ends(first.training("first"))
    second = pods("b")
    second.sidecar()

    ends(second.training("second"))

    text = output(pods.store)
    assert text.index("['first']") < text.index("['second']")


def test_nodes_meet_at_the_address_of_node_0(pods):
    """Node 0 publishes it in the store; it is in the environment and in the command."""
    zero, one = pods("a", node=0, nodes=2), pods("b", node=1, nodes=2)
    one.sidecar()
    later = one.training("--rdzv-endpoint=$ENVSCALER_RENDEZVOUS")
    zero.sidecar()
    head = zero.training(str(zero.home / "go"), script=WAIT)

    assert ends(later) == 0, (one.home / "main.log").read_text()
    (zero.home / "go").touch()
    assert ends(head) == 0
    assert "node 1 of 2\nmeet at 10.0.0.1:29400 ['--rdzv-endpoint=10.0.0.1:29400']" in output(pods.store, 1)


def test_two_pods_that_were_evicted_at_once_meet_again(pods):
    """Node 1's new pod comes first, and takes neither end nor address of the old node 0 (D14)."""
    old = [pods(f"old-{node}", node=node, nodes=2, POD_UID=f"old-{node}") for node in (0, 1)]
    sidecars = [pod.sidecar() for pod in old]
    mains = [pod.training(str(pod.home / "go"), script=WAIT) for pod in old]
    until = time.monotonic() + 40
    while not all(pods.store.read(status_name(1, 1, node)) and is_running(pods, node) for node in (0, 1)):
        assert time.monotonic() < until
        time.sleep(0.1)
    for process in (*mains, *sidecars):
        process.send_signal(signal.SIGTERM)
    assert [ends(process) for process in (*mains, *sidecars)][2:] == [0, 0]

    one = pods("new-1", node=1, nodes=2, POD_UID="new-1")
    one.sidecar()
    later = one.training("--rdzv-endpoint=$ENVSCALER_RENDEZVOUS")
    time.sleep(3)
    assert later.poll() is None
    zero = pods("new-0", node=0, nodes=2, POD_UID="new-0", POD_IP="10.0.0.9")
    zero.sidecar()
    head = zero.training(str(zero.home / "go"), script=WAIT)

    assert ends(later) == 0, (one.home / "main.log").read_text()
    (zero.home / "go").touch()
    assert ends(head) == 0
    assert "meet at 10.0.0.9:29400 ['--rdzv-endpoint=10.0.0.9:29400']" in output(pods.store, 1)
    assert [name for name in pods.store.children("claims") if "accepted" not in name] == [
        f"g1-a1-n{node}-{number:06d}.json" for node in (0, 1) for number in (1, 2)
    ]


def is_running(pods, node):
    """True once its command runs."""
    return status(pods.store, node).phase == "running"


def test_a_pod_that_is_stopped_before_it_is_ready_goes_at_once(pods):
    """The sidecar has not reported yet; PID 1 must not wait for SIGKILL."""
    pod = pods("a")
    main = pod.training()
    time.sleep(0.5)

    main.send_signal(signal.SIGTERM)

    assert ends(main, seconds=10) == 87
