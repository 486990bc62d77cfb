"""A real Airflow of your own: separate processes, a temporary home, free ports.

``AirflowServices`` starts scheduler (with LocalExecutor), triggerer, dag processor and API server, each in
its own session, on SQLite, with a config file in the home. A Ctrl-C in the terminal therefore reaches only
the caller. The ``with`` block then ends, and :meth:`AirflowServices.stop` ends everything that the home has
started, including deliberately detached training. If the caller itself is killed, a guard process does the
same at once. Nothing outside the home is read or written, and only processes with the home's mark are ended
(see :func:`belonging_to`).
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import httpx
import psutil

from envscaler_airflow.testing.airflow_api import AirflowApi, T

Component = Literal["api-server", "scheduler", "dag-processor", "triggerer"]
COMPONENTS: tuple[Component, ...] = ("api-server", "scheduler", "dag-processor", "triggerer")
"""The components, in the order in which they are started."""

_HEALTH = {"scheduler": "scheduler", "dag-processor": "dag_processor", "triggerer": "triggerer"}
_INTERVALS: dict[str, dict[str, object]] = {
    "scheduler": {
        "job_heartbeat_sec": 2,
        "scheduler_heartbeat_sec": 1,
        "scheduler_idle_sleep_time": 0.5,
        "scheduler_health_check_threshold": 15,
        "orphaned_tasks_check_interval": 10,
        "task_instance_heartbeat_timeout": 20,
        "task_instance_heartbeat_timeout_detection_interval": 3,
        "trigger_timeout_check_interval": 3,
    },
    "triggerer": {"job_heartbeat_sec": 2, "triggerer_health_check_threshold": 6},
    "dag_processor": {
        "parsing_processes": 1,
        "refresh_interval": 10,
        "min_file_process_interval": 30,
        "bundle_refresh_check_interval": 2,
    },
    # A new API server builds its schemas at the first request. That took over 38 s on two cores that twenty
    # processes used, and the task was lost after Airflow's five attempts of 5 s. Chosen: twice that, and a
    # little more.
    "workers": {"min_heartbeat_interval": 1, "execution_api_timeout": 90},
}
"""Timeouts in seconds and retry counts of a temporary Airflow. Chosen: every wait takes seconds."""
_START_S = 600.0
"""Longest start, seconds. Chosen: twice what it took on two cores that ten other processes used."""
_LOCKED_S: dict[Component, float] = dict.fromkeys(COMPONENTS, 60.0) | {"api-server": 2.0}
"""Longest wait for a database that is being written, seconds; afterwards a scheduler ends, and sqlite3's own
5 s are too few on two busy cores. Two requests of one API server can wait for each other until one gives up:
soon, as clients repeat what then fails. Chosen.
"""
_RESTARTS = 5
"""How often components are started again. Chosen: more would hide that one cannot run."""
_GRACE_S = 5.0
"""Seconds from the request to the kill. Chosen: a temporary Airflow has nothing to save."""


class AirflowServices(AirflowApi):
    """Starts, queries, disturbs and stops one Airflow.

    Args:
        home: Its AIRFLOW_HOME; created if absent. It contains configuration, database, logs and, unless
            *config* changes that, the run store (``store``) and attempts (``local``).
        dags_folder: Where its DAG files are.
        env: Additional environment variables for all of its processes.
        config: ``{section: {key: value}}`` over the defaults below.
    """

    def __init__(
        self,
        home: Path,
        dags_folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        config: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Choose ports and write the configuration; nothing is started yet."""
        self.home = home.resolve()
        self.home.mkdir(parents=True, exist_ok=True)
        self._port, log_port, trigger_port = _free_ports(3)
        super().__init__(f"http://127.0.0.1:{self._port}")
        settings = _settings(self.home, dags_folder.resolve(), self.url)
        settings["logging"] |= {"worker_log_server_port": log_port, "trigger_log_server_port": trigger_port}
        for section, values in (config or {}).items():
            settings[section] = {**settings.get(section, {}), **values}
        self._database = str(settings["database"]["sql_alchemy_conn"])
        _write_config(self.home / "airflow.cfg", settings)
        self.env = _environment(self.home) | dict(env or {})
        self._started: dict[Component, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._restarts_left = 0
        self._keeping = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout_s: float = _START_S) -> Self:
        """Create the database, start all four components and return when all are healthy.

        Raises:
            RuntimeError: One of them ended; the end of its log is in the message.
            TimeoutError: Not healthy within *timeout_s*.
        """
        self._guard = start_guard(self.home)
        try:
            self._run("db", "migrate")
            for component in COMPONENTS:
                self._launch(component)
            self.wait(self._is_healthy, timeout_s=timeout_s, what="a healthy Airflow")
        except BaseException:
            self.stop()
            raise
        self._restarts_left = _RESTARTS
        return self

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, also after an exception."""
        self.stop()

    def log(self, component: Component) -> Path:
        """File with the complete output of *component*."""
        return self.home / f"{component}.log"

    def pids(self, component: Component) -> list[int]:
        """Live processes of *component*: its own and those in its session, starting with its first one."""
        process = self._started.get(component)
        if process is None:
            return []
        members = (found.pid for found in belonging_to(self.home) if _session(found.pid) == process.pid)
        return sorted(members, key=lambda pid: (pid != process.pid, pid))

    def task_pids(self, dag_id: str, run_id: str, task_id: str, *, map_index: int = -1) -> list[int]:
        """The worker's processes of a running task: its runner, then the runner's supervisor."""
        pid = self.task(dag_id, run_id, task_id, map_index=map_index)["pid"]
        if pid is None or not psutil.pid_exists(pid):
            return []
        return [pid, psutil.Process(pid).ppid()]

    def kill(self, component: Component, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send *sig*: SIGKILL to every process of *component* (also workers), other signals to its first one.

        SIGKILL returns when all are gone.
        """
        process = self._started[component]
        self._killed.add(process.pid)
        if sig != signal.SIGKILL:
            process.send_signal(sig)
            return
        found = [member for pid in self.pids(component) if (member := find(pid))]
        for member in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(timeout=10)
        psutil.wait_procs(found, timeout=10)

    def restart(self, component: Component, *, timeout_s: float = 60) -> None:
        """Start *component* again, after ending it if it still runs; return when it is healthy."""
        if self._started[component].poll() is None:
            self._end(component)
        self._launch(component)
        since = time.time()
        self.wait(
            lambda: self._is_healthy() and self._has_beaten(component, since),
            timeout_s=timeout_s,
            what=f"a healthy {component}",
        )

    @contextlib.contextmanager
    def frozen(self, component: Component) -> Iterator[None]:
        """Freeze *component* (SIGSTOP) in this block; afterwards it continues as if nothing had happened."""
        members = [member for pid in self.pids(component) if (member := find(pid))]
        for member in members:
            member.suspend()
        try:
            yield
        finally:
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.resume()

    @contextlib.contextmanager
    def second(self, component: Component, *, timeout_s: float = 60) -> Iterator[None]:
        """Run a second *component* in this block, healthy from its start."""
        first = self._started[component]
        since = time.time()
        self._launch(component)
        second = self._started[component]
        try:
            self.wait(
                lambda: self._has_beaten(component, since),
                timeout_s=timeout_s,
                what=f"a second {component}",
            )
            yield
        finally:
            self._end(component)
            second.wait(timeout=10)
            self._started[component] = first

    def stop(self) -> list[str]:
        """End everything that was started below the home; returns what did not end on request.

        It may be called again. SIGINT, SIGTERM and SIGHUP wait until it is done.
        """
        with _signals_held():
            # The API server ends last, because the other components still report to it.
            self._end(*(name for name in self._started if name != "api-server"))
            self._end(*(name for name in self._started if name == "api-server"))
            killed = end_all(self.home)
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait(timeout=30)
                self._guard = None
            (self.home / "sessions").unlink(missing_ok=True)
            self._started.clear()
            self.close()
        return killed

    def _run(self, *arguments: str) -> None:
        log = self.home / "commands.log"
        code = self._airflow(log, *arguments).wait()
        if code != 0:
            raise RuntimeError(f"airflow {' '.join(arguments)}: exit code {code}\n{_tail(log)}")

    def _launch(self, component: Component) -> None:
        timeout = f"?timeout={_LOCKED_S[component]:g}" if self._database.startswith("sqlite:") else ""
        env = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self._database + timeout}
        self._started[component] = self._airflow(self.log(component), component, env=env)
        note_session(self.home, self._started[component].pid)

    def _airflow(
        self, log: Path, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "airflow", *arguments],
                env=self.env | dict(env or {}),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _end(self, *components: Component) -> None:
        for component in components:
            self._killed.add(self._started[component].pid)
            self._started[component].send_signal(signal.SIGTERM)
        give_up = time.monotonic() + _GRACE_S
        for component in components:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started[component].wait(timeout=max(0.0, give_up - time.monotonic()))
            self.kill(component, signal.SIGKILL)

    def wait(self, ask: Callable[[], T | None], *, timeout_s: float, what: str, every_s: float = 0.5) -> T:
        """The first true result of *ask*, as :meth:`.AirflowApi.wait` returns it; see :meth:`keep_up`.

        Raises:
            RuntimeError: A component ended by itself too often; the end of its log is in the message.
            TimeoutError: There was none within *timeout_s*; names *what* was waited for.
        """

        def look() -> T | None:
            self.keep_up()
            return ask()

        return super().wait(look, timeout_s=timeout_s, what=what, every_s=every_s)

    def keep_up(self) -> None:
        """Start components again that ended by themselves, as every deployment of Airflow does.

        A scheduler ends when the row of a DAG run disappears while it reads it, for example. Any thread may
        call this.

        Raises:
            RuntimeError: One ended for the last of several times; the end of its log is in the message.
        """
        with self._keeping:
            for component, process in list(self._started.items()):
                if process.pid in self._killed or process.poll() is None:
                    continue
                if self._restarts_left == 0:
                    raise RuntimeError(
                        f"{component}: exit code {process.returncode}\n{_tail(self.log(component))}"
                    )
                self._restarts_left -= 1
                self.kill(component)  # the rest of its session
                self._launch(component)

    def _is_healthy(self) -> bool:
        try:
            found = self.health()
        except httpx.HTTPError:
            return False
        return all(found.get(name) == "healthy" for name in _HEALTH.values())

    def _has_beaten(self, component: Component, since: float) -> bool:
        """True when *component* has a job that began after *since* (on one clock, since both are local)."""
        if component not in _HEALTH:
            return True
        jobs = self.call("GET", "/jobs", job_state="running", order_by="-start_date", limit=20)["jobs"]
        kind = {"scheduler": "SchedulerJob", "dag-processor": "DagProcessorJob", "triggerer": "TriggererJob"}
        begun = [job["start_date"] for job in jobs if job["job_type"] == kind[component]]
        return any(datetime.fromisoformat(start).timestamp() >= since for start in begun)


def _settings(home: Path, dags: Path, url: str) -> dict[str, dict[str, object]]:
    """Short intervals for two cores; otherwise Airflow's defaults."""
    return {
        "core": {
            "dags_folder": dags,
            "executor": "LocalExecutor",
            "parallelism": 4,
            "load_examples": False,
            "dags_are_paused_at_creation": False,
            "simple_auth_manager_all_admins": True,
            "fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "plugins_folder": home / "plugins",
            "hostname_callable": "socket.gethostname",
            "test_connection": "Enabled",
        },
        "database": {"sql_alchemy_conn": f"sqlite:///{home}/airflow.db"},
        "api": {
            "host": "127.0.0.1",
            "port": url.rsplit(":", 1)[1],
            "base_url": url,
            "workers": 1,
            "secret_key": secrets.token_hex(16),
        },
        "api_auth": {"jwt_secret": secrets.token_hex(32)},
        "logging": {"base_log_folder": home / "logs", "colored_console_log": False},
        "usage_data_collection": {"enabled": False},
        "envscaler": {"store_url": home / "store", "local_root": home / "local", "deployment": "local"},
        **_INTERVALS,
    }


def _write_config(path: Path, settings: Mapping[str, Mapping[str, object]]) -> None:
    parser = configparser.RawConfigParser()
    for section, values in settings.items():
        parser[section] = {key: str(value).replace("%", "%%") for key, value in values.items()}
    path.touch(mode=0o600)
    with path.open("w") as file:
        parser.write(file)


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "_AIRFLOW"))}
    return kept | {
        "AIRFLOW_HOME": str(home),
        MARK: str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1"),
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in held]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block the signals that users and systems send to end a program; they arrive afterwards."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


MARK = "ENVSCALER_SERVICES"
"""Environment variable with the home that a process belongs to."""

_SESSIONS = "sessions"
_ROUNDS = 50
"""Maximum rounds of killing; each finds what was forked during the previous one. Chosen: 50 x 0.1 s."""


def note_session(home: Path, pid: int) -> None:
    """Record that session *pid* belongs to *home*."""
    with (home / _SESSIONS).open("a") as file:
        file.write(f"{pid}\n")


EMPTY_LOOKS = 2
"""Consecutive empty searches required. Chosen: a process in the middle of an exec shows no environment."""


def belonging_to(home: Path) -> list[psutil.Process]:
    """Every live process of *home*, even a detached one, except this process and its parents.

    Each process below a home inherits the variable :data:`MARK`. The environment of some cannot be read:
    Airflow's task supervisors hide theirs, and a process that sets its title overwrites it. These are found
    by their session: the home's file ``sessions`` lists the sessions of its own services.
    """
    sessions = _sessions(home)
    me = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in me and _is_of(process, home, sessions)
    ]


def find(pid: int) -> psutil.Process | None:
    """The live process *pid*; None when it is gone."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def end_all(home: Path) -> list[str]:
    """Kill every process of *home* and return the command lines of the killed ones.

    Raises:
        RuntimeError: Some still exist after 5 s; names them.
    """
    killed: list[str] = []
    empty = 0
    for _ in range(_ROUNDS):
        found = belonging_to(home)
        empty = 0 if found else empty + 1
        if empty == EMPTY_LOOKS:
            return killed
        if not found:
            time.sleep(0.05)
            continue
        killed += [_describe(process) for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=0.1)
    raise RuntimeError(f"{home}: still alive: {[_describe(process) for process in belonging_to(home)]}")


def start_guard(home: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends everything of *home* once the caller is gone, even by SIGKILL.

    It waits for the end of its standard input, whose other end the caller keeps open.
    """
    command = [sys.executable, "-m", "envscaler_airflow.testing.airflow_services", str(home)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _sessions(home: Path) -> frozenset[int]:
    try:
        text = (home / _SESSIONS).read_text()
    except FileNotFoundError:
        return frozenset()
    return frozenset(int(line) for line in text.split())


def _is_of(process: psutil.Process, home: Path, sessions: Container[int]) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.uids().real != os.getuid():
            return False
        if os.getsid(process.pid) in sessions:
            return True
        return process.environ().get(MARK) == str(home)
    except (psutil.Error, ProcessLookupError):
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}"


def _guard(home: Path) -> None:
    sys.stdin.buffer.read()
    end_all(home)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
