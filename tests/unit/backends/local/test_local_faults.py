"""What a drill can break on this machine, and by which signal."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local import local_backend as module
from envscaler_airflow.backends.local.cgroups import CgroupScope
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import Handle
from envscaler_airflow.sidecar.context import AWAY_S

HANDLE = Handle("local", "one", {})
LIMITED = CgroupScope(memory="/sys/fs/cgroup/x", limits={"memory": "cgroup2"})


class Process:
    """A process that remembers its signals."""

    pid = 4711

    def __init__(self) -> None:
        """Alive."""
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        """Receive it."""
        self.signals.append(number)


def view(tmp_path, **changes):
    """Node 0, running on this machine within a memory cgroup."""
    fields = {
        "node": 0,
        "folder": tmp_path,
        "is_here": True,
        "identity": SimpleNamespace(host="gpu-7"),
        "end": lambda: None,
        "is_live": lambda: True,
        "survivors": lambda: SimpleNamespace(scope=LIMITED),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A backend with that node; ``local.node`` may be replaced."""
    made = SimpleNamespace(backend=LocalBackend(tmp_path), node=view(tmp_path))
    monkeypatch.setattr(made.backend, "_views", lambda handle: [made.node])
    return made


@pytest.mark.parametrize(
    ("fault", "changes", "said"),
    [
        ("lose-node", {}, ""),
        ("oom", {}, ""),
        ("lose-node", {"node": 1}, "the attempt has no node 0"),
        ("stall", {"is_here": False}, "node 0 runs on gpu-7, in a process table that is not visible here"),
        ("stall", {"end": dict}, "node 0 does not run"),
        ("stall", {"is_live": lambda: False}, "node 0 does not run"),
        (
            "oom",
            {"survivors": lambda: SimpleNamespace(scope=CgroupScope(notes=("no cgroups: denied",)))},
            "no cgroup limits the memory of node 0: no cgroups: denied",
        ),
    ],
)
def test_what_cannot_be_broken_from_here_says_why(local, tmp_path, fault, changes, said):
    """A node elsewhere or that has ended, and memory that nothing limits."""
    local.node = view(tmp_path, **changes)

    assert local.backend.obstacle(HANDLE, fault, node=0) == said


def test_an_obstacle_is_an_error_at_the_injection(local, tmp_path):
    """The node ended after the check."""
    local.node = view(tmp_path, end=dict)

    with pytest.raises(BackendError, match="lose-node: node 0 does not run"):
        local.backend.inject(HANDLE, "lose-node", node=0)


@pytest.mark.parametrize(
    ("fault", "number", "lasts_s"),
    [("kill-sidecar", signal.SIGKILL, 0.0), ("store-away", signal.SIGUSR1, AWAY_S)],
)
def test_the_sidecar_alone_gets_the_signal(local, tmp_path, monkeypatch, fault, number, lasts_s):
    """Found by the command line that it was started with."""
    process, asked = Process(), []
    files.write_json(tmp_path / files.REQUEST, {"sidecar": ["python", "sidecar"], "wrapper": ["python"]})
    monkeypatch.setattr(module, "find_program", lambda survivors, words: asked.append(words) or process)

    made = local.backend.inject(HANDLE, fault, node=0)

    assert (asked, process.signals) == ([["python", "sidecar"]], [number])
    assert (made.lasts_s, made.by_hand) == (lasts_s, "")


def test_a_suspended_training_goes_on_by_hand_too(local, tmp_path, monkeypatch):
    """The command is printed before anything else happens: the drill itself may be killed."""
    training = Process()
    files.write_json(tmp_path / files.REQUEST, {"sidecar": ["python", "sidecar"], "wrapper": ["python"]})
    monkeypatch.setattr(module, "find_program", lambda survivors, words: Process())
    monkeypatch.setattr(module, "training_of", lambda wrapper: {training})

    made = local.backend.inject(HANDLE, "stall", node=0)
    made.undo()

    assert training.signals == [signal.SIGSTOP, signal.SIGCONT]
    assert made.by_hand == "kill -CONT 4711"


def test_a_sidecar_that_is_being_restarted_cannot_be_killed(local, tmp_path, monkeypatch):
    """It does not run now."""
    files.write_json(tmp_path / files.REQUEST, {"sidecar": ["python", "sidecar"], "wrapper": ["python"]})
    monkeypatch.setattr(module, "find_program", lambda survivors, words: None)

    with pytest.raises(BackendError, match="the sidecar of node 0 does not run now"):
        local.backend.inject(HANDLE, "kill-sidecar", node=0)
