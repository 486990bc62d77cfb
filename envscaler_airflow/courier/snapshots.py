"""When code that knows nothing of us is checkpointed: a copy of its folder becomes a local save.

A copy is taken when ``checkpoint.every`` is due and something changed, when the owner asks, and once
more after the command ended. Before it, the tree must have been quiet for :data:`QUIET_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from envscaler_airflow.courier import layouts
from envscaler_airflow.courier.exchange import Exchange
from envscaler_airflow.courier.frozen import SNAPSHOT_EVERY
from envscaler_airflow.courier.layouts import Selection
from envscaler_airflow.courier.site import Site
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.protocol import Control, Ended, Progress, Status, checkpoint_name

QUIET_S = 5.0
"""Seconds without a change before a tree is copied. Chosen: writers flush more often while they write."""
SCAN_S = 1.0
"""Between two looks at the tree. Chosen: a fifth of the quiet time."""
ASK_SHARE = 0.8
"""Part of the grace after which an ask is answered all the same. Chosen: the wrapper waits for the whole."""
UNREADABLE_S = 60.0
"""Longest wait at the end for a folder that cannot be read. Chosen: a mount that comes back takes seconds."""
_PART = "snapshot"


class QuietWatch:
    """For how long a tree has been the same, by the watcher's own clock, and the progress then."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Begin without knowing anything."""
        self._monotonic = monotonic
        self._fingerprint: str | None = None
        self._since = 0.0
        self._progress = Progress()

    def look(self, fingerprint: str, progress: Progress) -> tuple[float, Progress]:
        """Seconds since *fingerprint* was first seen, without another in between, and the progress then.

        What the training wrote, it wrote before it was seen: a later step would claim too much.
        """
        now = self._monotonic()
        if fingerprint != self._fingerprint:
            self._fingerprint, self._since, self._progress = fingerprint, now, progress
        return now - self._since, self._progress


class Snapshots:
    """Takes the snapshots of node 0; :meth:`step` is called about every half second.

    On other nodes, without a checkpoint folder, and for code that cooperates it only answers.
    """

    def __init__(self, site: Site, every: Mapping[str, float] | None) -> None:
        """Take one *every* so often (None: the default), and when asked."""
        self._site = site
        self._every = every or SNAPSHOT_EVERY
        self._quiet = QuietWatch(site.monotonic)
        self._last_at = site.monotonic()
        self._next_scan = -float("inf")
        self._found: Selection | None = None
        self._unreadable_since: float | None = None
        self._quiet_s = 0.0
        self._progress = Progress()
        self._ask: tuple[int, float, str | None] | None = None  # sequence, seen at, fingerprint then

    def step(self) -> None:
        """Answer what is asked, take what is due. Never raises for a tree that is not ready."""
        state = self._site.memory.state
        if not state.is_laid_out or state.is_final_snapshot_done:
            return
        status = self._status()
        ended = status.ended if status else None
        asked = self._asked()
        if self._folder() is None or state.failed is not None:
            if asked is not None:
                self._answer(asked, None)
            if ended is not None or state.failed is not None:
                self._site.memory.update(is_final_snapshot_done=True)
            return
        now = self._site.monotonic()
        if ended is None and now < self._next_scan:
            return
        progress = status.progress if status else Progress()
        self._scan(progress)
        # A large tree is looked at less often, so that looking takes a twentieth of the time at most.
        self._next_scan = now + max(SCAN_S, 20 * (self._site.monotonic() - now))
        if ended is not None:
            if self._unreadable_since is None or now - self._unreadable_since >= UNREADABLE_S:
                self._last(ended)
        elif asked is not None:
            self._for_ask(asked)
        elif self._is_due(progress):
            self._periodic()

    # -- what is known

    def _folder(self) -> Path | None:
        path = self._site.layout.checkpoint_path
        if path is None or self._site.who.node != 0 or self._site.exchange.saves():
            return None
        return Path(path)

    def _status(self) -> Status | None:
        try:
            return self._site.exchange.wrapper_status()
        except ProtocolError:
            return None  # the main loop says so

    def _asked(self) -> Control | None:
        control = self._site.exchange.current_control()
        if control is None or control.action not in ("checkpoint", "leave"):
            return None
        return control if control.sequence > self._site.memory.state.answered else None

    def _scan(self, progress: Progress) -> None:
        """Look at the tree: what is in no snapshot yet, and for how long it has been quiet."""
        folder = self._folder()
        self._found = None
        try:
            if folder is not None:
                self._site.check_place(folder)
            selection = layouts.select(folder, parent=self._site.place(folder)) if folder else None
        except CheckpointError as err:
            self._site.messages.say(_PART, f"no snapshot: {err}")
            return
        except OSError as err:  # no folder any more, or not ours to read: no end may wait for it for ever
            if self._unreadable_since is None:
                self._unreadable_since = self._site.monotonic()
            self._site.messages.say(_PART, f"no snapshot: {err}")
            return
        self._unreadable_since = None
        if selection is not None:
            self._quiet_s, self._progress = self._quiet.look(selection.fingerprint, progress)
            if selection.fingerprint != self._site.memory.state.snapshot:
                self._found = selection

    @property
    def _is_quiet(self) -> bool:
        return self._found is not None and self._quiet_s >= QUIET_S

    def _is_due(self, progress: Progress) -> bool:
        if self._site.exchange.saved(self._site.who):
            return False  # the last one is still being uploaded
        state, every = self._site.memory.state, self._every
        if "steps" in every and progress.step is not None:
            return progress.step - (state.snapshot_step or state.start_step or 0) >= every["steps"]
        if "epochs" in every and progress.epoch is not None:
            return progress.epoch - (state.snapshot_epoch or 0) >= every["epochs"]
        seconds = every.get("seconds", SNAPSHOT_EVERY["seconds"])
        return self._site.monotonic() - self._last_at >= seconds

    # -- the three occasions

    def _periodic(self) -> None:
        if self._found is not None and self._is_quiet:
            self._take(self._found)

    def _for_ask(self, control: Control) -> None:
        """Copy what is new; with ``align: epoch`` wait for the next save, such code's own boundary."""
        found, now = self._found, self._site.monotonic()
        fingerprint = found.fingerprint if found else None
        if self._ask is None or self._ask[0] != control.sequence:
            self._ask = (control.sequence, now, fingerprint)
        _, since, first = self._ask
        waits = control.align == "epoch"
        is_late = now - since >= (control.align_timeout_s if waits else ASK_SHARE * control.grace_s)
        if waits and fingerprint == first and not is_late:
            return
        if found is None:
            self._answer(control, None)
        elif self._is_quiet:
            name = self._take(found)
            if name is not None or is_late:
                self._answer(control, name)
        elif is_late:
            self._site.messages.say(_PART, f"no snapshot: the tree was not quiet for {QUIET_S:g} s")
            self._answer(control, None)

    def _last(self, ended: Ended) -> None:
        if self._found is not None:
            if self._may_be_torn(ended, self._found):
                reason = f"it was written less than {QUIET_S:g} s before the command died"
                self._site.messages.say(_PART, f"no last snapshot: {reason}")
            else:
                self._take(self._found, nobody_writes=True)
        asked = self._asked()
        if asked is not None:
            self._answer(asked, None)
        self._site.memory.update(is_final_snapshot_done=True)

    # -- how

    def _may_be_torn(self, ended: Ended, selection: Selection) -> bool:
        """One that was killed or failed may have been writing; known layouts say when they are whole."""
        if ended.exit_code == 0 or selection.step is not None:
            return False
        died_ns = self._site.exchange.wrapper.stat().st_mtime_ns
        return selection.newest_mtime_ns > died_ns - QUIET_S * 1e9

    def _take(self, selection: Selection, *, nobody_writes: bool = False) -> str | None:
        """Copy; None, and a message, when it did not count."""
        folder = self._folder()
        if folder is None:
            return None
        progress = self._progress
        exchange, site = self._site.exchange, self._site
        part = exchange.checkpoints / ".snapshot"
        began = site.monotonic()
        try:
            layouts.copy(
                folder,
                selection,
                exchange.new_folder(part),
                parent=site.place(folder),
                between=site.between,
                nobody_writes=nobody_writes,
            )
            name, body = self._describe(selection, progress, site.monotonic() - began)
            exchange.write_json(snapshot_facts(exchange, name), body)
            exchange.folder.rename(exchange.name(part), exchange.name(exchange.checkpoints / name))
        except (CheckpointError, OSError) as err:
            site.messages.say(_PART, f"no snapshot: {err}")
            return None
        finally:
            with suppress(OSError):
                exchange.remove(part)
        site.messages.say(_PART, None)
        self._last_at = site.monotonic()
        site.memory.update(
            snapshot=selection.fingerprint,
            snapshot_step=progress.step,
            snapshot_epoch=progress.epoch,
            name_step=_step_of(name, site),
        )
        return name

    def _describe(
        self, selection: Selection, progress: Progress, save_s: float
    ) -> tuple[str, dict[str, object]]:
        """Name and facts. The name's step grows even where nobody counts; the facts hold what is known."""
        who, last = self._site.who, self._site.memory.state.name_step
        step = selection.step if selection.step is not None else progress.step
        number = step if step is not None and step > last else last + 1
        is_same_step = step is not None and step == progress.step
        facts: dict[str, object] = {
            "step": step,
            "epoch": progress.epoch if is_same_step else None,
            "samples": progress.samples if is_same_step else None,
            "save_s": save_s,
        }
        return checkpoint_name(who.generation, number, who.attempt), facts

    def _answer(self, control: Control, name: str | None) -> None:
        body = {"sequence": control.sequence, "taken": name is not None, "name": name}
        self._site.exchange.write_json(self._site.exchange.snapshot_done, body)
        self._site.memory.update(answered=control.sequence)


def snapshot_facts(exchange: Exchange, name: str) -> Path:
    """Where the facts of snapshot *name* lie: beside it, since its own files may have any name."""
    return exchange.checkpoints / f"{name}.snapshot.json"


def _step_of(name: str, site: Site) -> int:
    return max(site.memory.state.name_step, int(name.split("-")[2]))
