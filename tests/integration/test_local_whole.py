"""Integration tests: a local node with the real sidecar and the real wrapper."""

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import attempts
import pytest

from envscaler_agent.protocol import Control, Status, control_name, status_name
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.node_plan import no_mounts
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store import open_store
from envscaler_airflow.store.run import Run

PREFIX = "dep/dag/run/train/-1"
pytestmark = pytest.mark.timeout(
    300
)  # chosen: only for a test that hangs; `wait_for` ends earlier on a machine of its own


def wait_for(look, claim):
    """The first value of *look* for which *claim* is true, within 1,200 checks.

    They are counted, not timed: on a busy machine a check takes longer, as does the awaited event.
    """
    for _ in range(1200):
        if claim(found := look()):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


class LocalRun:
    """One run in a store of its own, and a backend."""

    def __init__(self, tmp_path):
        """Create an empty store."""
        self.folder = tmp_path
        (tmp_path / "store").mkdir()
        self.url = f"file://{tmp_path / 'store'}"
        self.store = Run(open_store(self.url), PREFIX)
        self.backend = LocalBackend(tmp_path / "root")

    def start(self, script, *, spec="", **changes):
        """Start a Python *script* with the additions *spec*."""
        path = self.folder / "env.yaml"
        path.write_text(
            "version: v1\nname: one\nbase: {image: 'python:3.11'}\nentrypoint: [python]\n"
            + textwrap.dedent(spec)
        )
        frozen = load_spec(path).to_dict()
        self.store.write(control_name(1, 1), Control(sequence=1).to_json())
        env = {item["name"]: item["value"] for item in frozen.get("env", []) if "value" in item}
        fields = {
            "store_url": self.url,
            "run_prefix": PREFIX,
            "run_label": "dag.train",
            "generation": 1,
            "attempt": 1,
            "allocation": Allocation(self.backend.offers()[0]),
            "command": ("python", "-c", textwrap.dedent(script), "/output/model"),
            "env": env,
            "spec": frozen,
        }
        return self.backend.submit(attempts.request(**(fields | changes)))

    def over(self, handle):
        """How node 0 ended."""
        return wait_for(lambda: self.backend.observe(handle), lambda seen: seen.is_over).nodes[0]

    def status(self):
        """Node 0's last status in the store; None before the first one."""
        text = self.store.read(status_name(1, 1, 0))
        return None if text is None else Status.from_json(text, where="status")


@pytest.fixture
def run(tmp_path):
    """A run; processes that it leaves are killed."""
    made = LocalRun(tmp_path)
    yield made
    for handle in made.backend.attempts():
        made.backend.stop(handle, grace_s=0)
        made.backend.release(handle)


def test_output_log_and_status_are_in_the_store_when_the_node_is_over(run):
    """The path of the spec is mapped, and its file becomes an output."""
    script = """
        import os, sys
        path = sys.argv[1]
        os.makedirs(path, exist_ok=True)
        open(path + "/weights", "w").write("w" * 10)
        print("trained in", os.environ["ENVSCALER_OUTPUT_MODEL"] == path)
    """

    end = run.over(run.start(script, spec="outputs: {model: /output/model}"))

    assert (end.exit_code, end.reason) == (0, "succeeded")
    status = run.status()
    assert (status.phase, status.ended.reason) == ("ended", "succeeded")
    assert run.store.read("outputs/g1-a1-c1/model/weights") == b"w" * 10
    logs = b"".join(run.store.read(name) for name in run.store.names("logs"))
    assert b"trained in True" in logs


def test_the_node_process_claims_its_node_once_though_its_sidecar_is_restarted(run):
    """By the id of the node process; a killed sidecar finds its claim again (D1)."""
    handle = run.start("import time; time.sleep(600)")
    wait_for(run.status, lambda status: status is not None and status.phase == "running")
    folder = Path(handle.details["folder"]) / "n0"

    def sidecar():
        return json.loads((folder / "spool/sidecar.json").read_text())["pid"]

    first = sidecar()

    os.kill(first, signal.SIGKILL)

    wait_for(sidecar, lambda pid: pid != first)
    before = run.status().sequence
    wait_for(run.status, lambda status: status.sequence != before)
    assert run.store.children("claims") == ["g1-a1-n0-000001.json"]
    claim = json.loads(run.store.read("claims/g1-a1-n0-000001.json"))
    assert claim["uid"] == json.loads((folder / "request.json").read_text())["id"]
    assert claim["boot_id"]


@pytest.mark.skipif(no_mounts() is not None, reason="this machine allows no mount namespaces")
def test_code_that_opens_its_paths_itself_finds_them(run):
    """No argument or variable names them, and the machine does not keep such folders afterwards (F9)."""
    script = """
        mkdir -p /output-of-a-test/model /output-of-a-test/checkpoints
        cat /data-of-a-test/numbers.txt > /output-of-a-test/model/weights
        echo state > /output-of-a-test/checkpoints/last.pt
    """
    (run.folder / "numbers").mkdir()
    (run.folder / "numbers/numbers.txt").write_text("1 2 3")
    spec = f"""
        volumes: [{{name: data, source: "hostPath:{run.folder}/numbers", mount_path: /data-of-a-test}}]
        outputs: {{model: /output-of-a-test/model}}
        checkpoint: {{path: /output-of-a-test/checkpoints}}
    """

    end = run.over(run.start("", spec=spec, command=("bash", "-ec", textwrap.dedent(script))))

    assert (end.exit_code, end.reason) == (0, "succeeded"), run.status()
    assert run.store.read("outputs/g1-a1-c1/model/weights") == b"1 2 3"
    [kept] = [name for name in run.store.names("checkpoints") if name.endswith("last.pt")]
    assert run.store.read(kept) == b"state\n"
    assert not Path("/output-of-a-test").exists()
    assert not Path("/data-of-a-test").exists()


def test_a_graceful_stop_lets_the_last_words_out(run):
    """Stopped within the grace: the store has the end and the last line."""
    script = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("last words", flush=True), sys.exit(0)))
        print("up", flush=True)
        while True: time.sleep(0.1)
    """
    handle = run.start(script)
    wait_for(lambda: attempts.printed(handle), lambda text: b"up" in text)

    run.backend.stop(handle, grace_s=20)

    assert run.over(handle).reason == "stopped"
    assert run.status().ended.reason == "stopped"
    logs = b"".join(run.store.read(name) for name in run.store.names("logs"))
    assert b"last words" in logs


def test_a_command_that_does_not_exist_is_reported(run):
    """The wrapper, the store and the backend report it."""
    end = run.over(run.start("", command=("no-such-command",)))

    assert (end.exit_code, end.reason) == (127, "not-found")
    assert "no-such-command" in run.status().ended.detail


def test_no_secret_is_on_the_machine_s_disk_or_in_the_store(run):
    """Printed by the training: masked in the store's log and in the node's own."""
    canary = "canary-9d41-secret"
    script = "import os; print('key', os.environ['API_KEY'])"
    spec = "env: [{name: API_KEY, value_from: 'secret:a/b'}]"

    end = run.over(run.start(script, spec=spec, secret_env={"API_KEY": canary}))

    assert end.reason == "succeeded"
    files = [path for path in Path(run.folder).rglob("*") if path.is_file()]
    assert b"key ***" in attempts.printed(next(run.backend.attempts()))
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
