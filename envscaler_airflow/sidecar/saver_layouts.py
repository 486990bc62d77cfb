"""The folder that a training saves to, at one moment, and what of it is complete by its saver's layout."""

from __future__ import annotations

import bisect
import json
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import stat_result
from pathlib import Path, PurePosixPath

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


_MAX_STATE_BYTES = 64 << 20  # trainer_state.json grows with the log history
_MOST_POINTERS = 20  # newest small files that may name others; chosen: savers keep one or two
_MAX_TAG_BYTES = 4096  # a file name and its line ending

_CHECKPOINT = re.compile(r"((?:.*/)?checkpoint[-_](\d+))/(.+)\Z")
_OF_THE_TRAINER = re.compile(r"(?:training_args\.bin|trainer_state\.json|rng_state(?:_\d+)?\.pth)\Z")
_RANDOM_STATES = re.compile(r"(?:.*/)?random_states_\d+\.pkl\Z")
_SHARD = re.compile(r"((?:.*/)?)(?:[^/]*\.distcp|\.metadata)\Z")
_DEEPSPEED = re.compile(r"((?:.*/)?)([^/]+)/[^/]*_(?:model|optim)_states\.pt\Z")
_SAVE_FOLDER = re.compile(
    r"(?:(?:global[-_]?)?(?:step|iter|iteration|epoch|ckpt|checkpoint|snapshot|save)[-_=]?\d+|\d+)",
    re.IGNORECASE,
)
"""Name of a folder, matched part by part: a path may have thousands of them."""
_STEP = re.compile(
    r"(?:[^/]*(?<![A-Za-z])(?:step|iter|iteration)s?[-_=]?(\d+)(?!\d)[^/]*|checkpoint-(\d+))\Z", re.IGNORECASE
)
_EPOCH = re.compile(r"epochs?[-_=]?\d", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)\D*\Z")
_TEMPORARY = re.compile(
    r"tmp[-_.]|\.tmp|.*(?:\.tmp|\.temp|\.part|\.partial|\.incomplete|_tmp|-tmp|orbax-checkpoint-tmp.*)(?:[-_.]?\w{1,40})?\Z"
)
"""Names that a later rename replaces. Source: transformers, orbax, Lightning, huggingface_hub."""
_LOG = re.compile(
    r"(?:.*/)?(?:events\.out\.tfevents.*|[^/]*\.(?:log|out|err|jsonl|csv|tsv|lock|pid|wandb)|[^/]*log[^/]*\.txt)\Z",
    re.IGNORECASE,
)
"""Files that are written all the time, by the names that loggers give them."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A file or folder whose completeness is judged by itself.

    Attributes:
        name: Path of the file or folder.
        files: Its files.
        kind: ``trainer``, ``accelerate``, ``distributed``, ``deepspeed``, ``folder``, ``set`` or ``file``.
        mark: True when the saver's mark shows that it is complete, False when it shows the opposite; None
            where the saver writes no mark.
        end_mark: True where it has a mark that files may follow: it counts once the writer has ended.
        step: The step in its name; None without one.
        keeps: Names of units that this one requires to be kept (the best).
    """

    name: str
    files: tuple[TreeFile, ...]
    kind: str = "file"
    mark: bool | None = None
    end_mark: bool = False
    step: int | None = None
    keeps: frozenset[str] = frozenset()

    @property
    def number(self) -> int | None:
        """The number in its name that may be a step, or count its saves; None without one."""
        name = PurePosixPath(self.name)
        last = name.stem if self.is_loose else name.name
        return None if _EPOCH.search(last) else _number(last)

    @property
    def is_loose(self) -> bool:
        """True for files that do not form the folder of one saver."""
        return self.kind in ("file", "set")

    @property
    def newest(self) -> TreeFile:
        """Its most recently changed file."""
        return max(self.files, key=lambda item: item.mtime_ns)

    @property
    def facts(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, size, modification time and inode of each file: any change alters them."""
        return tuple((item.path, item.size, item.mtime_ns, item.inode) for item in self.files)

    @property
    def shape(self) -> frozenset[str]:
        """Names of its files without numbers, to compare with the previous unit."""
        inner = (
            item.path.removeprefix(self.name) if self.kind != "set" else item.path for item in self.files
        )
        return frozenset(re.sub(r"\d+", "#", path) for path in inner)


def is_temporary(path: str) -> bool:
    """True for a file that a later rename replaces: ``tmp-checkpoint-8/``, ``model.pt.tmp``."""
    return any(_TEMPORARY.match(part) for part in path.split("/"))


def is_log(path: str) -> bool:
    """True for a file with the name of a log, which loggers write all the time."""
    return _LOG.match(path) is not None


def is_event_file(path: str) -> bool:
    """True for TensorBoard's event files: the next attempt writes its own."""
    return path.rpartition("/")[2].startswith("events.out.tfevents")


def units(tree: Tree) -> tuple[Unit, ...]:
    """All units of *tree*, by name; files with temporary names belong to none."""
    rest = [item for item in tree.files if not is_temporary(item.path)]
    found: list[Unit] = []
    for take in (_checkpoint_folders, _distributed, _deepspeed, _save_folders):
        made = list(take(rest))
        taken = {item.path for unit in made for item in unit.files}
        rest = [item for item in rest if item.path not in taken]
        found += made
    found += _numbered_sets(rest)
    return tuple(sorted(found, key=lambda unit: unit.name))


def wanted(known: Iterable[Unit], is_whole: Callable[[Unit], bool], links: Mapping[str, str]) -> list[Unit]:
    """Those of *known* that belong in a snapshot: complete, and of some families only the newest."""
    whole = [unit for unit in known if is_whole(unit)]
    pointed = {resolved(path, links) for path in links}
    newest: dict[tuple[str, str], Unit] = {}
    for unit in whole:
        key = (unit.kind, str(PurePosixPath(unit.name).parent))
        if _is_of_a_family(unit) and (key not in newest or _order(unit) > _order(newest[key])):
            newest[key] = unit
    chosen = set(newest.values())
    best = {name for unit in chosen for name in unit.keeps}
    return [
        unit for unit in whole if not _is_of_a_family(unit) or unit in chosen or unit.name in best | pointed
    ]


class Families:
    """Units that a saver writes one after another, to find which files a new one lacks."""

    def __init__(self, known: Iterable[Unit]) -> None:
        """Group *known* by their numbers."""
        members: dict[tuple[str, str], list[tuple[tuple[int, int], str, frozenset[str]]]] = {}
        for unit in known:
            if unit.kind in ("accelerate", "folder", "set"):
                shape, order = unit.shape, _order(unit)
                for key in self._keys(unit, shape):
                    members.setdefault(key, []).append((order, unit.name, shape))
        self._members = {key: sorted(found, key=lambda one: one[:2]) for key, found in members.items()}

    @staticmethod
    def _keys(unit: Unit, shape: frozenset[str]) -> list[tuple[str, str]]:
        """The keys of its family: its name without numbers; for a set, each name in it."""
        names = shape if unit.kind == "set" else {re.sub(r"\d+", "#", unit.name)}
        return [(unit.kind, name) for name in names]

    def lacks(self, unit: Unit) -> frozenset[str]:
        """Files of the unit before *unit*, without numbers, that *unit* does not have (yet)."""
        if unit.kind not in ("accelerate", "folder", "set"):
            return frozenset()
        shape, order = unit.shape, _order(unit)
        before = []
        for key in self._keys(unit, shape):
            found = self._members[key]
            index = bisect.bisect_left(found, order, key=lambda one: one[0])
            before += found[index - 1 : index] if index else []
        return frozenset() if not before else max(before, key=lambda one: one[:2])[2] - shape


def step_of(chosen: Sequence[Unit]) -> tuple[Unit | None, int | None]:
    """The unit with the newest content, and its step if its name has one.

    A small text file that names another unit (``latest``) points to it.
    """
    by_age = sorted(
        (unit for unit in chosen if not (unit.kind == "file" and is_log(unit.name))),
        key=lambda unit: (unit.newest.mtime_ns, unit.number is not None),
        reverse=True,
    )
    if not by_age:
        return None, None
    newest = by_age[0]
    if newest.step is None and newest.kind == "file":
        named = _named_by(newest.files[0], by_age[1:])
        if named is not None:
            return named, named.step
    return newest, newest.step


def _named_by(mark: TreeFile, others: Iterable[Unit]) -> Unit | None:
    text = _tag(mark, is_name=False)
    if not text:
        return None
    words = {word for word in re.split(r"[\s\"':,/]+", text) if len(word) > 1}
    for unit in others:
        names = {PurePosixPath(unit.name).name, *(PurePosixPath(item.path).name for item in unit.files)}
        names |= {name.partition(".")[0] for name in names if re.search(r"\d\.", name)}
        if words & names:
            return unit
    return None


def _is_of_a_family(unit: Unit) -> bool:
    is_numbered = _number(unit.name) is not None
    return unit.kind in ("trainer", "accelerate") or (unit.kind == "distributed" and is_numbered)


def _order(unit: Unit) -> tuple[int, int]:
    number = _number(unit.name)
    return (-1 if number is None else number, unit.newest.mtime_ns)


def _numbered_sets(files: Iterable[TreeFile]) -> Iterator[Unit]:
    """Files by folder and by the last number in their names; files without a number are single units."""
    groups: dict[tuple[str, int], list[TreeFile]] = {}
    for item in files:
        number = _number(PurePosixPath(item.path).stem)
        if number is None or is_log(item.path):
            yield Unit(item.path, (item,), step=_named_step(item.path))
        else:
            groups.setdefault((str(PurePosixPath(item.path).parent), number), []).append(item)
    for items in groups.values():
        named = next((step for item in items if (step := _named_step(item.path)) is not None), None)
        yield Unit(items[0].path, tuple(items), "set", step=named)


def pointers(known: Sequence[Unit]) -> dict[str, Unit]:
    """Path of each small text file that names a unit (``last_checkpoint``, ``checkpoint``), to that unit."""
    small = [
        unit.files[0]
        for unit in known
        if unit.kind == "file" and 0 < unit.files[0].size <= _MAX_TAG_BYTES and not is_log(unit.name)
    ]
    small.sort(key=lambda item: item.mtime_ns, reverse=True)
    found = {}
    for item in small[:_MOST_POINTERS]:
        named = _named_by(item, (other for other in known if other.name != item.path))
        if named is not None:
            found[item.path] = named
    return found


def _named_step(path: str) -> int | None:
    """The number that a name marks as a step, as Trainer and diffusers do with ``checkpoint-N``."""
    match = _STEP.match(path.rstrip("/").rpartition("/")[2])
    return int(match[1] or match[2]) if match else None


def _number(name: str) -> int | None:
    match = _NUMBER.search(name.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def _grouped(files: Iterable[TreeFile], pattern: re.Pattern[str]) -> dict[str, list[TreeFile]]:
    groups: dict[str, list[TreeFile]] = {}
    for item in files:
        match = pattern.match(item.path)
        if match:
            groups.setdefault(match[1], []).append(item)
    return groups


def _checkpoint_folders(files: Sequence[TreeFile]) -> Iterator[Unit]:
    groups = _grouped(files, _CHECKPOINT)
    parents = {folder: str(PurePosixPath(folder).parent) for folder in groups}
    of_trainer = {
        parents[folder]
        for folder, items in groups.items()
        if any(_OF_THE_TRAINER.match(item.path.removeprefix(f"{folder}/")) for item in items)
    }
    for folder, items in groups.items():
        step = _named_step(folder)
        if parents[folder] in of_trainer:
            yield _of_trainer(folder, tuple(items), step)
        elif _is_of_accelerate(folder, items):
            inner = list(
                _distributed([item for item in items if item.path.count("/") > folder.count("/") + 1])
            )
            is_torn = any(unit.mark is False for unit in inner)
            has_all = any(_RANDOM_STATES.match(item.path) and item.size for item in items)
            mark = False if is_torn else None
            yield Unit(folder, tuple(items), "accelerate", mark=mark, end_mark=has_all, step=step)


def _is_of_accelerate(folder: str, items: Iterable[TreeFile]) -> bool:
    names = {item.path.removeprefix(f"{folder}/") for item in items}
    return any(_RANDOM_STATES.match(name) for name in names) or bool(
        names & {"optimizer.bin", "scheduler.bin", "sampler.bin"}
    )


def _of_trainer(folder: str, items: tuple[TreeFile, ...], step: int | None) -> Unit:
    state = _trainer_state(items, folder)
    if state is None:
        return Unit(folder, items, "trainer", mark=False, step=step)
    best = str(state.get("best_model_checkpoint") or "").rstrip("/").rpartition("/")[2]
    parent = str(PurePosixPath(folder).parent)
    keeps = {best if parent == "." else f"{parent}/{best}"} if best else set()
    return Unit(folder, items, "trainer", mark=True, step=step, keeps=frozenset(keeps))


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


def _distributed(files: Sequence[TreeFile]) -> Iterator[Unit]:
    groups = _grouped(files, _SHARD)
    for prefix, shards in groups.items():
        marks = [item for item in shards if item.path == f"{prefix}.metadata"]
        # The coordinator writes .metadata last; one that is older than a shard belongs to the previous save.
        is_whole = bool(marks) and all(item.mtime_ns <= marks[0].mtime_ns for item in shards)
        inner = [item for item in files if item.path.startswith(prefix) and _is_in(item, prefix, groups)]
        if not prefix:  # the tree itself is the checkpoint: a file beside the shards is its own unit
            inner = shards
        yield Unit(
            prefix.rstrip("/") or ".", tuple(inner), "distributed", mark=is_whole, step=_named_step(prefix)
        )


def _is_in(item: TreeFile, prefix: str, groups: Iterable[str]) -> bool:
    """True unless the file belongs to a nested shard folder."""
    return not any(len(other) > len(prefix) and item.path.startswith(other) for other in groups)


def _deepspeed(files: Sequence[TreeFile]) -> Iterator[Unit]:
    tags = {(match[1], match[2]) for item in files if (match := _DEEPSPEED.match(item.path))}
    for prefix, tag in sorted(tags):
        mark = next((item for item in files if item.path == f"{prefix}latest"), None)
        named = _tag(mark) if mark is not None else None
        inner = tuple(item for item in files if item.path.startswith(f"{prefix}{tag}/"))
        # A tag that is saved again in place is complete when its mark is rewritten.
        is_older = mark is not None and all(item.mtime_ns <= mark.mtime_ns for item in inner)
        is_kept = named == tag or (named is not None and _number(tag) is None)
        yield Unit(f"{prefix}{tag}", inner, "deepspeed", mark=is_older and is_kept, step=_named_step(tag))


def _tag(mark: TreeFile, *, is_name: bool = True) -> str | None:
    """The folder that ``latest`` names; None when it names none, or is being written."""
    if mark.size > _MAX_TAG_BYTES:
        return None
    try:
        with mark.open(shares_names=True) as stream:
            name = stream.read(_MAX_TAG_BYTES).decode().strip()
    except (CheckpointError, OSError, UnicodeDecodeError):
        return None
    return name if name and not (is_name and "/" in name) else None


def _save_folders(files: Sequence[TreeFile]) -> Iterator[Unit]:
    groups: dict[str, list[TreeFile]] = {}
    for item in files:
        folder = _outermost_save(item.path)
        if folder is not None:
            groups.setdefault(folder, []).append(item)
    for folder, items in groups.items():
        yield Unit(folder, tuple(items), "folder", step=_named_step(folder))


def _outermost_save(path: str) -> str | None:
    *folders, _ = path.split("/")
    for count, name in enumerate(folders, start=1):
        if _SAVE_FOLDER.fullmatch(name):
            return "/".join(folders[:count])
    return None
