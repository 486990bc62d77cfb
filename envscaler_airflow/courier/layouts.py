"""Checkpoints of code that knows nothing of us: a copy of its folder that is known to be whole.

What is copied (:func:`select`) depends on what lies in the folder:

- Hugging Face ``checkpoint-N/``: the newest one with a readable ``trainer_state.json``, and the best
  one that it names; the step is N.
- torch distributed checkpoints: the newest folder with ``.metadata`` not older than its shards, and
  the loose files at the top; the step is the last number in the folder's name.
- DeepSpeed: the folder that the file ``latest`` beside it names, which rank 0 writes after all ranks' files
  (engine.py of 0.19.8, ``save_checkpoint``), and the loose files beside it; the step is as above.
- Lightning ``*step=N*.ckpt``: the newest whole one, and ``last.ckpt``; the step is N.
- anything else: the whole tree.

Files whose format says where they end (zip, so ``torch.save`` and ``.npz``; safetensors) must be
whole. The copy counts only if what was selected (name, size, mtime, inode) is the same before and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store.folders import ChangedError, TreeFile, walk
from envscaler_airflow.store.root import COPY_BYTES, Root

_MAX_STATE_BYTES = 64 << 20  # trainer_state.json grows with the log history
_MAX_HEADER_BYTES = 100 << 20  # source: safetensors, MAX_HEADER_SIZE

_HUGGING_FACE = re.compile(r"((?:.*/)?checkpoint-(\d+))/(.+)\Z")
_LIGHTNING = re.compile(r"(?:.*/)?[^/]*step=(\d+)[^/]*\.ckpt\Z")
_LIGHTNING_LAST = re.compile(r"(?:.*/)?last(?:-v\d+)?\.ckpt\Z")
_SHARD = re.compile(r"((?:.*/)?)(?:[^/]*\.distcp|\.metadata)\Z")
_DEEPSPEED = re.compile(r"((?:.*/)?)([^/]+)/[^/]*_(?:model|optim)_states\.pt\Z")
_MAX_TAG_BYTES = 4096  # a file name and its end of line
_NUMBER = re.compile(r"(\d+)\D*\Z")


@dataclass(frozen=True, slots=True)
class Selection:
    """What a snapshot would hold.

    Attributes:
        files: By path, relative to the checkpoint folder.
        step: Taken from a known layout; None when the layout does not say.
    """

    files: tuple[TreeFile, ...]
    step: int | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when any name, size, modification time or inode does."""
        facts = [(item.path, item.size, item.mtime_ns, item.inode) for item in self.files]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.files)

    @property
    def newest_mtime_ns(self) -> int:
        """When the last file was changed, by the file system's clock."""
        return max((item.mtime_ns for item in self.files), default=0)


def select(folder: Path, *, parent: Path | None = None) -> Selection | None:
    """What of *folder* a snapshot would hold now; None when nothing in it is complete.

    *parent*: where the folder above really is, when that is known from before the training ran.

    Raises:
        CheckpointError: A link leads outside, or a name cannot be kept.
    """
    try:
        files = tuple(item for item in walk(folder, parent=parent) if not _is_temporary(item.path))
    except FileNotFoundError:
        return None
    if any(_HUGGING_FACE.match(item.path) for item in files):
        return _hugging_face(files)
    if any(_SHARD.match(item.path) for item in files):
        return _distributed(files)
    if any(_DEEPSPEED.match(item.path) for item in files):
        return _deepspeed(files)
    if any(_LIGHTNING.match(item.path) for item in files):
        return _lightning(files)
    return Selection(files) if files else None


def _is_temporary(path: str) -> bool:
    """Names that a later rename replaces: ``tmp-checkpoint-8/``, ``model.pt.tmp``, ``.model.pt.x.tmp``."""
    return any(part.startswith("tmp-checkpoint-") or part.endswith(".tmp") for part in path.split("/"))


def _hugging_face(files: Iterable[TreeFile]) -> Selection | None:
    groups: dict[str, list[TreeFile]] = {}
    steps: dict[str, int] = {}
    for item in files:
        match = _HUGGING_FACE.match(item.path)
        if match:
            groups.setdefault(match[1], []).append(item)
            steps[match[1]] = int(match[2])
    for folder in sorted(groups, key=lambda name: steps[name], reverse=True):
        state = _trainer_state(groups[folder], folder)
        if state is not None:
            best = str(state.get("best_model_checkpoint") or "").rstrip("/").rpartition("/")[2]
            kept = {folder} | {name for name in groups if name.rpartition("/")[2] == best}
            chosen = (item for name in sorted(kept) for item in groups[name])
            return Selection(tuple(chosen), steps[folder])
    return None


def _trainer_state(files: Iterable[TreeFile], folder: str) -> dict[str, object] | None:
    for item in files:
        if item.path == f"{folder}/trainer_state.json" and item.size <= _MAX_STATE_BYTES:
            try:
                with item.open(shares_names=True) as stream:
                    body = json.loads(stream.read(_MAX_STATE_BYTES + 1))
            except (CheckpointError, OSError, ValueError, RecursionError):
                return None
            return body if isinstance(body, dict) and "global_step" in body else None
    return None


def _distributed(files: tuple[TreeFile, ...]) -> Selection | None:
    groups: dict[str, list[TreeFile]] = {}
    for item in files:
        match = _SHARD.match(item.path)
        if match:
            groups.setdefault(match[1], []).append(item)
    for prefix in sorted(groups, key=lambda name: _age(name, groups[name]), reverse=True):
        marks = [item for item in groups[prefix] if item.path == f"{prefix}.metadata"]
        # The coordinator writes .metadata last; one that is older than a shard is of the save before.
        if marks and all(item.mtime_ns <= marks[0].mtime_ns for item in groups[prefix]):
            chosen = [item for item in files if item.path.startswith(prefix) and _is_in(item, prefix, groups)]
            loose = [item for item in files if "/" not in item.path] if prefix else []
            return Selection((*loose, *chosen), _number(prefix))
    return None


def _deepspeed(files: tuple[TreeFile, ...]) -> Selection | None:
    prefix = next(match[1] for item in files if (match := _DEEPSPEED.match(item.path)))
    mark = next((item for item in files if item.path == f"{prefix}latest"), None)
    tag = _tag(mark) if mark is not None else None
    if mark is None or tag is None:
        return None
    chosen = [item for item in files if item.path.startswith(f"{prefix}{tag}/")]
    # A tag that is saved again in place is whole when its mark is written again.
    if not chosen or any(item.mtime_ns > mark.mtime_ns for item in chosen):
        return None
    loose = [item for item in files if item.path.rpartition("/")[0] == prefix.rstrip("/")]
    return Selection((*loose, *chosen), _number(tag))


def _tag(mark: TreeFile) -> str | None:
    """The folder that ``latest`` names; None when it names none, or is being written."""
    if mark.size > _MAX_TAG_BYTES:
        return None
    try:
        with mark.open(shares_names=True) as stream:
            name = stream.read(_MAX_TAG_BYTES + 1).decode().strip()
    except (CheckpointError, OSError, UnicodeDecodeError):
        return None
    return name if name and "/" not in name else None


def _is_in(item: TreeFile, prefix: str, groups: Iterable[str]) -> bool:
    """True unless the file belongs to a shard folder further down."""
    return not any(len(other) > len(prefix) and item.path.startswith(other) for other in groups)


def _age(prefix: str, files: Iterable[TreeFile]) -> tuple[int, int]:
    number = _number(prefix)
    return (-1 if number is None else number, max(item.mtime_ns for item in files))


def _number(prefix: str) -> int | None:
    match = _NUMBER.search(prefix.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def _lightning(files: Iterable[TreeFile]) -> Selection | None:
    stepped = [(item, match) for item in files if (match := _LIGHTNING.match(item.path))]
    last = [item for item in files if _LIGHTNING_LAST.match(item.path) and torn(item) is None]
    newest_first = sorted(stepped, key=lambda pair: (int(pair[1][1]), pair[0].mtime_ns), reverse=True)
    for item, match in newest_first:
        if torn(item) is None:
            chosen = sorted({item, *last}, key=lambda file: file.path)
            return Selection(tuple(chosen), int(match[1]))
    return None


def torn(item: TreeFile) -> str | None:
    """Why the file cannot be whole, None when its format does not say so.

    Source: zip's end-of-central-directory record is written last (APPNOTE 4.3.16); a safetensors file is
    8 bytes of header length, the header, and the data up to the largest offset (format specification).
    """
    try:
        with item.open(shares_names=True) as stream:
            head = stream.read(8)
            if head[:4] == b"PK\x03\x04":
                return None if zipfile.is_zipfile(stream) else f"{item.path}: zip without its end"
            if item.path.endswith(".safetensors"):
                return _torn_safetensors(item, head, stream.read)
    except (FileNotFoundError, ChangedError):
        return f"{item.path}: vanished"
    return None


def _torn_safetensors(item: TreeFile, head: bytes, read: Callable[[int], bytes]) -> str | None:
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(item.size, _MAX_HEADER_BYTES):
        return f"{item.path}: shorter than its header says"
    try:
        header = json.loads(read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return f"{item.path}: its header is torn"
    expected = 8 + length + max(ends, default=0)
    return None if item.size == expected else f"{item.path}: {item.size} bytes, its header says {expected}"


def copy(
    folder: Path,
    selection: Selection,
    target: Root,
    *,
    parent: Path | None = None,
    between: Callable[[], None],
    nobody_writes: bool = False,
) -> None:
    """Copy *selection* of *folder* to the new folder *target*; *between* runs before each file.

    When *nobody_writes* any more, files are linked where the file system can: that takes neither time
    nor room.

    Raises:
        CheckpointError: A file is torn, the tree changed meanwhile, or there is too little room.
        OSError: The disk is full after all.
    """
    for item in selection.files:
        reason = torn(item)
        if reason is not None:
            raise CheckpointError(f"incomplete: {reason}")
    if not nobody_writes:
        _check_room(selection.size, target.path)
    try:
        for item in selection.files:
            between()
            with item.open() as stream:
                if not (nobody_writes and _link(stream, target, item.path)):
                    with target.landing(item.path) as new:
                        shutil.copyfileobj(stream, new, COPY_BYTES)
    except FileNotFoundError as err:
        raise CheckpointError(f"{folder} changed while it was copied: {err}") from err
    after = select(folder, parent=parent)
    if after is None or after.fingerprint != selection.fingerprint:
        raise CheckpointError(f"{folder} changed while it was copied")


def _link(stream: BufferedReader, target: Root, path: str) -> bool:
    try:
        target.link(path, stream)
    except OSError:  # another file system, or one without links
        return False
    return True


def _check_room(size: int, folder: Path) -> None:
    """Leave the training room to write: 5 % of the disk or 1 GiB, whichever is less. Chosen."""
    room = os.statvfs(folder)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    spare = min(total // 20, 1 << 30)
    if free < size + spare:
        raise CheckpointError(
            f"disk full: a snapshot takes {size} bytes, {free} are free and {spare} are left to the training"
        )
