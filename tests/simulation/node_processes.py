"""The processes of a simulated machine: the real sidecar's spool and event, and the real wrapper."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from envscaler_agent import spool as ex
from envscaler_agent.ending import Facts, _schedule
from envscaler_agent.errors import ProtocolError
from envscaler_agent.output import Masker
from envscaler_agent.progress import StallWatch
from envscaler_agent.protocol import Control, Status
from envscaler_agent.wrapper import Options, Wrapper, _Tracker
from envscaler_airflow.sidecar.spool_state import Spool
from envscaler_airflow.store.root import Root
from tests.simulation.kernel import wall

if TYPE_CHECKING:
    from tests.simulation.node import SimNode
    from tests.simulation.training import Training

_T = TypeVar("_T")
UPLOAD_S = 5.0
"""What the wrapper's grace leaves of the machine's. Source: the local backend's."""


class Ending(threading.Event):
    """The sidecar's event: a wait for it gives up control, and its rounds are as far apart as useful."""

    def __init__(self, node: SimNode) -> None:
        """Belong to one sidecar process of *node*."""
        super().__init__()
        self._node = node

    def set(self) -> None:
        """End every round."""
        super().set()
        self._node.stir("watch", "heavy", "snapshots")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the next round, or for *timeout* seconds."""
        node, actor = self._node, self._node.world.current
        assert actor is not None
        if not self.is_set():
            role = actor.name.rpartition("/")[2] if actor.within is not None else "watch"
            seconds = 1.0 if timeout is None else timeout
            node.doze(role, seconds if seconds > 1.0 else max(seconds, node.pace_s(role)))
        return self.is_set()


class SimSpool(Spool):
    """The sidecar's spool on a disk that may be full; what it writes wakes the parts that look for it."""

    def __init__(self, node: SimNode) -> None:
        """Use the folder of *node*."""
        self._node = node
        self._known: dict[Path, tuple[tuple[int, int], Any]] = {}
        self._skip = len(str(node.spool_path)) + 1
        super().__init__(node.spool_path)

    def name(self, path: Path) -> str:
        """*path* below the folder; pathlib takes ten times as long."""
        return str(path)[self._skip :]

    def _unless_known(self, path: Path, read: Callable[[], _T]) -> _T:
        """What *read* returned for the same file before: each is replaced as a whole, so its inode tells."""
        try:
            seen = os.stat(path)  # noqa: PTH116  # pathlib takes twice as long
        except FileNotFoundError:
            return read()
        mark = (seen.st_ino, seen.st_mtime_ns)
        if path not in self._known or self._known[path][0] != mark:
            self._known[path] = (mark, read())
        found: _T = self._known[path][1]
        return found

    def wrapper_status(self) -> Status | None:
        """See :class:`Spool`."""
        return self._unless_known(self.wrapper, super().wrapper_status)

    def current_control(self) -> Control | None:
        """See :class:`Spool`."""
        return self._unless_known(self.control, super().current_control)

    def saves(self) -> bool:
        """See :class:`Spool`."""
        return self._unless_known(self.progress, super().saves)

    def _check_room(self) -> None:
        if self._node.world.now < self._node.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, path: Path, data: bytes) -> None:
        """Replace *path*."""
        self._check_room()
        super().write(path, data)
        node = self._node
        if path == self.control:
            node.heed()
        elif path == self.start:
            node.stir("wrapper", "snapshots", "watch")
        elif path == self.snapshot:
            node.stir("wrapper")
        elif path.name.endswith(".snapshot.json"):
            node.nudge("heavy")
        elif path.name.endswith(".done"):
            node.nudge("watch")
            node.tear(path.name.removesuffix(".done"))

    def made_folder(self, path: Path) -> Root:
        """Make a folder."""
        self._check_room()
        return super().made_folder(path)


class SimWrapper(Wrapper):
    """The real wrapper around a simulated command.

    Attributes:
        code: Exit code, once it has ended.
    """

    def __init__(self, node: SimNode) -> None:
        """Serve *node*."""
        grace_s = max(1.0, node.request.grace_s - UPLOAD_S)
        super().__init__(
            ["train"],
            spool=ex.Spool(node.spool_path),
            options=Options(sampler=False, grace_s=grace_s),
            clock=node._monotonic,
            wall=lambda: wall(node.world),
        )
        self._node = node
        self._command: Training | None = None
        self._tracker: _Tracker | None = None
        self.code: int | None = None

    def live(self) -> None:
        """Run to the end."""
        try:
            self.code = self._live()
        finally:
            self._reporter.close()
        at = int(wall(self._node.world) * 1e9)
        os.utime(self._node.spool_path / "wrapper.json", ns=(at, at))

    def terminate(self) -> None:
        """SIGTERM reaches it."""
        self._signals.append(15)
        self._node.stir("wrapper")

    def hear(self, text: str) -> None:
        """The command prints *text*."""
        if self._tracker is not None and self._tracker.copier.take(text.encode() + b"\n"):
            self._tracker.found = True

    def _live(self) -> int:
        try:
            if not self._await_start():
                return self._end_early("stopped", "asked to stop before the command was started")
        except ex.SetupFailedError as err:
            return self._end_early(err.reason, str(err))
        except ProtocolError as err:
            return self._end_early("setup-failed", str(err))
        node = self._node
        node.start = self._start
        self._forget_earlier_life()
        if node.index == 0:
            self._reporter.set(address=node.rendezvous)
        copier = self._make_copier(Masker([]))
        copier._out_is_open = False
        setup_s = round(self._clock() - self._reporter.origin, 3)
        self._reporter.set(phase="running", setup_s=setup_s)
        stall = StallWatch(self._start.stall_factor, self._start.stall_min_s)
        self._tracker = tracker = _Tracker(copier, stall, self._clock())
        self._command = command = node.start_command()
        while command.code is None:
            if node.world.strikes("crash-wrapper", node.name) and node.world.current is not None:
                node.world.kill(node.world.current, "the kernel ends it for its memory")
            self._tick(command, tracker)  # type: ignore[arg-type]
            if command.code is None:
                self._wait(self._pause_s())
        self._code = command.code
        tracker.found = copier.finish() or tracker.found
        self._look_at_control(self._clock())
        self._look_at_session(self._clock(), tracker)
        return self._finish(copier, command.oom_kills)

    def _wait(self, seconds: float) -> list[int]:
        self._node.doze("wrapper", max(seconds, self._node.pace_s("wrapper")) if seconds < 1.0 else seconds)
        return []

    def _pause_s(self) -> float:
        pause_s = self._node.pace_s("wrapper")
        if self._ask is None:
            return pause_s
        facts = Facts(
            cooperates=self._report.cooperates,
            saving_since=self._saving_since,
            snapshot_pending=self._snapshot_pending(self._ask),
            term_at=self._term_at,
        )
        due = [at - self._clock() for at in _schedule(self._ask, facts) if at > self._clock()]
        return max(0.5, min(pause_s, *due)) if due else pause_s

    def _forward_stop(self) -> None:
        super()._forward_stop()
        self._node.heed()

    def _kill(self, command: Any, number: int) -> None:
        self._node.kill_command(int(number))
