"""Observe a run and report when its owner is needed. Reads only; never decides, never acts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from envscaler_agent.protocol import Status
from envscaler_airflow.backends.base import QUIET_S, SILENT, AttemptStatus, Backend, ResizesInPlace
from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner.limits import BUDGET_EVERY_S, reserve_usd
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.owner.usage import billed_usd
from envscaler_airflow.run import Event, Handle, NodeStatus, outcome_of
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.run.event_bodies import (
    AttemptIntended,
    Failed,
    NewGeneration,
    NewOwner,
    RequestBody,
    Stopped,
    Succeeded,
)
from envscaler_airflow.run.outcomes import LOST_AFTER_S
from envscaler_airflow.store.run import Run

AGAIN_S = 60.0
"""Seconds before a wake-up is repeated for a reason on which the owner took no action. Chosen: an execution
takes some seconds of a worker, and a kubelet has long answered by then."""


def unless_reporting(observed: AttemptStatus, quiet_s: Mapping[int, float]) -> AttemptStatus:
    """Return *observed* with a node that only the backend misses marked unknown, not lost. Pure.

    A kubelet may be dead or cut off while the containers of its pods keep training: their status in the store
    still changes, and a replacement would leave two pods training.
    """

    def judged(node: NodeStatus) -> NodeStatus:
        is_quiet = quiet_s.get(node.node, 0.0) >= QUIET_S
        is_silent = node.state == "lost" and node.reason == SILENT
        return replace(node, state="unknown") if is_silent and not is_quiet else node

    return AttemptStatus(tuple(judged(node) for node in observed.nodes))


class AttemptWatcher:
    """Watches one attempt, or waits for a timer, for StageTrigger and for a waiting shell."""

    def __init__(
        self,
        *,
        run: Run,
        backend: Backend,
        watching: Watching,
        monotonic: Callable[[], float] = time.monotonic,
        poll_s: float = 0.0,
    ) -> None:
        """Begin at *watching*; ages count from now, by *monotonic*.

        A bill runs up to the run's time if the provider does not report its own. *poll_s* is the time between
        two polls.
        """
        self._run = run
        self._backend = backend
        self._watching = watching
        self._monotonic = monotonic
        self._check_s = max(BUDGET_EVERY_S, poll_s)
        self._began = monotonic()
        self._number = watching.number
        self._sequences: dict[int, tuple[int, int]] = {}
        self._reported: dict[int, float] = {}
        self._last_sign = self._began
        self._read_at, self._blind_s, self._gap_s = self._began, 0.0, 0.0
        self._has_sign = self._has_read = self._is_blind = False
        self._request: Wake | None = None
        self._ages: Mapping[str, float] | None = None
        self._billed = self._began
        self.statuses: dict[int, Status] = {}
        """The last status of each node, for display."""
        self.observed: AttemptStatus | None = None
        """The backend's last report of the attempt, for display; None before the first answer."""

    def poll(self) -> Wake | None:
        """Return why the owner is needed, or None. Blocks on I/O: call it in a thread.

        A reason on which the owner took no action before is repeated after :data:`AGAIN_S`.

        Raises:
            StoreError: The store cannot be read; nothing is known. Try again.
        """
        now = self._monotonic()
        self._leave_out_blindness(now)
        self._is_blind = True  # until everything was read
        wake = self._needed()
        self._read_at, self._gap_s, self._is_blind = now, 0.0, False
        return wake

    def _leave_out_blindness(self, now: float) -> None:
        """Exclude periods when the store was unreadable: the node may have been unable to report too."""
        if self._is_blind:
            more = now - self._read_at - self._gap_s
            self._last_sign += more
            self._reported = {node: at + more for node, at in self._reported.items()}
            self._blind_s += more
            self._gap_s += more

    def _needed(self) -> Wake | None:
        if self._ages is None:
            self._ages = self._run.lease.known().ages
        elapsed = self._monotonic() - self._began
        is_paused = elapsed < self._watching.pause_s
        wake = self._new_events() or self._request
        if wake is not None and is_paused and wake.kind != "superseded":
            self._request, wake = wake, None  # the owner gets it once the pause is over
        if wake is not None:
            self._request = None
            return wake
        if self._watching.backoff_s is not None:
            return Wake("backoff") if elapsed >= self._watching.backoff_s and not is_paused else None
        if self._watching.handle is None:
            return None if is_paused else Wake("status", detail="nothing to watch")
        return self._of_attempt(self._watching.handle, elapsed, is_paused=is_paused)

    def _of_attempt(self, handle: Handle, elapsed: float, *, is_paused: bool) -> Wake | None:
        """Observe the attempt even during a pause, so that its ages continue from what was seen."""
        wakes = self._attempt(handle)
        if is_paused:
            return None
        quiet = self._watching.answered if elapsed < AGAIN_S else ()
        first = next((one for one in wakes if one.detail not in quiet), None)
        seen, silent = tuple(one.detail for one in wakes), max((one.silent_s for one in wakes), default=0.0)
        if first is None and self._watching.pause_s:
            first = Wake("status", detail="tried again, since there was no answer")
        return None if first is None else replace(first, seen=seen, silent_s=silent, quiet_s=self._quiet())

    def ages(self) -> dict[str, float]:
        """Return how long each watched state has lasted, over all watchers; the next continues from it."""
        found = {}
        if self._watching.age:
            found[self._watching.age] = self._lasted_s()
        if self._silent_s() >= BUDGET_EVERY_S:
            found[self._silence] = self._silent_s()
        return found | {self._quietness(node): seconds for node, seconds in self._quiet().items()}

    def _quiet(self) -> dict[int, float]:
        """Return seconds since the status of each node changed, over all watchers; only long durations."""
        now, found = self._monotonic(), {}
        for node in range(self._watching.nodes if self._watching.attempt else 0):
            if node in self._reported:
                seconds = now - self._reported[node]
            else:
                before = (self._ages or {}).get(self._quietness(node), 0.0)
                seconds = before + now - self._began - self._blind_s
            if seconds >= BUDGET_EVERY_S:
                found[node] = seconds
        return found

    def _quietness(self, node: int) -> str:
        return f"quiet-g{self._watching.generation}-a{self._watching.attempt}-n{node}"

    @property
    def _silence(self) -> str:
        return f"silent-g{self._watching.generation}-a{self._watching.attempt}"

    def _lasted_s(self) -> float:
        before = (self._ages or {}).get(self._watching.age, 0.0)
        return before + self._monotonic() - self._began - self._blind_s

    def _silent_s(self) -> float:
        before = 0.0 if self._has_sign else (self._ages or {}).get(self._silence, 0.0)
        return before + self._monotonic() - self._last_sign

    def _new_events(self) -> Wake | None:
        for event in self._run.events.read(after=self._number):
            self._number = event.number
            if isinstance(event.body, RequestBody):
                return Wake("request", detail=event.type)
            if self._is_newer(event):
                return Wake("superseded", detail=f"event {event.number}: {event.type}")
        return None

    def _is_newer(self, event: Event) -> bool:
        match event.body:
            case NewGeneration() | NewOwner() | Succeeded() | Failed() | Stopped():
                return True
            case AttemptIntended(generation=generation, attempt=attempt):
                return (generation, attempt) != (self._watching.generation, self._watching.attempt)
            case _:
                return False

    def _attempt(self, handle: Handle) -> list[Wake]:
        """Return every reason for which the owner may be needed now, the most urgent first."""
        self._read_statuses()
        details = []
        try:
            self.observed = observed = unless_reporting(self._backend.observe(handle), self._quiet())
            is_known = all(node.state != "unknown" for node in observed.nodes)
            details = self._details(handle, observed)
        except BackendError:
            is_known = False
        if is_known:
            self._note_sign()
        wakes = [Wake("status", detail=detail) for detail in details]
        wakes += [*self._from_statuses(is_known=is_known), *self._over_budget(handle)]
        release_s = self._watching.release_after_s
        if release_s is not None and self._monotonic() - self._began >= release_s:
            wakes.append(Wake("status", detail="an earlier attempt is not released"))
        return [*self._overdue(), *wakes]

    def _details(self, handle: Handle, observed: AttemptStatus) -> list[str]:
        """Return the reasons in the backend's report for which the owner may be needed."""
        nodes = observed.nodes
        reasons = {
            "the attempt ended": observed.is_over,
            "no capacity": any(
                node.state in ("pending", "starting") and outcome_of(node.reason).never_starts
                for node in nodes
            ),
            "a node is lost": any(node.state == "lost" for node in nodes),
            "a part of it has failed": any(node.reason == "unneeded" for node in nodes),
        }
        found = [detail for detail, is_so in reasons.items() if is_so]
        return [*found, "the change in place is over"] if self._has_changed(handle, observed) else found

    def _note_sign(self) -> None:
        self._last_sign, self._has_sign = self._monotonic(), True

    def _has_changed(self, handle: Handle, observed: AttemptStatus) -> bool:
        """Return True if the awaited change is done or cannot be done."""
        if self._watching.changing == "resize" and isinstance(self._backend, ResizesInPlace):
            return self._backend.resized(handle) != "going"
        is_rescale = self._watching.changing == "rescale"
        return is_rescale and all(node.state == "running" for node in observed.nodes)

    def _read_statuses(self) -> None:
        attempt = (self._watching.generation, self._watching.attempt)
        for node in range(self._watching.nodes):
            status = self._run.status(attempt, node)
            if status is None:
                continue
            now = (status.claim, status.sequence)
            if self._sequences.get(node, None if self._has_read else now) != now:
                self._note_sign()  # a status present at the first poll may be old
                self._reported[node] = self._monotonic()
            self._sequences[node] = now
            self.statuses[node] = status
        self._has_read = True

    def _from_statuses(self, *, is_known: bool) -> list[Wake]:
        known, found = self.statuses.values(), []
        if not is_known and len(known) == self._watching.nodes and all(s.phase == "ended" for s in known):
            found.append(Wake("status", detail="every node said that it ended"))
        if not self._watching.stopping and any(status.health == "stalled" for status in known):
            found.append(Wake("status", detail="stalled"))
        silent = self._silent_s()
        if silent >= LOST_AFTER_S:
            found.append(Wake("silent", silent_s=silent, detail="neither backend nor nodes have reported"))
        return found

    def _overdue(self) -> list[Wake]:
        after = self._watching.overdue_after_s
        return [Wake("overdue", detail="overdue")] if after is not None and self._lasted_s() >= after else []

    def _over_budget(self, handle: Handle) -> list[Wake]:
        """Check the budget here too: an attempt may run for days between two executions of the owner."""
        left, now = self._watching.usd_left, self._monotonic()
        if left is None or not self._watching.spans or now - self._billed < BUDGET_EVERY_S:
            return []
        self._billed = now
        watching, at = self._watching, self._run.now()
        try:
            intervals = self._backend.usage(handle)
        except BackendError:
            nodes = range(watching.nodes)
            intervals = tuple(UsageInterval(node, at - (now - self._began), at) for node in nodes)  # at least
        usd = billed_usd(watching.spans, intervals, started_at=watching.started_at, handle=handle, now=at)
        more = reserve_usd(
            watching.spans[-1].allocation,
            check_s=self._check_s,
            checkpoint_s=watching.checkpoint_s,
            status=self.statuses.get(0),
        )
        is_spent = usd is not None and more is not None and usd + more >= left
        return [Wake("status", detail="the budget is spent", check_s=self._check_s)] if is_spent else []
