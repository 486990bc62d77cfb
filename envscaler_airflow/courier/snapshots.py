"""When code that knows nothing of us is checkpointed: a copy of its folder becomes a local save.

A copy is taken when ``checkpoint.every`` is due and something changed, when the owner asks, and once
more after the command ended. What of the folder counts is :mod:`.settling`'s answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from envscaler_airflow.courier import trees
from envscaler_airflow.courier.copying import copy
from envscaler_airflow.courier.exchange import Exchange
from envscaler_airflow.courier.frozen import SNAPSHOT_EVERY
from envscaler_airflow.courier.settling import QUIET_S, Selection, Settling
from envscaler_airflow.courier.silence import Silence
from envscaler_airflow.courier.site import Site
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.protocol import Control, Ended, Progress, Status, checkpoint_name

SCAN_S = 1.0
"""Between two looks at the tree. Chosen: a fifth of the quiet time."""
HURRY_S = 2 * QUIET_S
"""How long a snapshot that is due waits for quiet; then it takes what is whole at an instant. Chosen."""
ASK_SHARE = 0.8
"""Part of the grace after which an ask is answered all the same. Chosen: the wrapper waits for the whole."""
UNREADABLE_S = 60.0
"""Longest wait at the end for a folder that cannot be read. Chosen: a mount that comes back takes seconds."""
_PART = "snapshot"


class Snapshots:
    """Takes the snapshots of node 0; :meth:`step` is called about every half second.

    On other nodes, without a checkpoint folder, and for code that cooperates it only answers.
    """

    def __init__(self, site: Site, every: Mapping[str, float] | None) -> None:
        """Take one *every* so often (None: the default), and when asked."""
        self._site = site
        self._every = every or SNAPSHOT_EVERY
        self._settling = Settling(site.monotonic)
        self._silence = Silence(site, every)
        self._last_at = site.monotonic()
        self._due_since: float | None = None
        self._next_scan = -float("inf")
        self._is_read = False
        self._unreadable_since: float | None = None
        self._ask: tuple[int, float, str | None] | None = None  # sequence, seen at, fingerprint then
        with suppress(OSError):  # hard links of a copy that was cut short would be foreign names of its files
            site.exchange.remove(site.exchange.checkpoints / ".snapshot")

    def step(self) -> None:
        """Answer what is asked, take what is due. Never raises for a tree that is not ready."""
        state = self._site.memory.state
        if not state.is_laid_out or state.is_final_snapshot_done:
            return
        status = self._status()
        ended = status.ended if status else None
        progress = status.progress if status else Progress()
        asked = self._asked()
        if self._folder() is None or state.failed is not None:
            if ended is None and state.failed is None:
                self._silence.step(None, progress)
            if asked is not None:
                self._answer(asked, None)
            if ended is not None or state.failed is not None:
                self._site.memory.update(is_final_snapshot_done=True)
            return
        now = self._site.monotonic()
        if ended is None and now < self._next_scan:
            return
        self._scan(progress)
        # A large tree is looked at less often, so that looking takes a twentieth of the time at most.
        self._next_scan = now + max(SCAN_S, 20 * (self._site.monotonic() - now))
        if ended is not None:
            if self._unreadable_since is None or now - self._unreadable_since >= UNREADABLE_S:
                self._last(ended)
        elif asked is not None:
            self._for_ask(asked)
        else:
            self._periodic(progress)

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
        """Look at the tree."""
        folder = self._folder()
        self._is_read = False
        if folder is None:
            return
        try:
            self._site.check_place(folder)
            self._settling.look(trees.look(folder, parent=self._site.place(folder)), progress)
        except CheckpointError as err:
            self._site.messages.say(_PART, f"no snapshot: {err}")
        except OSError as err:  # no folder any more, or not ours to read: no end may wait for it for ever
            if self._unreadable_since is None:
                self._unreadable_since = self._site.monotonic()
            self._site.messages.say(_PART, f"no snapshot: {err}")
        else:
            self._unreadable_since = None
            self._is_read = True

    def _selected(self, *, hurry: bool = False) -> Selection:
        """What is whole now; empty when the folder could not be read."""
        return self._settling.select(hurry=hurry) if self._is_read else Selection()

    def _is_new(self, selection: Selection) -> bool:
        return not selection.is_empty and selection.fingerprint != self._site.memory.state.snapshot

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

    def _periodic(self, progress: Progress) -> None:
        if not self._is_due(progress):
            self._due_since = None
            return
        now = self._site.monotonic()
        if self._due_since is None:
            self._due_since = now
        selection = self._selected()
        if not self._is_ready(selection) and now - self._due_since >= HURRY_S:
            selection = self._selected(hurry=True)
        name = self._take(selection) if self._is_ready(selection) else None
        if name is None and self._is_read:
            self._silence.step(selection, progress)

    def _is_ready(self, selection: Selection) -> bool:
        return self._is_new(selection) and not selection.waits_for

    def _for_ask(self, control: Control) -> None:
        """Copy what is new; with ``align: epoch`` wait for the next save, such code's own boundary."""
        now = self._site.monotonic()
        selection = self._selected()
        if self._ask is None or self._ask[0] != control.sequence:
            self._ask = (control.sequence, now, self._settling.fingerprint)
        _, since, first = self._ask
        waits = control.align == "epoch"
        is_late = now - since >= (control.align_timeout_s if waits else ASK_SHARE * control.grace_s)
        if waits and not is_late and self._settling.fingerprint == first:
            return
        if not self._is_ready(selection) and (is_late or now - since >= HURRY_S):
            selection = self._selected(hurry=True)
        if self._is_ready(selection):
            name = self._take(selection)
            if name is not None or is_late:
                self._answer(control, name)
        elif is_late or not self._may_come(selection):
            if selection.waits_for or selection.left_out:
                self._site.messages.say(_PART, f"no snapshot: {waiting_words(selection)}")
            self._answer(control, None)

    def _may_come(self, selection: Selection) -> bool:
        """True when something is being written that a snapshot could hold soon."""
        return bool(selection.waits_for) or any(
            reason.startswith(("changed less", "its saver", "lacks"))
            for reason in selection.left_out.values()
        )

    def _last(self, ended: Ended) -> None:
        if self._is_read:
            died_ns = None if ended.exit_code == 0 else self._site.exchange.wrapper.stat().st_mtime_ns
            selection = self._settling.select(is_over=True, died_ns=died_ns)
            if self._is_new(selection):
                self._take(selection, nobody_writes=True)
            elif selection.is_empty and selection.left_out:
                self._site.messages.say(_PART, f"no last snapshot: {waiting_words(selection)}")
        asked = self._asked()
        if asked is not None:
            self._answer(asked, None)
        self._site.memory.update(is_final_snapshot_done=True)

    # -- how

    def _take(self, selection: Selection, *, nobody_writes: bool = False) -> str | None:
        """Copy; None, and a message, when it did not count."""
        folder = self._folder()
        if folder is None:
            return None
        progress = selection.progress
        exchange, site = self._site.exchange, self._site
        part = exchange.checkpoints / ".snapshot"
        began = site.monotonic()
        try:
            copy(
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
        site.messages.say(_PART, left_out_words(selection))
        self._silence.saved()
        self._last_at, self._due_since = site.monotonic(), None
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
        if selection.links:
            facts["links"] = dict(selection.links)
        return checkpoint_name(who.generation, number, who.attempt), facts

    def _answer(self, control: Control, name: str | None) -> None:
        body = {"sequence": control.sequence, "taken": name is not None, "name": name}
        self._site.exchange.write_json(self._site.exchange.snapshot_done, body)
        self._site.memory.update(answered=control.sequence)


MOST_NAMED = 5
"""Files named in a message. Chosen: a line that a person reads."""


def waiting_words(selection: Selection) -> str:
    """``model.pt: zip without its end, log.txt: written all the time``: what stands in the way, and why."""
    first = [*selection.waits_for, *(path for path in selection.left_out if path not in selection.waits_for)]
    words = [f"{path}: {selection.left_out.get(path, 'is being written')}" for path in first[:MOST_NAMED]]
    more = len(first) - MOST_NAMED
    return ", ".join(words) + (f", and {more} more" if more > 0 else "")


def left_out_words(selection: Selection) -> str | None:
    """What a snapshot that was taken does not hold; None when that is nothing a person need know."""
    odd = {
        path: reason
        for path, reason in selection.left_out.items()
        if reason.startswith(("a link", "its name"))
    }
    odd |= {path: reason for path, reason in selection.left_out.items() if reason == "written all the time"}
    if not odd:
        return None
    return f"left out of the snapshot: {waiting_words(Selection(left_out=odd))}"


def snapshot_facts(exchange: Exchange, name: str) -> Path:
    """Where the facts of snapshot *name* lie: beside it, since its own files may have any name."""
    return exchange.checkpoints / f"{name}.snapshot.json"


def _step_of(name: str, site: Site) -> int:
    return max(site.memory.state.name_step, int(name.split("-")[2]))
