"""The sidecar as a real process beside a scripted wrapper, on a folder and on S3 (moto's HTTP server)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from pathlib import Path

import boto3
import pytest
from fakes.store_reader import newest_good
from moto.server import ThreadedMotoServer

from envscaler_agent.protocol import (
    Control,
    Ended,
    Progress,
    Status,
    checkpoint_name,
    control_name,
    status_name,
)
from envscaler_airflow.store import manifests, open_store
from envscaler_airflow.store.archive import pack_workdir
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_checkpoint
from envscaler_airflow.store.lease import LeaseFile
from envscaler_airflow.store.run import Run

PREFIX = "team/dag/run/task/0"
BUCKET = "runs"
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def s3_options():
    """Options for a real S3 API on a free port of the loopback interface."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", **KEYS}
    client = boto3.client("s3", **options)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield options
    server.stop()


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path):
    """URL and options of an empty store."""
    if request.param == "s3":
        return f"s3://{BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3_options")
    return f"file://{tmp_path}/store", {}


def until(check, *, seconds=60):
    """The first true value of *check*, called ten times a second."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {check}"
        time.sleep(0.1)
    return value


class Node:
    """One node of an attempt: its sidecar's process, and the files of its wrapper."""

    def __init__(self, root, url, *, attempt=1, node=0, nodes=1, options=None, **layout):
        """Write layout.json; nothing is started yet."""
        self.folder = Path(root) / f"a{attempt}-n{node}"
        self.folder.mkdir()
        self.spool = self.folder / "spool"
        self.url, self.attempt, self.node, self.nodes = url, attempt, node, nodes
        self.store = Run(open_store(url, options), PREFIX)
        self.process = None
        layout = {"store_options": options or {}, **layout}
        (self.folder / "layout.json").write_text(json.dumps(layout))

    def start(self):
        """Start the sidecar."""
        values = {
            "spool": self.spool, "store": self.url, "prefix": PREFIX, "generation": 1,
            "attempt": self.attempt, "node": self.node, "nodes": self.nodes,
            "layout": self.folder / "layout.json",
        }  # fmt: skip
        command = [sys.executable, "-m", "envscaler_airflow.sidecar"]
        command += [part for name, value in values.items() for part in (f"--{name}", str(value))]
        with (self.folder / "sidecar.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def started(self):
        """Content of start.json, once it exists."""
        path = self.spool / "start.json"
        until(path.exists)
        return json.loads(path.read_bytes())

    def write(self, name, data):
        """Put a file into the spool atomically, as the wrapper does."""
        path = self.spool / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        draft.write_bytes(data)
        draft.replace(path)

    def says(self, *, step=None, **ended):
        """Write wrapper.json."""
        status = Status(
            phase="ended" if ended else "running",
            ended=Ended(**ended) if ended else None,
            progress=Progress(step=step),
        )
        self.write("wrapper.json", status.to_json())

    def saves(self, step, files):
        """A complete local save of Session."""
        name = checkpoint_name(1, step, self.attempt)
        draft = self.spool / "checkpoints" / f".saving-{name}"
        draft.mkdir(parents=True)
        for path, data in files.items():
            (draft / path).write_bytes(data)
        (draft / "agent.json").write_text(json.dumps({"step": step, "samples": 10 * step}))
        draft.rename(draft.with_name(name))
        return name

    def status(self):
        """The node's status in the store."""
        body = self.store.read(status_name(1, self.attempt, self.node))
        return Status.from_json(body, where="test") if body else Status()

    def state(self):
        """Content of sidecar.json."""
        return json.loads((self.spool / "sidecar.json").read_bytes())

    def kill(self):
        """SIGKILL, as from the kernel."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes(tmp_path):
    """Makes nodes, and leaves none of their processes behind."""
    made = []

    def make(url, **options):
        node = Node(tmp_path, url, **options)
        made.append(node)
        return node

    yield make
    for node in made:
        if node.process is not None and node.process.poll() is None:
            node.kill()


def owned(url, options=None, *, attempt=1, **control):
    """What the owner writes before an attempt starts; the run's store."""
    store = Run(open_store(url, options), PREFIX)
    store.write(control_name(1, attempt), Control(**control).to_json())
    LeaseFile(store).renew(holder="test")
    return store


def test_a_life_and_the_next(place, nodes, tmp_path):
    """Code and data in, checkpoints and output out; the next attempt resumes from the one before the torn."""
    url, options = place
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print(1)")
    archive = pack_workdir(tmp_path / "code", scratch=tmp_path)
    store = owned(url, options)
    store.put_file(archive.name, archive.path)
    data = open_store(f"{url}/data", options)
    data.write("glue/a/1.txt", b"one")
    data.write("glue/2.txt", b"two")
    data.write("glued.txt", b"another")
    layout = {
        "work": str(tmp_path / "work"),
        "workdir_archive": archive.name,
        "mounts": [{"name": "glue", "source": f"{url}/data/glue", "path": str(tmp_path / "in")}],
        "outputs": {"model": str(tmp_path / "out")},
    }

    first = nodes(url, options=options, **layout).start()
    assert first.started()["restore"] is None
    assert (tmp_path / "work/train.py").read_text() == "print(1)"
    assert {str(p.relative_to(tmp_path / "in")) for p in (tmp_path / "in").rglob("*.txt")} == {
        "a/1.txt",
        "2.txt",
    }
    first.says(step=1)
    good = first.saves(10, {"model.bin": b"ten"})
    torn = first.saves(20, {"model.bin": b"twenty"})
    until((first.spool / f"checkpoints/{torn}.done").exists)
    first.write("logs/000001.log", b"killed soon\n")
    first.says(step=22, signal=9, reason="killed")
    assert first.process.wait(30) == 0
    assert first.state()["phase"] == "done"
    assert first.status().ended.reason == "killed"
    assert store.read("logs/g1-a1-n0-c1-000001.log") == b"killed soon\n"
    store.write(f"checkpoints/{torn}/n0-c1/model.bin", b"twentY")

    owned(url, options, attempt=2, candidates=(torn, good))
    second = nodes(url, attempt=2, options=options, **layout).start()
    restore = second.started()["restore"]
    assert (restore["name"], restore["step"], restore["samples"]) == (good, 10, 100)
    assert (Path(restore["path"]) / "model.bin").read_bytes() == b"ten"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/weights").write_bytes(b"W")
    second.says(step=30, exit_code=0, reason="succeeded")
    assert second.process.wait(30) == 0

    status = second.status()
    assert (status.phase, status.start_step, status.restored_from) == ("ended", 10, good)
    assert [line.partition(":")[0] for line in status.rejected] == [torn]
    assert manifests.verify(store, "outputs/g1-a2-c1/model").files[0].path == "weights"
    assert status.outputs == {"model": f"{url}/{PREFIX}/outputs/g1-a2-c1/model"}


def test_killed_again_and_again(nodes, tmp_path):
    """SIGKILL at any line: every chunk arrives once under its number, every checkpoint is complete."""
    url = f"file://{tmp_path}/store"
    store = owned(url)
    node = nodes(url).start()
    node.started()
    sequences = []
    for round_ in range(1, 9):
        node.says(step=round_)
        for number in range(3 * round_ - 2, 3 * round_ + 1):
            node.write(f"logs/{number:06d}.log", f"line {number}\n".encode())
        node.saves(round_, {"a": os.urandom(3 << 20), "b": f"{round_}".encode()})
        time.sleep(0.35 + 0.17 * round_)  # it dies at another moment each time
        node.kill()
        sequences.append(node.status().sequence)
        node.start()
    node.says(step=9, exit_code=1, reason="failed")
    assert node.process.wait(60) == 0

    text = b"".join(store.read(f"logs/{name}") for name in store.children("logs"))
    assert text == b"".join(b"line %d\n" % number for number in range(1, 25))
    kept = complete_checkpoints(store, 1)
    assert kept == tuple(checkpoint_name(1, step, 1) for step in (8, 7, 6))
    for name in kept:
        manifests.verify(store, f"checkpoints/{name}", manifest=read_checkpoint(store, name))
    assert node.status().checkpoints == 8
    assert sequences == sorted(sequences)
    assert node.status().sequence > sequences[-1]


def test_sigterm_is_an_end_that_the_next_sidecar_takes_up(nodes, tmp_path):
    """Exit code 0 at once; no end is reported, nothing is restored twice."""
    url = f"file://{tmp_path}/store"
    owned(url)
    node = nodes(url, work=str(tmp_path / "work")).start()
    node.started()
    (tmp_path / "work/made-by-training").write_text("x")
    node.says(step=1)
    until(lambda: node.status().phase == "running")

    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0
    assert (node.status().phase, node.state()["phase"]) == ("running", "running")

    node.start()
    node.says(exit_code=0, reason="succeeded")
    assert node.process.wait(30) == 0
    assert (tmp_path / "work/made-by-training").exists()
    assert node.status().ended.reason == "succeeded"


def test_two_nodes_share_a_restore_and_a_checkpoint(nodes, tmp_path):
    """Node 1 is up first and waits for node 0's choice; the manifest names the files of both."""
    url = f"file://{tmp_path}/store"
    store = owned(url)
    old = nodes(url).start()
    old.started()
    name = old.saves(10, {"model.bin": b"ten"})
    until((old.spool / f"checkpoints/{name}.done").exists)
    old.says(signal=9, reason="killed")
    assert old.process.wait(30) == 0

    owned(url, attempt=2, candidates=(name,))
    second = nodes(url, attempt=2, node=1, nodes=2).start()
    until(lambda: second.spool.exists() and second.status().phase == "restoring")
    assert not (second.spool / "start.json").exists()
    first = nodes(url, attempt=2, node=0, nodes=2).start()
    assert {node.started()["restore"]["name"] for node in (first, second)} == {name}

    new = first.saves(20, {"shard-0": b"0"})
    second.saves(20, {"shard-1": b"1"})
    for node in (first, second):
        until((node.spool / f"checkpoints/{new}.done").exists)
    assert [(item.path, item.node) for item in read_checkpoint(store, new).files] == [
        ("shard-0", 0),
        ("shard-1", 1),
    ]
    for node in (first, second):
        node.says(exit_code=0, reason="succeeded")
    assert [node.process.wait(30) for node in (first, second)] == [0, 0]


def test_a_slow_save_is_never_half_a_checkpoint(nodes, tmp_path):
    """A writer takes 8 s for a zip while snapshots are due every second: the one that counts is readable."""
    url = f"file://{tmp_path}/store"
    store = owned(url)
    ours = tmp_path / "ck"
    node = nodes(url, checkpoint_path=str(ours), session={"every": {"seconds": 1}}).start()
    node.started()
    node.says(step=5)
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("weights", os.urandom(1 << 20))
    whole = (tmp_path / "model.pt").read_bytes()
    seen = []

    def write():
        with (ours / "model.pt").open("wb", buffering=0) as file:
            for at in range(0, len(whole), len(whole) // 16):
                file.write(whole[at : at + len(whole) // 16])
                seen.append(complete_checkpoints(store, 1))
                time.sleep(0.5)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    name = until(lambda: complete_checkpoints(store, 1))[0]

    assert seen == [()] * len(seen)
    manifest = read_checkpoint(store, name)
    assert (manifest.step, manifest.cooperative) == (5, False)
    (tmp_path / "back").mkdir()
    manifests.fetch(store, f"checkpoints/{name}", manifest, tmp_path / "back")
    assert (tmp_path / "back/model.pt").read_bytes() == whole


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 6 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not done or done.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_during_a_save_keeps_the_last_good_one(nodes, tmp_path, tiny_disk):
    """The store's disk fits one checkpoint: the second waits until there is space."""
    url = f"file://{tiny_disk}/store"
    store = owned(url)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    node = nodes(url, keep=1).start()
    node.started()
    good = node.saves(10, {"model.bin": os.urandom(2 << 20)})
    until((node.spool / f"checkpoints/{good}.done").exists)

    late = node.saves(20, {"model.bin": os.urandom(2 << 20)})
    until(lambda: "No space left" in node.status().message)
    assert node.status().message.startswith(f"checkpoint {late} waits: ")
    assert newest_good(store, attempt=2, candidates=[late, good])[0] == good

    ballast.unlink()
    until((node.spool / f"checkpoints/{late}.done").exists)
    until(lambda: node.status().last_checkpoint == late and not node.status().message)
    assert newest_good(store, attempt=2, candidates=[late, good])[0] == late
    node.says(exit_code=0, reason="succeeded")
    assert node.process.wait(30) == 0
