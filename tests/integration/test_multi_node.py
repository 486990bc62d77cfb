"""A stage of two nodes on this machine: its processes find each other at node 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store, check_store, open_store

pytestmark = pytest.mark.timeout(120)

SPEC = """\
version: v1
name: pair
resources: {requests: {cpu: 1, memory: 64Mi}}
num_nodes: 2
workdir: code
entrypoint: [python, train.py]
distributed: {launcher: torchrun, backend: gloo, global_batch: 64}
"""
TORCHRUN = """#!{python}
import os, socket, sys
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
host, port = options["rdzv_endpoint"].split(":")
assert options["nnodes"] == "2" and options["rdzv_backend"] == "c10d", options
if os.environ["ENVSCALER_NODE"] == "0":
    with socket.create_server((host, int(port))) as server:
        server.settimeout(30)
        server.accept()[0].sendall(b"hello")
else:
    for _ in range(300):
        try:
            with socket.create_connection((host, int(port)), timeout=30) as found:
                assert found.recv(5) == b"hello"
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
    else:
        raise SystemExit("nobody is at " + options["rdzv_endpoint"])
names = ("ENVSCALER_GLOBAL_BATCH", "ENVSCALER_MICRO_BATCH", "ENVSCALER_GRADIENT_ACCUMULATION")
print("met", *(os.environ[name] for name in names), flush=True)
"""


def run_pair(tmp_path: Path) -> tuple[Store, Path]:
    """Run ``pair.yaml`` of that folder to its success: its store, and the run's folder in it."""
    store = open_store(f"file://{tmp_path}/store")
    check_store(store)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
        "ENVSCALER_STORE_URL": f"file://{tmp_path}/store",
        "ENVSCALER_LOCAL_ROOT": str(tmp_path / "attempts"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "envscaler_airflow.cli", "run", "-f", "pair.yaml", "--name", "one"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return store, next((tmp_path / "store").glob("*/shell/one/*/*"))


def test_two_nodes_meet_at_the_address_of_node_zero(tmp_path: Path) -> None:
    """Stand-ins for torchrun find each other, and 64 = 32 samples x 2 nodes x 1 pass (feature A11)."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    (tmp_path / "pair.yaml").write_text(SPEC)
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=sys.executable))
    torchrun.chmod(0o755)

    store, folder = run_pair(tmp_path)

    prefix = str(folder.relative_to(tmp_path / "store"))
    assert Run(store, prefix).events.load().status == "succeeded"
    printed = {path.name: path.read_text() for path in sorted((folder / "logs").iterdir())}
    assert printed == {"g1-a1-n0-c1-000001.log": "met 64 32 1\n", "g1-a1-n1-c1-000001.log": "met 64 32 1\n"}
    statuses = [json.loads(path.read_text()) for path in sorted((folder / "status").iterdir())]
    assert statuses[0]["address"].startswith("127.0.0.1:")
    assert "address" not in statuses[1]


SAVES = """
import os, pathlib, time
from envscaler_agent import Session
node = os.environ["ENVSCALER_NODE"]
with Session(total_steps=60) as session:
    for step in range(1, 61):
        time.sleep(0.1)
        session.step(loss=1.0)
        session.checkpoint(lambda folder: pathlib.Path(folder, "model.pt").write_text(node))
"""
SAVED = """\
version: v1
name: pair
resources: {requests: {cpu: 1, memory: 64Mi}}
num_nodes: 2
workdir: code
entrypoint: [python, train.py]
checkpoint: {every: 20 steps}
"""


def test_two_nodes_that_save_one_file_name_are_told_so(tmp_path: Path) -> None:
    """The checkpoint contains the file of each node, and node 0's status names it (D7)."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SAVES)
    (tmp_path / "pair.yaml").write_text(SAVED)

    _, folder = run_pair(tmp_path)

    newest = json.loads(max((folder / "checkpoints").glob("*/manifest-c1.json")).read_text())
    assert sorted((item["path"], item["node"]) for item in newest["files"]) == [
        ("model.pt", 0),
        ("model.pt", 1),
    ]
    said = json.loads((folder / "status" / "g1-a1-n0-c1.json").read_text())["message"]
    assert "several nodes saved different files as model.pt" in said
