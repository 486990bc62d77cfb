"""A checkpoint folder becomes visible in one step, complete and on disk, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from envscaler_agent.messages import object_or_empty
from envscaler_agent.protocol import parse_checkpoint_name

PARTIAL = ".saving-"
"""Prefix of folders that are being saved."""
FACTS = "agent.json"
"""File inside a complete folder: step, epoch, samples, world_size, global_batch, save_s."""
KEEP_LOCAL = 3
"""Complete folders kept where no sidecar removes them. Chosen: as ``checkpoint.keep``."""


def partial_folder(checkpoints: Path, name: str) -> Path:
    """Return where the checkpoint *name* is assembled."""
    return checkpoints / f"{PARTIAL}{name}"


def clear_partial(checkpoints: Path) -> None:
    """Remove what a killed save left behind."""
    if checkpoints.is_dir():
        for folder in checkpoints.glob(f"{PARTIAL}*"):
            shutil.rmtree(folder, ignore_errors=True)


def complete(checkpoints: Path, name: str, facts: Mapping[str, Any]) -> Path:
    """Sync the partial folder *name* to disk and give it its final name.

    Raises:
        OSError: Nothing is visible under the name.
    """
    partial = partial_folder(checkpoints, name)
    text = json.dumps({key: value for key, value in facts.items() if value is not None})
    (partial / FACTS).write_text(text, encoding="utf-8")
    sync_tree(partial)
    final = checkpoints / name
    partial.replace(final)
    _sync(checkpoints)
    return final


def is_empty(checkpoints: Path, name: str) -> bool:
    """True when nothing was saved into the partial folder *name*: empty folders are not a checkpoint."""
    return not any(path.is_file() for path in partial_folder(checkpoints, name).rglob("*"))


def abandon(checkpoints: Path, name: str) -> None:
    """Remove the partial folder *name*; the complete ones stay."""
    shutil.rmtree(partial_folder(checkpoints, name), ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below *folder* to disk, so that a rename cannot overtake them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_dir():
            _sync(path)
    _sync(folder)


def is_taken(checkpoints: Path, name: str) -> bool:
    """True when the checkpoint *name* is complete already, here or in the store."""
    return (checkpoints / name).exists() or (checkpoints / f"{name}.done").exists()


def waiting(checkpoints: Path) -> List[str]:
    """Return the complete checkpoints that the sidecar has not taken yet, oldest first."""
    if not checkpoints.is_dir():
        return []
    names = {entry.name for entry in os.scandir(checkpoints)}
    return sorted(name for name in names if parse_checkpoint_name(name) and f"{name}.done" not in names)


def newest(checkpoints: Path) -> Optional[Path]:
    """Return the complete folder with the highest step."""
    found = waiting(checkpoints)
    return checkpoints / max(found, key=_order) if found else None


def newest_of(checkpoints: Path, attempt: Tuple[int, int], *, after: int, most_ranks: int) -> Optional[Path]:
    """Return the newest complete folder of that attempt with a step beyond *after*, None when there is none.

    One that the sidecar has taken counts too: it does not move the newest. One that more than *most_ranks*
    ranks saved is not complete on this node.
    """
    found = []
    for entry in os.scandir(checkpoints) if checkpoints.is_dir() else ():
        key = parse_checkpoint_name(entry.name)
        if key is not None and (key[0], key[2]) == attempt and key[1] > after:
            ranks = facts_of(Path(entry.path)).get("world_size")
            if isinstance(ranks, int) and ranks <= most_ranks:
                found.append((key[1], Path(entry.path)))
    return max(found)[1] if found else None


def prune(checkpoints: Path, keep: int = KEEP_LOCAL) -> None:
    """Remove all complete folders except the newest *keep*."""
    for name in sorted(waiting(checkpoints), key=_order)[:-keep]:
        shutil.rmtree(checkpoints / name, ignore_errors=True)


def facts_of(folder: Path) -> Dict[str, Any]:
    """Return the content of ``agent.json``, {} without one."""
    try:
        return object_or_empty((folder / FACTS).read_bytes())
    except OSError:
        return {}


def _order(name: str) -> "tuple[int, int, int]":
    return parse_checkpoint_name(name) or (0, 0, 0)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
