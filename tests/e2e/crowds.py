"""Scenarios that run at the same time, since each of them mostly waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

DEMO = "test_demo.py"
"""The file whose tests start an Airflow each, and do not use the shared one."""

AT_ONCE = {"local": 2, "cluster": 2}
"""How many run at the same time, by where their stages train. Chosen: two stages of one CPU each fit on a
machine of two, and two pods beside them leave its processor time for their Airflow.
"""


def together(where: str) -> Callable[[Callable], Callable]:
    """Make a test that waits for its scenario, which runs beside others; its stages train *where*."""

    def decorate(scenario: Callable) -> Callable:
        def test(crowd: Crowd, request: pytest.FixtureRequest) -> None:
            crowd.result(request.node)

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        test.scenario, test.where = scenario, where
        return test

    return decorate


def is_together(item: pytest.Item) -> bool:
    """True for a test that waits for a scenario."""
    return hasattr(getattr(item, "function", None), "scenario")


def group_of(file: str, processes: int) -> str:
    """Name of the group of test files that run in one process; those of the demo have one for themselves."""
    if file == DEMO:
        return "demo"
    files = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
    return f"airflow-{files.index(file) % max(1, processes - 1)}"


class ByAirflow(LoadFileScheduling):
    """Gives each process of xdist a group of files, so that they share an Airflow."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0].rpartition("/")[2], self.numnodes)


class Crowd:
    """The selected scenarios of this process; all of them start when the first result is requested.

    Args:
        items: All selected tests, also those of other processes.
        play: Runs a scenario, by its name.
    """

    def __init__(self, items: list[pytest.Item], play: Callable[[str, Callable], None]) -> None:
        """Start nothing yet."""
        self._items = [item for item in items if is_together(item)]
        self._play = play
        self._pools = {where: ThreadPoolExecutor(number) for where, number in AT_ONCE.items()}
        self._played: dict[str, Future[None]] = {}

    def result(self, item: pytest.Item) -> None:
        """Return when the scenario of *item* has ended; raises what it raised."""
        if not self._played:
            processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            mine = group_of(item.path.name, processes)
            for other in self._items:
                if group_of(other.path.name, processes) == mine:
                    test = other.function
                    pool = self._pools[test.where]
                    self._played[other.nodeid] = pool.submit(self._play, other.name, test.scenario)
        self._played[item.nodeid].result()

    def close(self) -> None:
        """Start no further scenario, and wait for those that run."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
