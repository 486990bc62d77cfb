"""The loss of a machine leaves no process, in any order of their deaths."""

import signal
from types import SimpleNamespace

from envscaler_airflow.backends.local.local_backend import LocalBackend


class Process:
    """A process that remembers its signals; the first one ends it."""

    def __init__(self) -> None:
        """Alive."""
        self.signals: list[int] = []

    def is_alive(self) -> bool:
        """True until it gets a signal."""
        return not self.signals

    def signal(self, number: int) -> None:
        """Die of *number*."""
        self.signals.append(number)


def test_an_orphan_that_only_node_main_leads_to_dies_with_it(tmp_path, monkeypatch):
    """Without cgroups, a process of another session and environment is found by descent alone."""
    main, orphan = Process(), Process()
    alive = SimpleNamespace(
        find=lambda spare=(): {orphan} if main.is_alive() else set(),
        scope=SimpleNamespace(kill=lambda kind: None),
    )
    view = SimpleNamespace(is_here=True, node=0, main=main, survivors=lambda: alive)
    backend = LocalBackend(tmp_path)
    monkeypatch.setattr(backend, "_views", lambda handle: [view])

    backend.take_away(object())

    assert (main.signals, orphan.signals) == ([signal.SIGKILL], [signal.SIGKILL])
