"""Processes of a node: what they inherit, and how they are identified, found and killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from envscaler_airflow.agent_files import copy_agent, package_root
from envscaler_airflow.backends.local.cgroups import CgroupScope

MARKER = "ENVSCALER_SPOOL"
"""Every process of a node inherits this variable with the node's own folder as its value."""

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process id that cannot be mistaken for a later process of the same number.

    Attributes:
        pid: Process id.
        start: When it started, in the system's own ticks since boot.
    """

    pid: int
    start: int

    def is_alive(self) -> bool:
        """True while this process runs. One that only waits to be reaped does not."""
        return process_start(self.pid) == self.start

    def signal(self, number: int) -> None:
        """Send *number* unless the process has ended."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def to_dict(self) -> dict[str, int]:
        """JSON form, as in node.json and in handles."""
        return {"pid": self.pid, "start": self.start}

    @classmethod
    def from_dict(cls, body: Any) -> ProcessId | None:
        """Read what :meth:`to_dict` wrote; None when it is absent."""
        try:
            return cls(int(body["pid"]), int(body["start"]))
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Identify a running process; None when *pid* does not run."""
        start = process_start(pid)
        return None if start is None else cls(pid, start)


def process_start(pid: int) -> int | None:
    """Start time of a running process in ticks since boot; None when it has ended or is a zombie."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])
    import psutil  # noqa: PLC0415  # only where stages run as processes

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.Error:
        return None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before them may contain any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@dataclass(frozen=True, slots=True)
class Survivors:
    """Where to look for the remaining processes of a node.

    Attributes:
        spool: The node's spool folder, value of :data:`MARKER`.
        guard: Leader of the node's session; None when unknown.
        scope: The node's cgroups, which no process leaves by forking.
        main: Node main; it and its guard adopt the orphans of their descendants.
    """

    spool: str
    guard: ProcessId | None
    scope: CgroupScope
    main: ProcessId | None = None

    def find(self, *, spare: Iterable[int] = ()) -> set[ProcessId]:
        """Processes of the node that run now, by cgroup, session, descent and inherited marker."""
        pids = set(self.scope.pids())
        pids.update(self._by_descent(), self._by_look())
        pids -= set(spare)
        return {found for pid in pids if (found := ProcessId.of(pid)) is not None}

    def _by_descent(self) -> set[int]:
        pids: set[int] = set()
        for ancestor in (self.guard, self.main):
            if ancestor is not None and ancestor.is_alive():
                pids |= {ancestor.pid, *descendants(ancestor.pid)}
        return pids

    def _by_look(self) -> set[int]:
        import psutil  # noqa: PLC0415  # as above

        marker = f"{MARKER}={self.spool}".encode()
        session = self._session()
        found = set()
        for pid in psutil.pids():
            with suppress(OSError):
                if (session and os.getsid(pid) == session) or marker in _environ(pid):
                    found.add(pid)
        return found

    def _session(self) -> int | None:
        """Session id of the node; None when another process has that number now."""
        if self.guard is None or process_start(self.guard.pid) not in (None, self.guard.start):
            return None
        return self.guard.pid


def descendants(pid: int) -> set[int]:
    """Children of *pid* and theirs; none when it is gone."""
    import psutil  # noqa: PLC0415  # as above

    with suppress(psutil.Error):
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set()


def find_program(survivors: Survivors, words: Sequence[str]) -> ProcessId | None:
    """The process of the node whose command line begins with *words*; None when it does not run."""
    import psutil  # noqa: PLC0415  # as above

    for found in survivors.find():
        with suppress(psutil.Error):
            if psutil.Process(found.pid).cmdline()[: len(words)] == list(words):
                return found
    return None


def training_of(wrapper: ProcessId) -> set[ProcessId]:
    """The command of *wrapper* and what it started; the sampler is in the wrapper's own process group."""
    found = set()
    for pid in descendants(wrapper.pid):
        with suppress(ProcessLookupError):
            if os.getpgid(pid) != os.getpgid(wrapper.pid) and (one := ProcessId.of(pid)) is not None:
                found.add(one)
    return found


HOG_S = 60.0
"""Longest life of the process that fills a node's memory, seconds. Chosen: some GiB a second."""
_HOG = f"""
import os, sys, time
group, counter = sys.argv[1:]
def kills():
    lines = open(os.path.join(group, counter)).read().splitlines()
    return dict(line.split() for line in lines).get("oom_kill")
before, until = kills(), time.monotonic() + {HOG_S}
open(os.path.join(group, "cgroup.procs"), "w").write("0")
blocks = []
while kills() == before and time.monotonic() < until:
    blocks.append(b"x" * (1 << 20))
"""
"""Joins the training's group, and fills it until the kernel has killed another process of it."""


def prefer_for_kill(processes: Iterable[ProcessId]) -> dict[ProcessId, str]:
    """Let the kernel kill *processes* first where memory is out; returns their scores before.

    Source: Linux, proc_pid_oom_score_adj(5); raising it needs no privilege.
    """
    before = {}
    for process in processes:
        with suppress(OSError):
            score = Path(f"/proc/{process.pid}/oom_score_adj")
            before[process] = score.read_text(encoding="ascii")
            score.write_text("1000", encoding="ascii")
    return before


def restore_scores(before: Mapping[ProcessId, str]) -> None:
    """Give each process that still runs its score of *before*."""
    for process, score in before.items():
        with suppress(OSError):
            if process.is_alive():
                Path(f"/proc/{process.pid}/oom_score_adj").write_text(score, encoding="ascii")


def fill_memory(scope: CgroupScope) -> subprocess.Popen[bytes]:
    """Start a process that uses the rest of the training's memory, and ends by itself."""
    is_unified = Path(scope.memory, "memory.events").exists()
    counter = "memory.events" if is_unified else "memory.oom_control"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOG, scope.memory, counter],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def kill_all(
    survivors: Survivors,
    *,
    spare: Iterable[int] = (),
    patience_s: float = 10.0,
    reap: Callable[[], None] = lambda: None,
) -> set[ProcessId]:
    """SIGKILL every process of the node until none is left; returns those that outlive *patience_s*.

    *reap* is called in every turn, so that a parent collects its dead children. Only a process that is stuck
    in the kernel (a dead network disk) survives.
    """
    spared = set(spare)
    until = time.monotonic() + patience_s
    left = survivors.find(spare=spared)
    while left:
        survivors.scope.kill("training" if spared else None)
        for process in left:
            process.signal(signal.SIGKILL)
        time.sleep(_POLL_S)
        reap()
        left = survivors.find(spare=spared)
        if time.monotonic() >= until:
            break
    return left


SECRET_PREFIX = "ENVSCALER_SECRET_"  # noqa: S105  # a prefix of names
"""Secrets of the training reach only node main, under this prefix."""

_OURS = re.compile(
    r"_*AIRFLOW_|ENVSCALER_(SPOOL|RUN|GENERATION|ATTEMPT|NODES?|CPUS|RENDEZVOUS|RESTORE|CHECKPOINT_DIR)\Z"
    r"|ENVSCALER_(INPUT|OUTPUT|VOLUME|SECRET)_"
)
"""Airflow's settings and connections, and variables that identify another run's training."""
_KEYS = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|CREDENTIAL_EXPIRATION)\Z"
)
"""Variables that form one identity. Source: botocore, ``EnvProvider``."""
_TRAINING = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|LIBRARY_PATH"
    r"|CUDA_\w+|NVIDIA_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_PROXY|\w+_proxy"
    r"|ENVSCALER_SERVICES)\Z"  # a test harness finds its services' processes by this
)
"""What a training inherits from the machine. Chosen: what programs need to run, no credentials."""


def node_env(
    environ: Mapping[str, str],
    secrets: Mapping[str, str],
    spool: str,
    store_keys: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment of node main: all but Airflow's settings and connections, with the secrets prefixed.

    *store_keys* are variables of the store's connection; they replace all of the worker's, because its
    session token would belong to other keys.
    """
    env = {name: value for name, value in environ.items() if not _OURS.match(name)}
    if store_keys:
        env = {name: value for name, value in env.items() if not _KEYS.match(name)} | dict(store_keys)
    env |= {SECRET_PREFIX + name: value for name, value in secrets.items()}
    env["ENVSCALER_SPOOL"] = spool
    if not _is_installed():
        env["PYTHONPATH"] = _joined(
            dict.fromkeys([str(Path(__file__).parents[3]), str(package_root())]), env.get("PYTHONPATH")
        )
    return env


def sidecar_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the sidecar: node main's without the secrets of the training."""
    return {name: value for name, value in environ.items() if not name.startswith(SECRET_PREFIX)}


def training_env(environ: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str]:
    """Environment of wrapper and command: a short list from the machine, the spec's variables, the secrets.

    Programs of the command's own environment come first on its PATH, then the spec's PATH, else the
    machine's. Without such an environment only the spec's PATH is used.
    """
    env = {name: value for name, value in environ.items() if _TRAINING.match(name)}
    path = env.get("PATH", os.defpath)
    env["PATH"] = _joined([str(Path(sys.executable).parent)], path)
    gpus = request.get("gpus")
    if gpus is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that NVML uses
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    env |= {str(name): str(value) for name, value in request["env"].items()}
    env |= {name: environ[SECRET_PREFIX + name] for name in request["secret_names"]}
    if request.get("python") is not None:
        folder = Path(request["python"]).parent
        env["PATH"] = _joined([str(folder)], request["env"].get("PATH", path))
        env["VIRTUAL_ENV"] = str(folder.parent)
    if request.get("pythonpath"):
        env["PYTHONPATH"] = _joined([request["pythonpath"]], env.get("PYTHONPATH"))
    return env


def training_pythonpath(command: Sequence[str], python: str | None, root: Path) -> str | None:
    """The path that makes ``envscaler_agent`` importable in the command's interpreter; None: not needed.

    For this interpreter that is the package itself; for any other (or a shell script, which may start any) a
    folder below *root* with the agent, which runs on every Python.
    """
    if python in (None, sys.executable) and command and _is_this_interpreter(command[0]):
        return None if _is_installed() else str(package_root())
    return str(copy_agent(root))


def _is_this_interpreter(program: str) -> bool:
    if program in ("python", "python3"):
        return True  # its folder is first on PATH
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _is_installed() -> bool:
    """True when this interpreter finds the package without an added path."""
    try:
        metadata.distribution("envscaler-airflow")
    except metadata.PackageNotFoundError:
        return False
    return True


def _joined(first: Iterable[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])
