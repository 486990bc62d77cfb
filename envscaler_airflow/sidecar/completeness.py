"""What is complete in a training's folder now, and what a snapshot of it waits for.

A unit with its saver's mark counts immediately. Any other unit counts when its files have not changed for
:data:`QUIET_S`. A file that is saved more often counts, once a snapshot is overdue, in three cases: a rename
puts it in place, its format shows that it is complete, or its writer rewrites it from the start and closes
it. All such files are then copied at one instant, as a kill would leave them. Any other file that is
written all the time is a log, and is left out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import lzma
import pickletools  # nosec B403  # reads opcodes, runs none
import signal
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import PurePosixPath
from typing import IO, Any, cast

from envscaler_agent.protocol import Progress
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.sidecar import saver_layouts
from envscaler_airflow.sidecar import saver_layouts as trees
from envscaler_airflow.sidecar.saver_layouts import Tree, Unit
from envscaler_airflow.store.manifests import ChangedError, TreeFile

_MAX_HEADER_BYTES = 100 << 20  # source: safetensors, MAX_HEADER_SIZE
_MAX_TEXT_BYTES = 1 << 20
"""Largest text and pickle that is searched for a step. Chosen: without tensors they are small."""
_MAX_LIST_BYTES = 1 << 22
"""Largest list of a zip's members that is read. Chosen: some 50,000 tensors."""
_BOUNDED = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
"""Compressions that zipfile unpacks in parts. It unpacks bzip2 and LZMA to their full size before it checks
the declared one. PyTorch and numpy use none of these."""
_ZIP = b"PK\x03\x04"
HEAD_BYTES = 1024
"""Chosen: pickles and JSON texts state their length or item count within it; a log never changes it."""
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_HEAD_BYTES = 64
"""More than any superblock has before its end-of-file address."""
STEP_KEYS = ("global_step", "step", "iteration", "iter", "steps", "n_iter", "epoch")
"""Names under which training code stores its step. Source: Lightning, transformers, detectron2, mmengine."""
_UNREADABLE = (
    OSError,
    CheckpointError,
    ValueError,
    ArithmeticError,
    EOFError,
    lzma.LZMAError,
    NotImplementedError,
    RuntimeError,
    RecursionError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, its decompressors, pickletools and json raise for a torn or encrypted file, or one of another
format.
"""


def has_end(item: TreeFile) -> bool:
    """True when the file ends where its format says that it ends.

    Zip, HDF5, safetensors, a JSON object or array, and a pickle. A part of such a file never passes as
    complete.
    """
    try:
        with item.open(shares_names=True) as stream:
            head = stream.read(HEAD_BYTES)
            if head[:4] == _ZIP or item.path.endswith(".safetensors"):
                return _torn(item, head, stream) is None
            if head.startswith(_HDF5):
                return _hdf5_has_end(head, item.size) is True
            if item.size > _MAX_TEXT_BYTES:
                return False
            stream.seek(0)
            return _is_whole_text_or_pickle(stream.read(_MAX_TEXT_BYTES))
    except (OSError, CheckpointError):
        return False


def _is_whole_text_or_pickle(data: bytes) -> bool:
    try:
        if data[:1] != b"\x80":
            return data.lstrip()[:1] in (b"{", b"[") and json.loads(data) is not None
        end = 0
        for _, _, at in pickletools.genops(data):
            end = at or 0
    except (ValueError, RecursionError):
        return False
    return end == len(data) - 1


def _hdf5_has_end(head: bytes, size: int) -> bool | None:
    """Whether the file of *size* bytes ends where its superblock says; None for an unknown version."""
    version = head[8] if len(head) >= _HDF5_HEAD_BYTES else -1
    if version in (0, 1):
        width, at = head[13], 24 + 4 * version + 2 * head[13]
    elif version in (2, 3):
        width, at = head[9], 12 + 2 * head[9]
    else:
        return False if version < 0 else None
    is_being_written = version == 3 and bool(head[11] & 1)
    return int.from_bytes(head[at : at + width], "little") == size and not is_being_written


def first_look(item: TreeFile) -> tuple[bytes, str | None]:
    """Its first bytes, and why it is incomplete; None when its format does not show that.

    The first bytes distinguish a file that is rewritten from one that is appended to.
    """
    try:
        with item.open(shares_names=True) as stream:
            head = stream.read(HEAD_BYTES)
            return head, _torn(item, head, stream)
    except (FileNotFoundError, ChangedError):
        return b"", f"{item.path}: vanished"


def _torn(item: TreeFile, head: bytes, stream: IO[bytes]) -> str | None:
    if head[:4] == _ZIP:
        return None if zipfile.is_zipfile(stream) else f"{item.path}: zip without its end"
    if head.startswith(_HDF5):
        is_torn = _hdf5_has_end(head, item.size) is False
        return f"{item.path}: HDF5 without its end" if is_torn else None
    if item.path.endswith(".safetensors"):
        stream.seek(8)
        return _torn_safetensors(item, head[:8], stream)
    return None


def _torn_safetensors(item: TreeFile, head: bytes, stream: IO[bytes]) -> str | None:
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(item.size, _MAX_HEADER_BYTES):
        return f"{item.path}: shorter than its header says"
    try:
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return f"{item.path}: its header is torn"
    return None if item.size == expected else f"{item.path}: {item.size} bytes, its header says {expected}"


def steps_in(item: TreeFile) -> frozenset[int]:
    """Integers that the file stores under a name for steps; empty when it has none that can be read.

    What precedes an unreadable part counts: joblib puts raw arrays between a pickle's opcodes.
    """
    found: set[int] = set()
    with suppress(*_UNREADABLE), item.open(shares_names=True) as stream:
        if stream.read(4) == _ZIP:
            found.update(_in_zip(stream))
        elif item.size <= _MAX_TEXT_BYTES:
            stream.seek(0)
            found.update(_in_bytes(stream.read(_MAX_TEXT_BYTES)))
    return frozenset(found)


def _in_zip(stream: IO[bytes]) -> Iterator[int]:
    with zipfile.ZipFile(cast("IO[bytes]", _Frugal(stream))) as archive:
        for member in archive.infolist()[:1000]:
            name = member.filename.rpartition("/")[2]
            if member.file_size > _MAX_TEXT_BYTES or member.compress_type not in _BOUNDED:
                continue
            if name.endswith((".json", ".pkl")):
                yield from _in_bytes(archive.read(member))
            elif name.removesuffix(".npy") in STEP_KEYS:
                yield from _in_npy(archive.read(member))


class _Frugal:
    """A file whose own sizes are not trusted: it returns at most :data:`_MAX_LIST_BYTES` at a time."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.seek, self.tell, self.seekable, self._read = (
            stream.seek,
            stream.tell,
            stream.seekable,
            stream.read,
        )

    def read(self, size: int = -1) -> bytes:
        data = self._read(min(size, _MAX_LIST_BYTES + 1) if size >= 0 else _MAX_LIST_BYTES + 1)
        if len(data) > _MAX_LIST_BYTES:
            raise ValueError(f"a part of more than {_MAX_LIST_BYTES} bytes")
        return data


def _in_npy(data: bytes) -> Iterator[int]:
    """A single number as numpy stores it. Source: numpy.lib.format, version 1.0."""
    if b"'shape': ()" in data[:128] and b"'<i8'" in data[:128]:
        yield int.from_bytes(data[-8:], "little", signed=True)


def _in_bytes(data: bytes) -> Iterator[int]:
    if data[:1] == b"\x80":
        yield from _in_pickle(data)
        return
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(body, Mapping):
        yield from _in_mapping(body)


def _in_mapping(body: Mapping[str, Any]) -> Iterator[int]:
    for key in STEP_KEYS:
        if type(body.get(key)) is int:
            yield body[key]


def _in_pickle(data: bytes) -> Iterator[int]:
    """Numbers that directly follow such a name, as a dict's items do. The pickle is never executed."""
    key: object = None
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            continue
        if key in STEP_KEYS and type(argument) is int and "INT" in opcode.name.replace("LONG1", "INT"):
            yield argument
        key = argument if isinstance(argument, str) else None


QUIET_S = 5.0
"""Seconds without a change before a file without a mark counts. Chosen: writers flush more often than this.
"""
SAVE_S = 60.0
"""Longest time that a file counts as one save in progress; a file written for longer is a log. Chosen: in
that time a slow disk writes some gigabytes, and larger files have a format that says where they end.
"""
LAG_S = 5.0
"""Largest age of a reported step when a save is seen. Chosen: the wrapper's and the sidecar's scan intervals,
on a busy machine.
"""
_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)
_Facts = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """One file as it was last seen.

    Attributes:
        facts: Size, modification time, inode.
        since: When these facts were first seen, by the watcher's own clock.
        streak: Start of the current series of changes that are less than :data:`QUIET_S` apart.
        is_replaced: True when another file took its place, for example by a rename.
        is_rewritten: True when it was rewritten from its first byte and closed, which no log is.
        progress: What the training had reported at that time.
        torn: Why it is incomplete; None when its format does not show that.
        head: Its first bytes.
    """

    facts: _Facts
    since: float
    streak: float
    progress: Progress
    is_replaced: bool = False
    is_rewritten: bool = False
    torn: str | None = None
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a snapshot would contain now.

    Attributes:
        units: The complete ones.
        links: Symbolic links that are kept with them.
        step: Of the newest content; None when unknown.
        progress: What the training had reported when the newest content was first seen.
        left_out: Path to the reason, for everything in the folder that is not in the snapshot.
        waits_for: The part of ``left_out`` that a snapshot waits for; empty when it can be taken.
        is_hurried: True when files saved less than :data:`QUIET_S` ago count.
    """

    units: tuple[Unit, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    progress: Progress = field(default_factory=Progress)
    left_out: Mapping[str, str] = field(default_factory=dict)
    waits_for: tuple[str, ...] = ()
    is_hurried: bool = False

    @property
    def files(self) -> tuple[TreeFile, ...]:
        """All files, by path."""
        return tuple(sorted((item for unit in self.units for item in unit.files), key=lambda item: item.path))

    @property
    def fingerprint(self) -> str:
        """Changes when any name, size, modification time, inode or link does; logs are ignored."""
        facts = [
            (item.path, item.size, item.mtime_ns, item.inode)
            for item in self.files
            if not saver_layouts.is_log(item.path)
        ]
        return sha256(dumps([facts, sorted(self.links.items())]).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.files)

    @property
    def is_empty(self) -> bool:
        """True when it contains nothing of a training."""
        return all(unit.kind == "file" and saver_layouts.is_log(unit.name) for unit in self.units)


class Settling:
    """Follows a folder from scan to scan."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Begin without any history; ages use *monotonic*."""
        self._monotonic = monotonic
        self._seen: dict[str, Seen] = {}
        self._links: dict[str, tuple[str, float]] = {}
        self._tree: Tree | None = None
        self._pointers: Mapping[str, Unit] = {}
        self._families = saver_layouts.Families(())
        self._now = monotonic()

    def look(self, tree: Tree, progress: Progress) -> None:
        """Record *tree* as it is now; anything saved before this scan belongs to *progress* or earlier."""
        self._now = now = self._monotonic()
        self._tree = tree
        self._seen = {item.path: self._see(item, progress, now) for item in tree.files}
        self._links = {
            path: (target, self._links[path][1] if self._links.get(path, ("", 0))[0] == target else now)
            for path, target in tree.links.items()
        }

    def _see(self, item: TreeFile, progress: Progress, now: float) -> Seen:
        facts = (item.size, item.mtime_ns, item.inode)
        last = self._seen.get(item.path)
        if last is not None and last.facts == facts:
            return last
        head, torn = first_look(item)
        seen = Seen(facts, now, now, progress, torn=torn, head=head)
        if last is None:
            return seen
        is_going_on = now - last.since < QUIET_S
        is_replaced = item.inode != last.facts[2] or (last.is_replaced and is_going_on)
        is_added_to = item.size > last.facts[0] and seen.head.startswith(last.head)
        is_rewritten = last.is_rewritten and is_going_on
        return replace(
            seen,
            streak=last.streak if is_going_on else now,
            is_replaced=is_replaced,
            is_rewritten=is_rewritten or (not is_added_to and self._is_open(item) is False),
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all files except logs and temporary ones; changes with each save."""
        tree = self._tree
        files = (
            [] if tree is None else [item for item in tree.files if not saver_layouts.is_temporary(item.path)]
        )
        return Selection(tuple(Unit(item.path, (item,)) for item in files)).fingerprint

    def quiet_s(self, item: TreeFile) -> float:
        """Seconds since the file was first seen in its current state."""
        return self._now - self._seen[item.path].since

    def select(self, *, hurry: bool = False, died_ns: int | None = None, is_over: bool = False) -> Selection:
        """What a snapshot would contain.

        Args:
            hurry: A snapshot is overdue: closed files count even if they are saved all the time.
            is_over: The command has ended, so that no process writes any more.
            died_ns: When the command was killed or failed, possibly while writing; None when it succeeded.
        """
        tree = self._tree
        if tree is None:
            return Selection()
        known = saver_layouts.units(tree)
        self._pointers, self._families = saver_layouts.pointers(known), saver_layouts.Families(known)
        why = {unit.name: self._fault(unit, hurry=hurry, is_over=is_over, died_ns=died_ns) for unit in known}
        chosen = saver_layouts.wanted(known, lambda unit: why[unit.name] is None, tree.links)
        waits = self._waits(known, chosen, why, tree)
        marked = [unit for unit in known if unit.mark is not None]
        if marked and not any(why[unit.name] is None for unit in marked):
            chosen = [unit for unit in chosen if not unit.is_loose]
        if is_over and waits:  # what it waits for will not come, and files beside it may belong to it
            chosen = [unit for unit in chosen if not unit.is_loose]
        newest, step = saver_layouts.step_of(chosen)
        progress = Progress() if newest is None else self._seen[newest.newest.path].progress
        if newest is not None and step is None:
            step = _refined(newest, progress)
        left_out = {name: reason for name, reason in why.items() if reason is not None} | dict(tree.left_out)
        held = {item.path for unit in chosen for item in unit.files}
        links = {path: target for path, target in tree.links.items() if _is_held(path, tree.links, held)}
        left_out |= {path: "a link to what is not whole" for path in tree.links if path not in links}
        left_out |= {
            item.path: "a temporary name" for item in tree.files if saver_layouts.is_temporary(item.path)
        }
        return Selection(tuple(chosen), links, step, progress, left_out, tuple(waits), hurry)

    def _fault(self, unit: Unit, *, hurry: bool, is_over: bool, died_ns: int | None) -> str | None:
        """Why *unit* is incomplete; None when it is complete."""
        torn = next((found for item in unit.files if (found := self._seen[item.path].torn)), None)
        if torn is not None:
            return torn.removeprefix(f"{unit.name}: ")
        if unit.mark is False:
            return "its saver has not finished it"
        if saver_layouts.is_event_file(unit.name):
            return "a log"
        if unit.mark or self._is_named_as_whole(unit):
            return None
        quiet = min(self.quiet_s(item) for item in unit.files)
        missing = self._families.lacks(unit)
        if missing and (is_over or quiet < SAVE_S):
            return f"lacks {', '.join(sorted(missing)[:3])}, which the one before has"
        if is_over:
            return self._fault_at_the_end(unit, died_ns)
        if quiet >= QUIET_S:
            return None
        if hurry and unit.is_loose and all(self._is_settled(item) for item in unit.files):
            return None
        return f"changed less than {QUIET_S:g} s ago"

    def _fault_at_the_end(self, unit: Unit, died_ns: int | None) -> str | None:
        if died_ns is None or unit.end_mark:
            return None
        for item in unit.files:
            is_quiet = item.mtime_ns <= died_ns - QUIET_S * 1e9
            if not is_quiet and not (unit.is_loose and self._is_settled(item, is_over=True)):
                return f"it was written less than {QUIET_S:g} s before the command died"
        return None

    def _is_named_as_whole(self, unit: Unit) -> bool:
        """True when a pointer that was written after it names it."""
        named_at = (
            self._seen[path].facts[1] for path, named in self._pointers.items() if named.name == unit.name
        )
        return any(at >= unit.newest.mtime_ns for at in named_at)

    def _is_settled(self, item: TreeFile, *, is_over: bool = False) -> bool:
        """True for a file that is saved all the time and is complete at this moment.

        It is complete if a rename put it in place, if its format shows it, if it is a small text that names
        what it points to, or if its writer rewrites it each time and has closed it.
        """
        if saver_layouts.is_log(item.path):
            return False
        if self._seen[item.path].is_replaced or item.path in self._pointers:
            return self.quiet_s(item) > 0 or not self._is_open(item)
        if self._seen[item.path].is_rewritten and not is_over and self._is_open(item) is False:
            return True  # its writer is still running and has closed it
        return has_end(item) and not self._is_open(item)

    def _is_open(self, item: TreeFile) -> bool | None:
        """True when a process has it open for writing; None when the system does not say."""
        try:
            with item.open(shares_names=True) as stream:
                return is_open_for_writing(stream.fileno())
        except (OSError, CheckpointError):
            return None

    def _waits(
        self, known: Sequence[Unit], chosen: Sequence[Unit], why: dict[str, str | None], tree: Tree
    ) -> list[str]:
        """Names of units that are being written and may belong together with the *chosen* ones."""
        whole = {unit.name for unit in chosen}
        since: dict[str, float] = {}
        for unit in chosen:
            if unit.is_loose and not saver_layouts.is_log(unit.name):
                folder = str(PurePosixPath(unit.name).parent)
                streak = max(self._seen[item.path].streak for item in unit.files)
                since[folder] = max(since.get(folder, -float("inf")), streak)
        found = []
        for unit in known:
            if unit.kind != "file" or unit.name in whole or saver_layouts.is_log(unit.name):
                continue
            newest = since.get(str(PurePosixPath(unit.name).parent))
            if newest is not None:
                if self._is_a_log(unit.files[0], newest):
                    why[unit.name] = "written all the time"
                else:
                    found.append(unit.name)
        by_path = {item.path: unit for unit in known for item in unit.files}
        for path, (_, at) in self._links.items():
            target = trees.resolved(path, tree.links)
            named = next((one for one in known if one.name == target), by_path.get(target))
            if named is not None and why[named.name] is not None and self._now - at < SAVE_S:
                found.append(named.name)
        return sorted(set(found))

    def _is_a_log(self, item: TreeFile, newest: float) -> bool:
        """True for a file that is kept open and written, and that no save at *newest* started."""
        seen = self._seen[item.path]
        if seen.torn is not None:
            return self.quiet_s(item) >= SAVE_S
        is_saved = seen.is_replaced or seen.is_rewritten or item.path in self._pointers
        if is_saved or has_end(item):
            return False
        return self._now - seen.streak >= SAVE_S or seen.streak < newest - QUIET_S


def _is_held(path: str, links: Mapping[str, str], held: Iterable[str]) -> bool:
    target = trees.resolved(path, links)
    return target == "." or any(name == target or name.startswith(f"{target}/") for name in held)


def _refined(unit: Unit, progress: Progress) -> int | None:
    """The step stored in *unit* or in its name, if it agrees with the reported progress; else None.

    A step stored in its newest file agrees if the training reported it at that moment. A number in the name
    that is lower than the reported one counts something else; so does a file's number that is higher (a
    date).
    """
    found, number = steps_in(unit.newest), unit.number
    if progress.step is None:
        if number is not None and not unit.is_loose:
            return number
        return next(iter(found)) if len(found) == 1 else None
    slack = 2 + LAG_S * (progress.steps_per_s or 0.0)
    near = [step for step in found if abs(step - progress.step) <= slack]
    if near or number is None or number < progress.step - slack:
        return max(near, default=None)
    return None if unit.is_loose and number > progress.step + slack else number


def is_open_for_writing(file: int) -> bool | None:
    """True when any process has the open *file* open for writing; None when the system does not say.

    Source: fcntl(2), F_SETLEASE: a read lease is refused with EAGAIN while the file is open for writing. The
    lease is released immediately; a writer that opens the file in between waits that long.
    """
    try:
        fcntl.fcntl(file, _F_SETSIG, signal.SIGURG)  # by default SIGIO, which ends a process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as err:
        return True if err.errno == errno.EAGAIN else None
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
