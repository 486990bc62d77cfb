"""A run owned by ``envscaler run`` in a folder of its own, with real processes: watched, killed and moved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store


class Owned:
    """One run of an example's spec, in another interpreter than ours."""

    def __init__(self, folder: Path, spec: Path, python: Path, **changes) -> None:
        """Write the spec for this machine: *python* in place of an environment to build."""
        self.folder = folder
        self._owners: list[subprocess.Popen[str]] = []
        self.store = open_store(f"file://{folder}/store")
        body = yaml.safe_load(spec.read_text()) | changes
        body.pop("runtimes", None)
        body["workdir"] = str((spec.parent / body["workdir"]).resolve())
        if "distributed" not in body:
            body["entrypoint"] = [str(python), *body["entrypoint"][1:]]
        self.spec = folder / spec.name
        self.spec.write_text(yaml.safe_dump(body))
        self.env = {
            **os.environ,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # for torchrun
            "ENVSCALER_STORE_URL": f"file://{folder}/store",
            "ENVSCALER_LOCAL_ROOT": str(folder / "attempts"),
        }

    def start(self, *arguments: str, name: str = "one") -> subprocess.Popen[str]:
        """Start to own the run *name*."""
        command = ["run", "-f", str(self.spec), "--name", name, *arguments]
        owner = subprocess.Popen(
            [sys.executable, "-m", "envscaler_airflow.cli", *command],
            env=self.env,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._owners.append(owner)
        return owner

    def close(self) -> None:
        """Leave no process behind."""
        for owner in self._owners:
            if owner.poll() is None:
                os.killpg(owner.pid, signal.SIGKILL)
            owner.communicate()
        self.lose_machine()

    def prefix(self, name: str = "one") -> str:
        """Folder of the run."""
        found = list((self.folder / "store").glob(f"*/shell/{name}/*/*"))
        return str(found[0].relative_to(self.folder / "store")) if found else ""

    def state(self, name: str = "one"):
        """State folded from the run's events."""
        return Run(self.store, self.prefix(name)).events.load()

    def checkpoints(self, name: str = "one") -> dict[str, dict]:
        """Manifest of every complete checkpoint."""
        found = (self.folder / "store" / self.prefix(name)).glob("checkpoints/*/manifest-c1.json")
        return {path.parent.name: json.loads(path.read_text()) for path in found}

    def await_checkpoint(self, *, attempt: int, name: str = "one", patience_s: float = 90) -> dict:
        """Wait for the first complete checkpoint of *attempt*; its manifest."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            found = self.checkpoints(name) if self.prefix(name) else {}
            mine = [body for body in found.values() if body["attempt"] == attempt]
            if mine:
                return mine[0]
            time.sleep(0.05)
        raise AssertionError(f"attempt {attempt} completed no checkpoint: {self.said(name)}")

    def said(self, name: str = "one") -> str:
        """The training's output from all attempts."""
        logs = (self.folder / "store" / self.prefix(name)).glob("logs/*")
        return "\n".join(path.read_text(errors="replace") for path in sorted(logs))

    def output(self, name: str = "one") -> Path:
        """Folder of the output ``model``."""
        uri = self.state(name).outputs["model"]
        return Path(uri.removeprefix("file://"))

    def move(self, *, to: str, nodes: int = 1, name: str = "one", patience_s: float = 60) -> None:
        """Let the owner move to *nodes* of the offer *to*; repeat a refused request, as during a save."""
        live = self.state(name).live
        offers = LocalBackend(self.folder / "attempts").offers()
        offer = next(each for each in offers if each.instance_type == to)
        log = Run(self.store, self.prefix(name)).events
        asked, answer, until = None, None, time.monotonic() + patience_s
        while time.monotonic() < until:
            later = log.read(after=asked.number) if asked is not None else ()
            answer = next((each for each in later if each.type in ("move-accepted", "move-refused")), None)
            if answer is not None and answer.type == "move-accepted":
                return
            if asked is None or answer is not None:
                asked = request_move(
                    Run(self.store, self.prefix(name)),
                    target=Allocation(offer, nodes),
                    from_attempt=(live.generation, live.number),
                    because={"reason": "the test says so", "forced": True},
                )
            time.sleep(0.2)
        raise AssertionError(f"no move to {nodes} x {to} was accepted: {answer}")

    def processes(self) -> list[psutil.Process]:
        """Every live process of every attempt."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder / "attempts") in " ".join(process.cmdline()):
                    mine.append(process)
        return mine

    def lose_machine(self) -> None:
        """SIGKILL to the whole stage at once, the command and its children too."""
        roots = self.processes()
        with_children = {process.pid: process for process in roots}
        for process in roots:
            with contextlib.suppress(psutil.Error):
                with_children |= {child.pid: child for child in process.children(recursive=True)}
        for process in with_children.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in with_children.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
