"""Work that follows from changes: done soon, each item once, in the cluster's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Queue:
    """Work items by kind and key; an item that is queued already is not queued twice."""

    def __init__(self) -> None:
        """Begin empty."""
        self._work: dict[tuple[str, str], None] = {}
        self._calls: list[Callable[[], None]] = []
        self._handlers: dict[str, Callable[[str], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_armed = False
        self._is_busy = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in *loop* from now on."""
        self._loop = loop
        self._arm()

    def handle(self, kind: str, handler: Callable[[str], None]) -> None:
        """Set the worker for *kind*."""
        self._handlers[kind] = handler

    def add(self, kind: str, key: str) -> None:
        """Queue a work item."""
        self._work[kind, key] = None
        self._arm()

    def call(self, act: Callable[[], None]) -> None:
        """Queue a call."""
        self._calls.append(act)
        self._arm()

    def _arm(self) -> None:
        if self._loop is not None and not self._is_armed and not self._is_busy:
            self._is_armed = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_armed = False
        self.drain()

    def drain(self) -> None:
        """Do all queued work, and the work that follows from it."""
        if self._is_busy:
            return
        self._is_busy = True
        work: dict[tuple[str, str], None] = {}
        try:
            while self._work or self._calls:
                calls, self._calls = self._calls, []
                for act in calls:
                    act()
                work, self._work = self._work, {}
                while work:
                    kind, key = next(iter(work))
                    del work[kind, key]
                    self._handlers[kind](key)
        finally:
            self._work = {**work, **self._work}
            self._is_busy = False
