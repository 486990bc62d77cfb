"""The folder that a training saves to, at one moment: files, links, and what is left out."""

from __future__ import annotations

import posixpath
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import stat_result
from pathlib import Path

from envscaler_agent.protocol import is_safe_link, is_safe_relative_path
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store.manifests import Entries, TreeFile, tree_file
from envscaler_airflow.store.root import Place, Root


@dataclass(frozen=True, slots=True)
class Tree:
    """The content of a folder.

    Attributes:
        files: Regular files by path.
        links: Path of each symbolic link that points inside the tree, to its relative target.
        left_out: Path of each entry that cannot be kept, to the reason.
    """

    files: tuple[TreeFile, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def look(folder: Path, *, parent: Place | None = None) -> Tree:
    """Scan *folder* without following a link in it; files that vanish during the scan are left out.

    Args:
        folder: It may itself be a link to its neighbour.
        parent: The parent folder, if it is known from before the training ran.

    Raises:
        CheckpointError: *folder* is a link to anything except its neighbour, or has more files and folders
            than a manifest could list.
        OSError: It is absent, or cannot be read.
    """
    root = Root.of(folder, parent=parent)
    files: list[TreeFile] = []
    links: dict[str, str] = {}
    left_out: dict[str, str] = {}
    many: dict[str, int] = {}
    for path, facts in below(root):
        if not is_safe_relative_path(path):
            left_out[path] = "its name cannot be kept; rename it"
        elif stat.S_ISLNK(facts.st_mode):
            target = _inner_target(root, path)
            if target is None:
                left_out[path] = "a link that leads outside"
            else:
                links[path] = target
        elif stat.S_ISREG(facts.st_mode):
            many[path] = facts.st_nlink
            files.append(tree_file(path, root, path, facts))
    names = Counter(item.inode for item in files)
    left_out |= {
        item.path: "a hard link to a file outside" for item in files if many[item.path] > names[item.inode]
    }
    kept = [replace(item, names=names[item.inode]) for item in files if item.path not in left_out]
    return Tree(tuple(sorted(kept, key=lambda item: item.path)), links, left_out)


def below(root: Root) -> Iterator[tuple[str, stat_result]]:
    """Paths and metadata of everything below *root* except folders.

    A folder whose name cannot be kept is returned and not entered.

    Raises:
        CheckpointError: There are more files and folders than a manifest could list.
        OSError: A folder cannot be read.
    """
    listed, waiting = Entries(root), [""]
    while waiting:
        here = waiting.pop()
        for name, facts in listed.of(here):
            path = posixpath.join(here, name)
            if stat.S_ISDIR(facts.st_mode) and is_safe_relative_path(path):
                waiting.append(path)
            else:
                yield path, facts


def _inner_target(root: Root, path: str) -> str | None:
    """Target of the link at *path*, relative to its own folder; None when it leads out of the tree."""
    try:
        target = root.read_link(path)
        root.resolve(path)  # other links may be in the way
    except (CheckpointError, OSError):
        return None
    for base in (str(root.path), *(str(alias) for alias in root.aliases)):
        if target == base or target.startswith(f"{base}/"):
            target = posixpath.relpath(target, posixpath.join(base, posixpath.dirname(path)))
            break
    target = posixpath.normpath(target)
    return target if is_safe_link(path, target) else None


def resolved(path: str, links: Mapping[str, str]) -> str:
    """Path inside the tree that the link at *path* leads to, over other links; itself when in a circle."""
    seen = {path}
    while path in links:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
        if path in seen:
            break
        seen.add(path)
    return path
