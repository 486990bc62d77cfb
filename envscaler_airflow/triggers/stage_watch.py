"""What StageTrigger does in threads: observe the run, renew its lease, read its log.

Separate from the trigger itself, so that loading the trigger into the triggerer's event loop stays cheap.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from envscaler_agent.protocol import Status
from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.hooks.settings import open_backend, store_place, with_shared_watch
from envscaler_airflow.owner.foreground import close_behind
from envscaler_airflow.owner.request import kill_quietly
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.run.narration import transfer_text
from envscaler_airflow.store import Run
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.lease import SensorWatch
from envscaler_airflow.store.logs import Shown, Tail, labelled

LOG_BYTES_PER_LOOK = 64 << 10
"""Most of the training's output shown at each poll, bytes. Chosen: 45 MB of task log an hour at most."""


TRANSFER_S = 60.0
"""How long a transfer lasts before the log reports its progress, and between two such lines, seconds. Chosen:
users need no progress of a shorter one."""


class TransferNews:
    """Progress of the nodes' long transfers, from time to time."""

    def __init__(self, *, nodes: int, monotonic: Callable[[], float]) -> None:
        """Start without any observation."""
        self._nodes, self._monotonic = nodes, monotonic
        self._seen: dict[int, tuple[str, float, str]] = {}

    def lines(self, statuses: Mapping[int, Status]) -> list[str]:
        """Return a line for each node with a long transfer that progressed since its last line."""
        found, now = [], self._monotonic()
        for node, status in statuses.items():
            text = transfer_text(status)
            what = text.rpartition(":")[0]
            before, since, shown = self._seen.get(node, ("", now, ""))
            if what != before:
                self._seen[node] = (what, now, text)
            elif text != shown and now - since >= TRANSFER_S:
                self._seen[node] = (what, now, text)
                found += labelled(Shown(node, [text]), nodes=self._nodes)
        return found


class StageWatcher:
    """Observes one run on behalf of a trigger."""

    def __init__(
        self,
        run: Run,
        watching: Watching,
        *,
        compute: str,
        holder: str,
        monotonic: Callable[[], float] = time.monotonic,
        poll_s: float = 0.0,
    ) -> None:
        """Begin at *watching*, and poll every *poll_s* seconds.

        Raises:
            SpecError: This store does not contain the run: it is not the operator's store.
        """
        if run.size(event_name(watching.number)) is None:
            raise SpecError(
                f"{run.url}: the triggerer does not see this run; operator, triggerer, API server "
                "and machines must all see the same [envscaler] store_url"
            )
        self._run, self._holder = run, holder
        self._nodes = watching.nodes if watching.attempt else 0
        self._waits = run.lease.known().waits
        self._is_begun = False
        self._logged = frozenset({self._waits} - {""})
        backend, attempt = with_shared_watch(open_backend(compute)), (watching.generation, watching.attempt)
        self._watch = AttemptWatcher(
            run=run, backend=backend, watching=watching, monotonic=monotonic, poll_s=poll_s
        )
        self._tail = Tail(run, attempt=attempt, nodes=self._nodes, holder=holder, monotonic=monotonic)
        self._transfers = TransferNews(nodes=self._nodes, monotonic=monotonic)
        self._sensor: SensorWatch | None = None
        if watching.attempt and _is_scaled(run):
            self._sensor = SensorWatch(run, monotonic=monotonic)

    @classmethod
    def open(
        cls,
        prefix: str,
        watching: Mapping[str, Any],
        *,
        compute: str,
        holder: str,
        store_url: str | None,
        store_conn_id: str | None,
        poll_s: float = 0.0,
    ) -> StageWatcher:
        """Observe a run with settings and connections of this process."""
        store = store_place(store_url, store_conn_id).open()
        run, watched = Run(store, prefix), Watching.from_dict(watching)
        return cls(run, watched, compute=compute, holder=holder, poll_s=poll_s)

    def once(self, say: Callable[[str], object]) -> dict[str, Any] | None:
        """Log new lines of the training; return the :class:`Wake` that the owner is needed for, if any.

        The lines come before anything else is tried: they count as shown once they are read.

        Raises:
            StoreError: The store cannot be read or written; nothing is known.
        """
        for shown in self._tail.read(budget=LOG_BYTES_PER_LOOK, ages=self._ages()):
            for line in labelled(shown, nodes=self._nodes):
                say(line)
        if self._sensor is not None and (news := self._sensor.news()) is not None:
            say(news)
        wake: Wake | None = self._watch.poll()
        self._is_begun = True
        if wake is not None:
            self._keep_ages()
        self._tell_waits(say)
        for line in self._transfers.lines(self._watch.statuses):
            say(line)
        return wake.to_dict() if wake else None

    def _keep_ages(self) -> None:
        """Keep ages for the next watcher, however soon the owner was needed."""
        with contextlib.suppress(StoreError):
            self._run.lease.renew(holder=self._holder, ages=self._watch.ages())

    def _ages(self) -> Mapping[str, float] | None:
        """Return the ages for the next watcher; None, which keeps the stored ones, before the first poll."""
        return self._watch.ages() if self._is_begun else None

    def _tell_waits(self, say: Callable[[str], object]) -> None:
        """Log what the machines wait for, once per change; put it in the lease for ``envscaler status``.

        An image pull that fails and is retried reports two texts in turn: each is logged once. If the store
        cannot be written now, the next poll tries again.
        """
        seen = self._watch.observed
        if seen is None:
            return
        waits = seen.waits
        if waits and waits not in self._logged:
            say(f"waits: {waits}")
            self._logged = (self._logged | {waits}) - {""}
        elif self._logged and "" not in self._logged and all(node.state == "running" for node in seen.nodes):
            say("waits no longer")
            self._logged |= {""}
        if waits != self._waits:
            with contextlib.suppress(StoreError):
                self._run.lease.renew(holder=self._holder, waits=waits)
                self._waits = waits


def _is_scaled(run: Run) -> bool:
    """Return True if the frozen spec asks for scaling; False if that is unknown.

    The spec is not parsed: a triggerer would keep a thousand of them, and its garbage collector visit each.
    """
    try:
        return run.document(run.events.load().spec_hash).get("scaling") is not None
    except ProtocolError:
        return False


def kill(
    prefix: str,
    *,
    ti_id: str,
    try_number: int | None,
    compute: str,
    store_url: str | None,
    store_conn_id: str | None,
) -> bool:
    """Ask the attempt to save and stop while that try owns the run; returns whether it was asked.

    Its end is recorded in a background thread: nothing else records it, since no execution follows.
    """
    run, backend = Run(store_place(store_url, store_conn_id).open(), prefix), open_backend(compute)
    reason = "the task was marked or deleted while it was deferred"
    asked = kill_quietly(run, backend, ti_id=ti_id, try_number=try_number, reason=reason)
    close_behind(run, backend, ti_id=ti_id, try_number=try_number)
    return asked
