"""Runs containers' commands for real, as processes of this machine: a stage really trains in the fake."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from fakes.kubernetes import volumes
from fakes.kubernetes.environment import expand
from fakes.kubernetes.objects import Object, quantity
from fakes.kubernetes.programs import Execution

if TYPE_CHECKING:
    from fakes.kubernetes.podrun import PodRun
    from fakes.kubernetes.podstatus import Container

INSIDE = Path(__file__).with_name("inside.py")
LOOK_S = 0.5
"""Time between checks of a container's memory, chosen: cheap, and soon enough for a test."""


def _kept(mounts: list[Object]) -> list[Object]:
    """The image's own files, where a volume such as ``/tmp`` would hide them: interpreter and sources."""
    own = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[3]}
    hidden = [path for path in own if any(path.is_relative_to(mount["path"]) for mount in mounts)]
    return [{"source": str(path), "path": str(path), "read_only": True} for path in sorted(hidden)]


@dataclass(frozen=True, slots=True)
class Image:
    """What an image provides: its command and its environment. Its files are this machine's."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


class Processes:
    """Give it to `Cluster(executor=...)`, which then must run at speed 1.

    Args:
        state: Folder for volumes and roots; a temporary one by default, removed at the end.
        images: What images provide, by shell wildcards; the first that fits counts. ``python`` and
        ``python3`` are
            this interpreter's, unless the image's PATH says otherwise.
    """

    def __init__(self, state: Path | None = None, images: dict[str, Image] | None = None) -> None:
        """Start nothing yet."""
        self._temporary = tempfile.TemporaryDirectory(prefix="fake-kubernetes-") if state is None else None
        self.state = state or Path(self._temporary.name if self._temporary else "")
        self.images = images or {}
        self.running: set[Process] = set()
        self._removing: set[asyncio.Task[None]] = set()

    def image(self, name: str) -> Image:
        """What the image *name* provides."""
        return next((one for like, one in self.images.items() if fnmatch.fnmatchcase(name, like)), Image())

    def make(self, run: PodRun, one: Container, env: dict[str, str]) -> Execution | str:
        """A process for a container; a text if it cannot be started."""
        image = self.image(one.spec["image"])
        command = one.spec.get("command") or list(image.entrypoint)
        args = one.spec.get("args") or ([] if one.spec.get("command") else list(image.command))
        argv = [expand(part, env) for part in [*command, *args]]
        if not argv:
            return "no command specified"
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        base = {"PATH": path, "HOME": "/root", **image.env, **env}
        try:
            mounts = self._mounts(run, one, base)
        except volumes.UnsupportedError as error:
            return str(error)
        root = self.state / "pods" / run.uid / "roots" / f"{one.name}-{one.restarts}"
        root.mkdir(parents=True, exist_ok=True)
        order = {
            "root": str(root),
            "mounts": mounts,
            "cwd": one.spec.get("workingDir") or "/",
            "hostname": (run.pod["spec"].get("hostname") or run.pod["metadata"]["name"])[:63],
            "argv": argv,
            "env": base,
        }
        limit = (one.spec.get("resources", {}).get("limits") or {}).get("memory")
        return Process(self, run.uid, order, int(quantity(limit)) if limit else None)

    def _mounts(self, run: PodRun, one: Container, env: dict[str, str]) -> list[Object]:
        by_name = {volume["name"]: volume for volume in run.pod["spec"].get("volumes") or ()}
        mounts = []
        for mount in one.spec.get("volumeMounts") or ():
            source = volumes.folder_of(run.cluster.store, run.pod, by_name[mount["name"]], self.state)
            below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", env)
            if below:
                source /= below
                if not source.exists():
                    source.mkdir(parents=True)
            read_only = bool(mount.get("readOnly")) or bool(
                {"configMap", "secret"} & set(by_name[mount["name"]])
            )
            mounts.append({"source": str(source), "path": mount["mountPath"], "read_only": read_only})
        return [*mounts, *_kept(mounts)]

    def forget(self, uid: str) -> None:
        """Remove the folders of a deleted pod, once all its processes have ended."""
        tasks = [one.task for one in self.running if one.uid == uid and one.task is not None]

        async def remove() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(shutil.rmtree, self.state / "pods" / uid, ignore_errors=True)

        task = asyncio.get_running_loop().create_task(remove())
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        """Kill all processes and wait for their end; remove temporary folders."""
        for process in tuple(self.running):
            process.kill()
        tasks = [process.task for process in self.running if process.task is not None]
        await asyncio.gather(*tasks, *self._removing, return_exceptions=True)
        if self._temporary is not None:
            self._temporary.cleanup()


class Process:
    """One running container."""

    def __init__(self, owner: Processes, uid: str, order: Object, memory: int | None) -> None:
        """Prepare; `start` starts it."""
        self.uid = uid
        self._owner = owner
        self._order = order
        self._memory = memory
        self._process: asyncio.subprocess.Process | None = None
        self._pending: list[signal.Signals] = []
        self._is_oom = False
        self.task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """PID of the process that started the container; 0 without one."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def environ(self) -> dict[str, str]:
        """Environment of the container."""
        return dict(self._order["env"])

    def start(self, ended: Callable[[int, bool], None], printed: Callable[[str, bytes], None]) -> None:
        """Start; the rest happens in a task of the cluster's loop."""
        self._owner.running.add(self)
        self.task = asyncio.get_running_loop().create_task(self._run(ended, printed))

    async def _run(self, ended: Callable[[int, bool], None], printed: Callable[[str, bytes], None]) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(self._order, file)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(INSIDE), file.name, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        for number in self._pending:
            self._signal(number)
        watching = asyncio.ensure_future(self._watch_memory())
        try:
            await asyncio.gather(
                self._pump(self._process.stdout, "stdout", printed),
                self._pump(self._process.stderr, "stderr", printed),
            )
            code = await self._process.wait()
        finally:
            watching.cancel()
            self._owner.running.discard(self)
        ended(128 - code if code < 0 else code, self._is_oom)

    async def _pump(
        self, stream: asyncio.StreamReader | None, name: str, printed: Callable[[str, bytes], None]
    ) -> None:
        while stream is not None and (data := await stream.read(1 << 16)):
            printed(name, data)

    async def _watch_memory(self) -> None:
        while self._memory is not None and self._process is not None:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(_resident, self._process.pid) > self._memory:
                self._is_oom = True
                self.kill()
                return

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            self._pending.append(number)
        elif self._process.returncode is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM to the container's PID 1."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole container: its PID namespace dies with its starter."""
        self._signal(signal.SIGKILL)


def _resident(pid: int) -> int:
    """Memory of a process and its descendants in bytes."""
    total = 0
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0
    for one in family:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
