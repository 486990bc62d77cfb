"""Trainings that a drill breaks, on this machine and in pods, and the report of ``envscaler drill``."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from fakes.owned import Owned

from envscaler_airflow.cli.shell_owner import watcher_of
from envscaler_airflow.errors import SpecError
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store

SPEC = """
version: v1
name: train
resources: {requests: {cpu: 0.1, memory: 128Mi}, limits: {memory: 256Mi}}
failure: {oom_memory_cap: 1Gi}
num_nodes: 1..2
workdir: .
entrypoint: [python, train.py, /output/checkpoints]
checkpoint: {path: /output/checkpoints, every: 1s}
metrics: {log_patterns: {step: 'step (\\d+)'}}
stall: {min: 15s}
"""
TRAINING = """
import json, os, sys, time
path = os.path.join(sys.argv[1], "state.json")
step = json.load(open(path))["step"] if os.path.exists(path) else 0
while True:
    step += 1
    time.sleep(0.1)
    print("step", step, flush=True)
    if step % 10 == 0:
        with open(path + ".tmp", "w") as file:
            json.dump({"step": step}, file)
        os.replace(path + ".tmp", path)
"""


class Drilled(Owned):
    """A run without an end: ten steps a second, saved every second by node 0."""

    def __init__(self, folder: Path) -> None:
        """Start it, and wait for its first checkpoint."""
        code = folder / "code"
        code.mkdir(parents=True)
        (code / "train.py").write_text(TRAINING)
        (code / "envscaler.yaml").write_text(SPEC)
        super().__init__(folder, code / "envscaler.yaml", Path(sys.executable))
        self.start()
        try:
            self.await_checkpoint(attempt=1)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave no process behind, also no owner that a drill started."""
        if self.prefix():
            found = Run(self.store, self.prefix())
            with contextlib.suppress(SpecError):
                watcher_of(found, found.events.load()).signal(signal.SIGKILL)
        super().close()

    def restart(self) -> str:
        """The command that owns the run again."""
        words = [sys.executable, "-m", "envscaler_airflow.cli", "run", "-f", str(self.spec), "--name", "one"]
        return shlex.join(words)

    def shell(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of another shell."""
        command = [sys.executable, "-m", "envscaler_airflow.cli", *words]
        return subprocess.run(
            command, env=self.env, cwd=self.folder, check=False, capture_output=True, text=True
        )

    def drill(self, *faults: str, options: tuple[str, ...] = ()) -> tuple[int, dict[str, dict]]:
        """Exit code, and what each fault showed."""
        got = self.shell("drill", "--run", "one", "--faults", ",".join(faults), "--yes", "--json", *options)
        assert got.stdout, got.stderr
        return got.returncode, {one["fault"]: one for one in json.loads(got.stdout)["faults"]}


POD_SPEC = """
version: v1
name: train
base: {image: "python:3"}
resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 256Mi}}
failure: {oom_memory_cap: 1Gi}
workdir: code
entrypoint: [python3, train.py, /output/checkpoints]
checkpoint: {path: /output/checkpoints, every: 1s}
metrics: {log_patterns: {step: 'step (\\d+)'}}
stall: {min: 15s}
"""


class InPods:
    """A run in pods, owned by ``envscaler submit``."""

    def __init__(self, folder, cluster) -> None:
        """Start it."""
        self.cluster, self.folder = cluster, folder
        store = folder / "store"
        store.mkdir()
        settings = {"store_volume": {"hostPath": {"path": str(store)}}, "store_mount": str(store)}
        settings |= {"sidecar_image": "agent:1", "wait_for_node_s": 0}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        (folder / "code").mkdir()
        (folder / "code/train.py").write_text(TRAINING)
        (folder / "train.yaml").write_text(POD_SPEC)
        self.env = {
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig(folder / "config")),
            "ENVSCALER_STORE_URL": f"file://{store}",
        }
        words = ("submit", "-f", "train.yaml", "--name", "one", "--config", "settings.yaml")
        with (folder / "submit.log").open("w") as log:
            self.owner = subprocess.Popen(
                self._command(*words), cwd=folder, env=self.env, stdout=log, stderr=log
            )

    @staticmethod
    def _command(*words):
        return [sys.executable, "-m", "envscaler_airflow.cli", *words]

    def await_status(self):
        """Wait until a node has reported."""
        for _ in range(900):
            if list((self.folder / "store").glob("*/shell/one/train/*/status/*")):
                return
            assert self.owner.poll() is None, self.said()
            time.sleep(0.1)
        raise AssertionError(self.said())

    def said(self):
        """What its owner printed."""
        return (self.folder / "submit.log").read_text()

    def drill(self, faults):
        """Exit code, and what each fault showed."""
        words = ("drill", "--run", "one", "--faults", faults, "--yes", "--json")
        got = subprocess.run(
            self._command(*words), cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert got.stdout, got.stderr + self.said()
        return got.returncode, {one["fault"]: one for one in json.loads(got.stdout)["faults"]}

    def state(self):
        """State of the run."""
        store = open_store(f"file://{self.folder}/store")
        [found] = (self.folder / "store").glob("*/shell/one/train/*")
        return Run(store, str(found.relative_to(self.folder / "store"))).events.load()

    def close(self):
        """Leave no owner behind."""
        self.owner.kill()
        self.owner.wait()
