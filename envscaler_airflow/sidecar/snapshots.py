"""Checkpoints of code that does not import the library: a copy of its folder becomes a local save.

A copy is taken when ``checkpoint.every`` is due and something changed, when the owner requests it, and once
more after the command ended. :mod:`.completeness` decides which files of the folder count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from envscaler_agent.protocol import Control, Ended, Progress, Status, checkpoint_name
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.sidecar import saver_layouts
from envscaler_airflow.sidecar.completeness import QUIET_S, Selection, Settling, is_open_for_writing
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.spool_state import Spool
from envscaler_airflow.store.manifests import TreeFile
from envscaler_airflow.store.root import COPY_BYTES, Place, Root

MOST_OPEN = 256
"""Files that are open at once. Chosen: a quarter of the usual limit of a process."""


def copy(
    folder: Path,
    selection: Selection,
    target: Root,
    *,
    parent: Place | None = None,
    between: Callable[[], None],
    is_final: bool = False,
) -> None:
    """Copy *selection* of *folder* to the new folder *target*; *between* runs before each file.

    Up to :data:`MOST_OPEN` files are opened first, so that the copy is of one instant even if they are
    replaced; with more files, each must be the same before and after the copy.

    When *is_final* any more, files are hard-linked where the file system supports it, which takes
    neither time nor space.

    Raises:
        CheckpointError: The files changed during the copy, or there is too little space.
        OSError: The disk is full after all.
    """
    if not is_final:
        _check_room(selection.size, target.path)
    files = selection.files
    is_held = len(files) <= MOST_OPEN
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_open(item, folder, selection)) for item in files] if is_held else []
        if is_held:
            _check_units(folder, selection, parent)
        for index, item in enumerate(files):
            between()
            with contextlib.ExitStack() as own:
                stream = opened[index] if is_held else own.enter_context(_open(item, folder, selection))
                _copy_one(stream, item, target, is_final=is_final)
                if not _is_same(stream, item):
                    raise _changed(folder, item.path)
        if not is_held:
            _check_units(folder, selection, parent)


def _open(item: TreeFile, folder: Path, selection: Selection) -> BufferedReader:
    try:
        stream = item.open()
    except OSError as err:
        raise _changed(folder, f"{item.path}: {err.strerror}") from err
    except CheckpointError as err:
        raise _changed(folder, str(err)) from err
    is_being_written = selection.is_hurried and is_open_for_writing(stream.fileno())
    if not _is_same(stream, item) or (is_being_written and not saver_layouts.is_log(item.path)):
        stream.close()
        raise _changed(folder, item.path)
    return stream


def _is_same(stream: BufferedReader, item: TreeFile) -> bool:
    now = os.fstat(stream.fileno())
    return (now.st_size, now.st_mtime_ns, now.st_ino) == (item.size, item.mtime_ns, item.inode)


def _changed(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder} changed while it was copied: {what}")


def _check_units(folder: Path, selection: Selection, parent: Place | None) -> None:
    """Check that every unit is still the selected one: no file was replaced, added or removed."""
    try:
        now = {
            unit.name: unit.facts for unit in saver_layouts.units(saver_layouts.look(folder, parent=parent))
        }
    except OSError as err:
        raise _changed(folder, str(err)) from err
    for unit in selection.units:
        if now.get(unit.name) != unit.facts:
            raise _changed(folder, unit.name)


def _copy_one(stream: BufferedReader, item: TreeFile, target: Root, *, is_final: bool) -> None:
    if is_final and _link(stream, target, item.path):
        return
    stream.seek(0)
    with target.landing(item.path) as new:
        shutil.copyfileobj(stream, new, COPY_BYTES)
        new.flush()
        os.utime(new.fileno(), ns=(item.mtime_ns, item.mtime_ns))


def _link(stream: BufferedReader, target: Root, path: str) -> bool:
    try:
        target.link(path, stream)
    except OSError:  # another file system, or one without links
        return False
    return True


def _check_room(size: int, folder: Path) -> None:
    """Leave space for the training to write: 5 % of the disk or 1 GiB, the smaller one. Chosen."""
    room = os.statvfs(folder)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    spare = min(total // 20, 1 << 30)
    if free < size + spare:
        raise CheckpointError(
            f"disk full: a snapshot takes {size} bytes, {free} are free and {spare} are left to the training"
        )


DEFAULT_S = 600.0
"""Seconds between snapshots when the spec names no time. Chosen: at most ten minutes of work are lost."""
SLACK = 0.5
"""Fraction of the interval by which a save may be late. Chosen."""
SLACK_LEAST_S = 15.0
"""The minimum of that, seconds. Chosen: quiet time, hurry, and a scan."""
_SILENCE_PART = "silence"
MOST_NAMED = 5


class Silence:
    """Watches node 0 for missing saves; call :meth:`step` while nothing new could be saved."""

    def __init__(self, context: SidecarContext, every: Mapping[str, float] | None) -> None:
        """Expect a save at the interval *every*; None where the spec does not say."""
        self._context = context
        self._every = every
        self._since = context.monotonic()
        self._checkpoints = context.memory.state.checkpoints

    def saved(self) -> None:
        """Record a save: count from now."""
        self._since = self._context.monotonic()
        self._say(None)

    def step(self, selection: Selection | None, progress: Progress) -> None:
        """Report an overdue save; *selection*: the folder's content, None for code that saves by itself."""
        context = self._context
        if context.who.node != 0 or (self._every is None and context.layout.checkpoint_path is None):
            return
        if context.memory.state.checkpoints > self._checkpoints or context.spool.saved(context.who):
            self._checkpoints = context.memory.state.checkpoints
            self.saved()
            return
        due_s = self._due_s()
        if context.monotonic() - self._since < due_s + max(SLACK * due_s, SLACK_LEAST_S):
            return
        self._say(f"no checkpoint after {self._interval(progress)}: {self._reason(selection)}")

    def _due_s(self) -> float:
        return (self._every or {}).get("seconds", DEFAULT_S)

    def _interval(self, progress: Progress) -> str:
        for unit, now in (("steps", progress.step), ("epochs", progress.epoch)):
            if unit in (self._every or {}):
                of = "" if now is not None else f", and no {unit[:-1]} is reported"
                return f"its interval ({self._every[unit]:g} {unit}{of})" if self._every else ""
        return f"its interval of {self._due_s():g} s"

    def _reason(self, selection: Selection | None) -> str:
        path = self._context.layout.checkpoint_path
        if selection is None:
            if self._context.spool.saves():
                return (
                    "the training's Session has saved nothing in that time; it saves at the next "
                    "checkpoint(), with align: epoch at the next end of an epoch"
                )
            return "the training has no Session that saves, and the spec has no checkpoint.path to look at"
        head = f"{path}: "
        waits = list(selection.waits_for) or list(selection.left_out)
        if waits:
            words = [f"{name} ({selection.left_out.get(name, 'is being written')})" for name in waits]
            more = f", and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
            begin = "waits for" if selection.is_empty or selection.waits_for else "nothing new; left out:"
            return f"{head}{begin} {', '.join(words[:MOST_NAMED])}{more}"
        if selection.is_empty:
            return f"{head}has no files; does the training save there?"
        names = [unit.name for unit in selection.units]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"{head}nothing new since the last one ({', '.join(names[:MOST_NAMED])}{more})"

    def _say(self, line: str | None) -> None:
        self._context.messages.say(_SILENCE_PART, line)
        self._context.spool.show_notice(line)


SCAN_S = 1.0
"""Time between two scans of the tree. Chosen: a fifth of the quiet time."""
HURRY_S = 2 * QUIET_S
"""How long a due snapshot waits for quiet; then it takes the files that are complete. Chosen."""
ASK_SHARE = 0.8
"""Part of the grace after which a request is answered anyway. Chosen: the wrapper waits for all of it."""
UNREADABLE_S = 60.0
"""Longest wait at the end for an unreadable folder. Chosen: a mount recovers within seconds."""
_PART = "snapshot"


class Snapshots:
    """Takes the snapshots of node 0; :meth:`step` is called about every half second.

    On other nodes, without a checkpoint folder, and for code that uses ``Session``, it only answers requests.
    """

    def __init__(self, context: SidecarContext, every: Mapping[str, float] | None) -> None:
        """Take one at the interval *every* (None: the default), and on request."""
        self._context = context
        self._every = every or {"seconds": DEFAULT_S}
        self._settling = Settling(context.monotonic)
        self._silence = Silence(context, every)
        self._last_at = context.monotonic()
        self._due_since: float | None = None
        self._next_scan = -float("inf")
        self._is_read = False
        self._unreadable_since: float | None = None
        self._ask: tuple[int, float, str | None] | None = None  # sequence, time seen, fingerprint then
        with suppress(OSError):  # hard links of an interrupted copy would count as foreign names of its files
            context.spool.remove(context.spool.checkpoints / ".snapshot")

    def step(self) -> None:
        """Answer a request, take a due snapshot. Never raises for a tree that is not ready."""
        state = self._context.memory.state
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
                self._context.memory.update(is_final_snapshot_done=True)
            return
        now = self._context.monotonic()
        if ended is None and now < self._next_scan:
            return
        self._scan(progress)
        # A large tree is scanned less often, so that scans take at most a twentieth of the time.
        self._next_scan = now + max(SCAN_S, 20 * (self._context.monotonic() - now))
        if ended is not None:
            if self._unreadable_since is None or now - self._unreadable_since >= UNREADABLE_S:
                self._last(ended)
        elif asked is not None:
            self._for_ask(asked)
        else:
            self._periodic(progress)

    # -- what is known

    def _folder(self) -> Path | None:
        path = self._context.layout.checkpoint_path
        if path is None or self._context.who.node != 0 or self._context.spool.saves():
            return None
        return Path(path)

    def _status(self) -> Status | None:
        try:
            return self._context.spool.wrapper_status()
        except ProtocolError:
            return None  # the main loop reports it

    def _asked(self) -> Control | None:
        control = self._context.spool.current_control()
        if control is None or control.action not in ("checkpoint", "drain"):
            return None
        return control if control.sequence > self._context.memory.state.answered else None

    def _scan(self, progress: Progress) -> None:
        """Scan the tree."""
        folder = self._folder()
        self._is_read = False
        if folder is None:
            return
        try:
            self._context.check_place(folder)
            self._settling.look(saver_layouts.look(folder, parent=self._context.place(folder)), progress)
        except CheckpointError as err:
            self._context.messages.say(_PART, f"no snapshot: {err}")
        except OSError as err:  # folder removed or unreadable: the end must not wait for it for ever
            if self._unreadable_since is None:
                self._unreadable_since = self._context.monotonic()
            self._context.messages.say(_PART, f"no snapshot: {err}")
        else:
            self._unreadable_since = None
            self._is_read = True

    def _selected(self, *, hurry: bool = False) -> Selection:
        """What is complete now; empty when the folder could not be read."""
        return self._settling.select(hurry=hurry) if self._is_read else Selection()

    def _is_new(self, selection: Selection) -> bool:
        return not selection.is_empty and selection.fingerprint != self._context.memory.state.snapshot

    def _is_due(self, progress: Progress) -> bool:
        if self._context.spool.saved(self._context.who):
            return False  # the last one is still being uploaded
        state, every = self._context.memory.state, self._every
        if "steps" in every and progress.step is not None:
            return progress.step - (state.snapshot_step or state.start_step or 0) >= every["steps"]
        if "epochs" in every and progress.epoch is not None:
            return progress.epoch - (state.snapshot_epoch or 0) >= every["epochs"]
        seconds = every.get("seconds", DEFAULT_S)
        return self._context.monotonic() - self._last_at >= seconds

    # -- the three occasions

    def _periodic(self, progress: Progress) -> None:
        if not self._is_due(progress):
            self._due_since = None
            return
        now = self._context.monotonic()
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
        """Copy what is new; with ``align: epoch`` wait for the next save, the boundary of such code."""
        now = self._context.monotonic()
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
                self._context.messages.say(_PART, f"no snapshot: {waiting_words(selection)}")
            self._answer(control, None)

    def _may_come(self, selection: Selection) -> bool:
        """True when a file that a snapshot could soon contain is being written."""
        return bool(selection.waits_for) or any(
            reason.startswith(("changed less", "its saver", "lacks"))
            for reason in selection.left_out.values()
        )

    def _last(self, ended: Ended) -> None:
        if self._is_read:
            died_ns = None if ended.exit_code == 0 else self._context.spool.wrapper.stat().st_mtime_ns
            selection = self._settling.select(is_over=True, died_ns=died_ns)
            if self._is_new(selection):
                self._take(selection, is_final=True)
            elif selection.is_empty and selection.left_out:
                self._context.messages.say(_PART, f"no last snapshot: {waiting_words(selection)}")
        asked = self._asked()
        if asked is not None:
            self._answer(asked, None)
        self._context.memory.update(is_final_snapshot_done=True)

    # -- how

    def _take(self, selection: Selection, *, is_final: bool = False) -> str | None:
        """Copy; None, and a message, when the copy does not count."""
        folder = self._folder()
        if folder is None:
            return None
        progress = selection.progress
        spool, context = self._context.spool, self._context
        part = spool.checkpoints / ".snapshot"
        began = context.monotonic()
        try:
            copy(
                folder,
                selection,
                spool.new_folder(part),
                parent=context.place(folder),
                between=context.between,
                is_final=is_final,
            )
            name, body = self._describe(selection, progress, context.monotonic() - began)
            spool.write_json(snapshot_facts(spool, name), body)
            spool.folder.rename(spool.name(part), spool.name(spool.checkpoints / name))
        except (CheckpointError, OSError) as err:
            context.messages.say(_PART, f"no snapshot: {err}")
            return None
        finally:
            with suppress(OSError):
                spool.remove(part)
        context.messages.say(_PART, left_out_words(selection))
        self._silence.saved()
        self._last_at, self._due_since = context.monotonic(), None
        context.memory.update(
            snapshot=selection.fingerprint,
            snapshot_step=progress.step,
            snapshot_epoch=progress.epoch,
            name_step=max(context.memory.state.name_step, int(name.split("-")[2])),
        )
        return name

    def _describe(
        self, selection: Selection, progress: Progress, save_s: float
    ) -> tuple[str, dict[str, object]]:
        """Name and facts. The name's step grows even for code without steps; the facts may lack one."""
        who, last = self._context.who, self._context.memory.state.name_step
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
        self._context.spool.write_json(self._context.spool.snapshot, body)
        self._context.memory.update(answered=control.sequence)


"""Files named in a message. Chosen: a line that a user reads."""


def waiting_words(selection: Selection) -> str:
    """``model.pt: zip without its end, log.txt: written all the time``: what is waited for, and why."""
    first = [*selection.waits_for, *(path for path in selection.left_out if path not in selection.waits_for)]
    words = [f"{path}: {selection.left_out.get(path, 'is being written')}" for path in first[:MOST_NAMED]]
    more = len(first) - MOST_NAMED
    return ", ".join(words) + (f", and {more} more" if more > 0 else "")


def left_out_words(selection: Selection) -> str | None:
    """What a snapshot does not contain; None when the user need not know it."""
    odd = {
        path: reason
        for path, reason in selection.left_out.items()
        if reason.startswith(("a link", "its name"))
    }
    odd |= {path: reason for path, reason in selection.left_out.items() if reason == "written all the time"}
    if not odd:
        return None
    return f"left out of the snapshot: {waiting_words(Selection(left_out=odd))}"


def snapshot_facts(spool: Spool, name: str) -> Path:
    """Path of the facts of snapshot *name*: beside it, because its own files may have any name."""
    return spool.checkpoints / f"{name}.snapshot.json"
