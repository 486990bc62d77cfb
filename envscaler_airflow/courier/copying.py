"""Copy what a snapshot selected, as it was at one instant."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

from envscaler_airflow.courier import layouts, trees
from envscaler_airflow.courier.settling import Selection, is_open_for_writing
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store.folders import TreeFile
from envscaler_airflow.store.root import COPY_BYTES, Place, Root

MOST_OPEN = 256
"""Files that are held open at once. Chosen: a quarter of the usual limit of a process."""


def copy(
    folder: Path,
    selection: Selection,
    target: Root,
    *,
    parent: Place | None = None,
    between: Callable[[], None],
    nobody_writes: bool = False,
) -> None:
    """Copy *selection* of *folder* to the new folder *target*; *between* runs before each file.

    Up to :data:`MOST_OPEN` files are opened first, so that the copy is of one instant, whatever replaces them
    meanwhile; of more, each must be the same before and after all were copied.

    When *nobody_writes* any more, files are linked where the file system can: that takes neither time
    nor room.

    Raises:
        CheckpointError: The files changed meanwhile, or there is too little room.
        OSError: The disk is full after all.
    """
    if not nobody_writes:
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
                _copy_one(stream, item, target, nobody_writes=nobody_writes)
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
    if not _is_same(stream, item) or (is_being_written and not layouts.is_log(item.path)):
        stream.close()
        raise _changed(folder, item.path)
    return stream


def _is_same(stream: BufferedReader, item: TreeFile) -> bool:
    now = os.fstat(stream.fileno())
    return (now.st_size, now.st_mtime_ns, now.st_ino) == (item.size, item.mtime_ns, item.inode)


def _changed(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder} changed while it was copied: {what}")


def _check_units(folder: Path, selection: Selection, parent: Place | None) -> None:
    """Every unit still is what was selected: no file of it is another one, none came, none went."""
    try:
        now = {unit.name: unit.facts for unit in layouts.units(trees.look(folder, parent=parent))}
    except OSError as err:
        raise _changed(folder, str(err)) from err
    for unit in selection.units:
        if now.get(unit.name) != unit.facts:
            raise _changed(folder, unit.name)


def _copy_one(stream: BufferedReader, item: TreeFile, target: Root, *, nobody_writes: bool) -> None:
    if nobody_writes and _link(stream, target, item.path):
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
    """Leave the training room to write: 5 % of the disk or 1 GiB, whichever is less. Chosen."""
    room = os.statvfs(folder)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    spare = min(total // 20, 1 << 30)
    if free < size + spare:
        raise CheckpointError(
            f"disk full: a snapshot takes {size} bytes, {free} are free and {spare} are left to the training"
        )
