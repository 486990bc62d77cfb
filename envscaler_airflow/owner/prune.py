"""Remove old runs from a store: for a shell, and for an Airflow task that runs from time to time.

A run is removed in three steps, between which the process may be killed. The event ``prune-intended`` is
created at the run's next number: from then on no owner acts on the run. Then everything but the events is
deleted, and at last the events, the lowest number first and that event last. So a run is either whole, or one
of its events says that it is being removed, and the next call finishes that. If two calls remove the same
run, the one that wrote the last event continues and the other leaves the run alone. The one that continues
waits before it deletes the events: once they are gone a new run may take their names, and must not meet a
delete that the other call has sent.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from envscaler_airflow.errors import BackendError, ProtocolError
from envscaler_airflow.images.locks import LOCK
from envscaler_airflow.owner.reap import YOUNG_S
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import MAX_EVENT_BYTES, Event, RunState
from envscaler_airflow.run.event_bodies import PruneIntended
from envscaler_airflow.store.events import FOLDER, event_name
from envscaler_airflow.store.keys import AT_ONCE, RunKey
from envscaler_airflow.store.lease import LEASE
from envscaler_airflow.store.run import MAX_SPEC_BYTES, RUN, Run, run_prefixes, spec_name
from envscaler_airflow.store.run_store import Store

log = logging.getLogger(__name__)

IN_FLIGHT_S = 180.0
"""How long a delete of another process may still take effect, seconds. Source: the S3 store's four tries of
at most 40 s each, and the pauses between them.
"""
_EVENT = re.compile(r"\d{6,15}\.json")
_DATED = (LEASE, RUN, LOCK)
"""Small files whose dates tell when an owner last acted, or when a run without events was made."""


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run that is old enough to be removed.

    Attributes:
        prefix: Its folder in the store.
        reason: Why it is removed.
        kept: Why it is not removed nevertheless; "" if it is.
        objects: Number of its objects.
        size_bytes: Their total size.
        outputs: Names of the outputs that go with it; a URI of one that is noted elsewhere leads nowhere.
    """

    prefix: str
    reason: str
    kept: str = ""
    objects: int = 0
    size_bytes: int = 0
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the first pass found of a run: last event, why it goes, and which runs it names."""

    run: Run
    number: int
    old: OldRun | None
    named: frozenset[str] = frozenset()
    is_interrupted: bool = False


def _unknown(_key: RunKey) -> None:
    """What a caller knows that asks nothing of Airflow."""


def prune(
    store: Store,
    *,
    older_than_s: float,
    why_gone: Callable[[RunKey], str | None] = _unknown,
    applies_to: Callable[[str], bool] = lambda _prefix: True,
    dry_run: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[OldRun]:
    """Remove each run that ended more than *older_than_s* seconds ago, or whose DAG run is gone; yield each.

    A run is kept if an attempt of it may still run, if its machines are not known to be released, if a newer
    version wrote its events, if its age is unknown, or if a run that stays names its outputs or checkpoints
    as an input. The time is the store's: that of the run's last event, or of its lease if that is later.

    Args:
        store: Run store.
        older_than_s: Seconds without any sign of an owner.
        why_gone: Why a run cannot be cleared any more in Airflow, so that its age does not matter, except for
            its first 15 minutes; None if it can, or if that is unknown.
        applies_to: Whether a run may be removed, by its folder in the store.
        dry_run: If True, only yield the runs.
        sleep: Waits, if the removal of a run was interrupted.

    Raises:
        StoreError: The store cannot be read, so that inputs of runs are unknown; a later call continues.
        BackendError, StoreError: Some runs could not be judged by *why_gone*, or not be removed; after all
            others: the first error.
    """
    faults: list[BackendError] = []

    def gone(key: RunKey) -> str | None:
        try:
            return why_gone(key)
        except BackendError as err:
            log.warning("run=%s is judged by its age alone: %s", key.prefix, err)
            faults.append(err)
            return None

    judged = [
        _judge(Run(store, prefix), older_than_s, gone if applies_to(prefix) else _unknown)
        for prefix in run_prefixes(store)
    ]
    staying = [one for one in judged if one.old is None or one.old.kept or not applies_to(one.run.prefix)]
    named = {prefix: one.run.prefix for one in staying for prefix in one.named}
    interrupted: list[_Removal] = []
    for one in judged:
        if one.old is None or not applies_to(one.run.prefix):
            continue
        found = _tried(partial(_begin, one, one.old, named, interrupted, dry_run=dry_run), one.run, faults)
        if found is not None:
            yield found
    if interrupted:
        log.info("waits %.0f s for the last deletes of interrupted removals", IN_FLIGHT_S)
        sleep(IN_FLIGHT_S)
    for removal in interrupted:
        found = _tried(removal.finish, removal.run, faults)
        if found is not None:
            yield found
    if faults:
        raise faults[0]


def _tried(act: Callable[[], OldRun | None], run: Run, faults: list[BackendError]) -> OldRun | None:
    """Return what *act* returns; None if the store fails, which goes to *faults*."""
    try:
        return act()
    except BackendError as err:
        log.warning("run=%s is not removed: %s", run.prefix, err)
        faults.append(err)
        return None


def _begin(
    one: _Judged, old: OldRun, named: Mapping[str, str], interrupted: list[_Removal], *, dry_run: bool
) -> OldRun | None:
    """Remove a run, or say why not; None for an interrupted removal, which *interrupted* gets."""
    if not old.kept and (reader := named.get(old.prefix)) is not None:
        old = replace(old, kept=f"the run {reader} names its outputs or checkpoints")
    old = _measured(one.run, old)
    if old.kept or dry_run:
        return old
    fence = one.run.events.append(one.number, PruneIntended(reason=old.reason))
    if fence is None:
        return replace(old, kept="it changed meanwhile")
    removal = _Removal(one.run, old, fence)
    if one.is_interrupted:
        interrupted.append(removal)
        return None
    return removal.finish()


def _judge(run: Run, older_than_s: float, why_gone: Callable[[RunKey], str | None]) -> _Judged:
    try:
        state = run.events.load()
    except ProtocolError as err:
        log.warning("run=%s left alone: %s", run.prefix, err)
        return _Judged(run, 0, None)
    number = state.number or _last_number(run)
    if state.status == "pruned" or (not state.number and number):
        is_ours = state.status == "pruned" or _is_begun(run, number)
        kept = "" if is_ours else "its first events are missing; remove its folder by hand if nothing runs"
        return _Judged(
            run, number, OldRun(run.prefix, "its removal was interrupted", kept), is_interrupted=True
        )
    age_s = _age_s(run, number)
    reason = _why_old(run, state, age_s, older_than_s, why_gone)
    old = None if reason is None else OldRun(run.prefix, reason, _why_kept(state))
    return _Judged(run, number, old, _named_by(run, state))


def _why_old(
    run: Run,
    state: RunState,
    age_s: float | None,
    older_than_s: float,
    why_gone: Callable[[RunKey], str | None],
) -> str | None:
    if age_s is None:
        log.warning("run=%s left alone: its age is unknown", run.prefix)
        return None
    if age_s >= older_than_s:
        return f"{_past(state)} {duration_text(age_s)} ago"
    if age_s < YOUNG_S:
        return None
    try:
        return why_gone(run.key())
    except ProtocolError:  # the folder contains no key, or another run's
        return None


def _past(state: RunState) -> str:
    words = {"none": "made, and never begun,", "active": "left by its owner", "stopped": "was stopped"}
    return words.get(state.status, state.status)


def _why_kept(state: RunState) -> str:
    """Why a run of that state must stay; "" if it may go."""
    if state.live is not None:
        return f"its attempt {state.live.number} may still run; `envscaler cancel` ends it"
    if any(attempt.unreleased for attempt in state.attempts):
        return "its machines are not known to be released"
    if state.unknown:
        return f"a newer version wrote its event {state.unknown[-1]}"
    return ""


def _age_s(run: Run, number: int) -> float | None:
    """Seconds since the last event and the last renewal of the lease; None if neither has a date."""
    names = [*([event_name(number)] if number else []), *_DATED]
    found = [run.read_dated(name) for name in names]
    dates = [date for one in found if one is not None and (date := one[1]) is not None]
    return run.now() - max(dates) if dates else None


def _named_by(run: Run, state: RunState) -> frozenset[str]:
    """Folders of the runs whose outputs or checkpoints the current generation of *run* names."""
    text = run.read(spec_name(state.spec_hash), max_bytes=MAX_SPEC_BYTES) if state.spec_hash else None
    whole = (text or b"").decode(errors="replace") + (state.begun.restore_from or "")
    root = re.escape(run.store.url.rstrip("/"))
    return frozenset(re.findall(rf"{root}/((?:[^/\s\"]+/){{4}}[^/\s\"]+)/(?:outputs|checkpoints)/", whole))


def _measured(run: Run, old: OldRun) -> OldRun:
    sizes = run.sizes("")
    parts = [name.split("/") for name in sizes]
    outputs = {part[2] for part in parts if part[0] == "outputs" and len(part) > 3}
    total = sum(sizes.values())
    return replace(old, objects=len(sizes), size_bytes=total, outputs=tuple(sorted(outputs)))


def _last_number(run: Run) -> int:
    """Highest number among the stored events, from a listing, since those below may be deleted."""
    names = [name for name in run.children(FOLDER) if _EVENT.fullmatch(name)]
    return max((int(name.removesuffix(".json")) for name in names), default=0)


def _is_begun(run: Run, last: int) -> bool:
    """True if one of the remaining events says that the run is being removed."""
    for number in range(last, 0, -1):
        text = run.read(event_name(number), max_bytes=MAX_EVENT_BYTES)
        if text is None:
            return False
        if isinstance(Event.from_json(text, where=run.uri(event_name(number))).body, PruneIntended):
            return True
    return False


class _OvertakenError(Exception):
    """Another process removes the run, or has removed it."""


@dataclass(frozen=True, slots=True)
class _Removal:
    """A removal that *fence*, the run's last event, has begun."""

    run: Run
    old: OldRun
    fence: Event

    def finish(self) -> OldRun:
        """Delete everything, unless another process does."""
        run = self.run
        try:
            for child in run.children(""):
                if child != FOLDER:
                    _check(run, self.fence)
                    run.delete(child)
                    run.delete_tree(child)
            _remove_events(run, self.fence)
        except _OvertakenError:
            return replace(self.old, kept="another process removes it")
        log.info("run=%s removed: %s", run.prefix, self.old.reason)
        return self.old


def _remove_events(run: Run, fence: Event) -> None:
    last = event_name(fence.number).rpartition("/")[2]
    names = sorted(
        run.children(FOLDER), key=lambda name: (name == last, not name.startswith("snapshot"), name)
    )
    for start in range(0, len(names), AT_ONCE):
        _check(run, fence)
        for name in names[start : start + AT_ONCE]:
            run.delete(f"{FOLDER}/{name}")


def _check(run: Run, fence: Event) -> None:
    """Raise unless *fence* is still the last event: a new run of the same key would begin at number 1."""
    is_ours = run.read(event_name(fence.number), max_bytes=MAX_EVENT_BYTES) == fence.to_json()
    if not is_ours or run.size(event_name(fence.number + 1)) is not None:
        raise _OvertakenError
