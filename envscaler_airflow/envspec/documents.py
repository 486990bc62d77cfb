"""Read one YAML or JSON document into nodes with their file, line and path; report faults with the same."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from envscaler_airflow.envspec.secret_forms import mask
from envscaler_airflow.errors import refuse

MAX_FAULTS = 100
"""Largest number of faults kept per load; the others are only counted. Chosen: no one reads a hundred."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing to change.

    Attributes:
        file: File name as the user gave it; ``spec`` if the text did not come from a file.
        line: From 1; 0 when there is none.
        path: ``resources.requests.memory``; ``""`` for the document itself.
        text: The problem and what to write.
    """

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        """``envs/train.yaml:14: resources.requests.memory: '4096' has no unit; write 4096Mi or 4Gi``."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (where, self.path, self.text) if part)


@dataclass(slots=True)
class Faults:
    """Collects faults of one load."""

    found: dict[Fault, None] = field(default_factory=dict)
    left_out: int = 0

    def add(self, file: str, line: int, path: str, text: str) -> None:
        """Record a fault with secrets masked; the same fault is recorded once."""
        fault = Fault(file, line, mask(path), mask(text))
        if fault in self.found:
            return
        if len(self.found) >= MAX_FAULTS:
            self.left_out += 1
            return
        self.found[fault] = None

    def extend(self, others: Iterable[Fault]) -> None:
        """Add the faults of another collector."""
        for fault in others:
            self.add(fault.file, fault.line, fault.path, fault.text)

    def raise_if_any(self) -> None:
        """Raise all faults, in the order of files and lines.

        Raises:
            SpecError: At least one fault was recorded.
        """
        lines = [str(fault) for fault in sorted(self.found)]
        if self.left_out:
            lines.append(f"and {self.left_out} more faults")
        refuse(lines)


MAX_BYTES = 128 * 1024
"""Largest file read. Chosen: twice a spec of 1000 variables."""
MAX_DEPTH = 32
"""Deepest nesting. Chosen: the deepest field of the models is at 8."""
MAX_NODES = 20_000
"""Largest number of values after alias expansion. Chosen: a 64-node spec with 500 variables has 2,000."""
MAX_ALIASES = 200
"""Largest number of aliases. Chosen for the same reason."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser, which PyYAML's wheels include: 200 lines in 1.1 ms instead of 6.9 ms in Python.

ruamel.yaml 0.19 takes 10.9 ms, reads ``1_000`` and ``0b11`` as numbers, and would be a second parser, because
Airflow requires PyYAML.
"""

Scalar = str | int | float | bool | None

_PLAIN = re.compile(
    r"""(?P<null>~|null|Null|NULL|)
    |(?P<true>true|True|TRUE)|(?P<false>false|False|FALSE)
    |(?P<on>yes|Yes|YES|on|On|ON)|(?P<off>no|No|NO|off|Off|OFF)
    |(?P<large>(?=.{17})(?:[-+]?[1-9][0-9]*|0o[0-7]+|0x[0-9a-fA-F]+))
    |(?P<int>[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)
    |(?P<octal>[-+]?0[0-9_]+)
    |(?P<base60>[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)
    |(?P<float>[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)
    |(?P<infinite>[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))""",
    re.VERBOSE,
)
"""Plain scalars that are not text. Source: YAML 1.2.2, section 10.3.2; types bool, int, float of YAML 1.1."""
_VALUES: dict[str, Callable[[str], Scalar]] = {
    "null": lambda _: None,
    "true": lambda _: True,
    "false": lambda _: False,
    "int": lambda text: int(text, 0),
    "float": float,
}
_TRAPS = {
    "on": '{0} is true for YAML 1.1 and text for YAML 1.2; write true, or "{0}"',
    "off": '{0} is false for YAML 1.1 and text for YAML 1.2; write false, or "{0}"',
    "octal": '{0:.40} is octal for YAML 1.1; write "{0:.40}", or the number without the leading 0',
    "base60": '{0:.40} without quotes is a number of base 60 for YAML 1.1; write "{0:.40}"',
    "infinite": "{0} is not a finite number; write one, or leave the field out",
    "large": "{0:.20}... is too large a number; write at most 15 digits, or quote it",  # doubles: 2**53
}
"""Plain scalars that YAML and JSON parsers read differently, and what to write instead."""
_TAGS = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")))
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*(?:\"|\\?\Z)|'[^']*'|(?:^|\s)#.*")
"""The quoted parts and the comment of a line. A double quote that is not closed quotes the rest of the line:
otherwise the search would start again at each escaped quote, which takes quadratic time.
"""
_UNQUOTED = 'a template without quotes; write it in quotes: "{{ parameters.x }}"'


@dataclass(frozen=True, slots=True)
class Node:
    """One value and its place in the source.

    Attributes:
        value: A scalar, a dict of nodes or a list of nodes.
        file: File name as the user gave it.
        line: Line of its key, or of the list item; from 1.
        path: Path in the file, such as ``volumes[0].mount_path``.
        raw: Source text of a plain scalar; None otherwise.
        resets: In a merge, it replaces the lower value instead of being merged with it.
        is_broken: A fault was already reported for it; later checks skip it.
    """

    value: Any
    file: str = "spec"
    line: int = 0
    path: str = ""
    raw: str | None = None
    resets: bool = False
    is_broken: bool = False

    @property
    def is_map(self) -> bool:
        """True for a map."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """True for a list."""
        return isinstance(self.value, list)

    def get(self, name: str) -> Node | None:
        """Entry *name* of a map; None when it is absent or this node is not a map."""
        found = self.value.get(name) if isinstance(self.value, dict) else None
        return found if isinstance(found, Node) else None

    def with_value(self, value: Any) -> Node:
        """A copy at the same place with another value."""
        return replace(self, value=value, raw=None)

    def without(self, *names: str) -> Node:
        """A copy of this map without *names*."""
        return self.with_value({key: item for key, item in self.value.items() if key not in names})

    def fault(self, text: str, faults: Faults) -> None:
        """Record a fault at this place, unless one was already reported for it."""
        if not self.is_broken:
            faults.add(self.file, self.line, self.path, text)

    def entry_path(self, name: str | int) -> str:
        """Path of an entry of this map or list."""
        return _join(self.path, name)

    def each(self, change: Callable[[Node, str | int], Any]) -> Any:
        """Apply *change* to each entry with its name or index; a scalar is returned unchanged."""
        if isinstance(self.value, dict):
            return {key: change(item, key) for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [change(item, index) for index, item in enumerate(self.value)]
        return self.value

    def plain(self) -> Any:
        """The value without source places."""
        return self.each(lambda item, _: item.plain())

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        yield self
        items = self.value.values() if self.is_map else self.value if self.is_list else ()
        for item in items:
            yield from item.walk()


def node_of(value: Any, at: Node, name: str | int | None = None) -> Node:
    """Wrap *value* (plain or nodes) as a node at the place of *at*, or of its entry *name*."""
    path = at.path if name is None else at.entry_path(name)
    if isinstance(value, Node):
        return value
    place = replace(at, path=path, raw=None, is_broken=False, resets=False, value=None)
    if isinstance(value, dict):
        return replace(place, value={key: node_of(item, place, key) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return replace(place, value=[node_of(item, place, index) for index, item in enumerate(value)])
    return replace(place, value=value)


def read_file(path: Path, faults: Faults, *, shown_as: str) -> Node | None:
    """The document in *path*; None when a fault makes it unreadable."""
    try:
        text = _text_of(path)
    except _UnreadableError as err:
        faults.add(shown_as, *err.args)
        return None
    return read_text(text, faults, file=shown_as)


def read_text(text: str, faults: Faults, *, file: str = "spec") -> Node | None:
    """The document in *text*, which must be a map; None when it is unreadable."""
    if text.lstrip().startswith("{"):  # JSON may use tabs; YAML and PyYAML's Python parser do not
        text = re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)
    try:
        return _Reader(text, file, faults).read()
    except _UnreadableError as err:
        faults.add(file, *err.args)
    except yaml.MarkedYAMLError as err:
        faults.add(file, *_syntax_fault(err, text.splitlines()))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as err:
        faults.add(file, 0, "", f"is not valid YAML: {str(err).splitlines()[0]:.200}; write plain UTF-8 text")
    return None


class _UnreadableError(Exception):
    """No node can be created; the arguments are the line, the path and the text of the fault."""


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _UnreadableError(0, "", "is not a regular file; write the path of a spec file")
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise _UnreadableError(0, "", f"cannot be read ({reason}); write the path of a spec file") from err
    if len(content) > MAX_BYTES:
        larger = f"larger than {MAX_BYTES >> 10} KiB; write a spec, and keep data in volumes"
        raise _UnreadableError(0, "", larger)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        wrong = f"byte {content[err.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise _UnreadableError(line, "", wrong) from err


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking on a pipe that may never get a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _syntax_fault(err: yaml.MarkedYAMLError, lines: list[str]) -> tuple[int, str, str]:
    """Line, path and text for a syntax error of the parser."""
    mark = err.problem_mark or err.context_mark
    first = err.context_mark.line if err.context_mark else 0
    last = mark.line if mark else first
    for number, line in enumerate(lines[first : last + 1], start=first + 1):
        if _has_bare_template(line):
            return number, "", _UNQUOTED
    problem = err.problem or err.context or ""
    if mark and mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t":
        return last + 1, "", "a tab where YAML wants spaces; indent by spaces"
    return (
        last + 1 if mark else 0,
        "",
        f"is not valid YAML: {problem:.200}; check indentation, colons and quotes",
    )


def _has_bare_template(line: str) -> bool:
    """True when *line* has an unquoted template, which YAML reads as a nested map."""
    return "{{" in _QUOTED.sub("", line)


class _Reader:
    """Builds nodes from the parser's events. It recurses to ``MAX_DEPTH``; the parser does not recurse."""

    def __init__(self, text: str, file: str, faults: Faults) -> None:
        self.events = yaml.parse(text, Loader=LOADER)
        self.lines = text.splitlines()
        self.file = file
        self.faults = faults
        self.anchors: dict[str, Node | None] = {}
        self.aliases = 0
        self.nodes = 0

    def read(self) -> Node:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _UnreadableError(
                        _line_of(event), "", "a second document; write one document, without ---"
                    )
                root = self.node(next(self.events), "", 1, 0)
        if root is None or not root.is_map:
            got = (
                "nothing" if root is None or root.value is None else "a list" if root.is_list else "a scalar"
            )
            raise _UnreadableError(1, "", f"got {got}; write a map that begins with version: v1")
        return root

    def fault(self, line: int, path: str, text: str) -> None:
        self.faults.add(self.file, line, path, text)

    def bound(self, event: yaml.Event, path: str, number: int, most: int, text: str) -> None:
        if number > most:
            raise _UnreadableError(_line_of(event), path, text.format(most))

    def node(self, event: yaml.Event, path: str, line: int, depth: int) -> Node:
        self.bound(event, path, depth, MAX_DEPTH, "nested deeper than {}; write it flatter")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path, line)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        self.count(event, path, 1)
        if event.tag not in _TAGS:
            self.fault(_line_of(event), path, f"tag {event.tag!r:.60} is not read; write the plain value")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            made = self.scalar(event, path, line)
        else:
            is_map = isinstance(event, yaml.MappingStartEvent)
            value = self.mapping(path, depth) if is_map else self.sequence(path, depth)
            made = Node(value, self.file, line, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = made
        return made

    def count(self, event: yaml.Event, path: str, added: int) -> None:
        self.nodes += added
        text = "more than {} values; write a shorter spec, without nested anchors"
        self.bound(event, path, self.nodes, MAX_NODES, text)

    def alias(self, event: yaml.AliasEvent, path: str, line: int) -> Node:
        self.aliases += 1
        text = "more than {} aliases; write values out, or use a module"
        self.bound(event, path, self.aliases, MAX_ALIASES, text)
        target = self.anchors.get(str(event.anchor))
        if target is None:
            problem = "contains itself" if event.anchor in self.anchors else "is defined nowhere above"
            text = f"anchor {event.anchor!r:.60} {problem}; write the value out"
            raise _UnreadableError(_line_of(event), path, text)
        self.count(event, path, sum(1 for _ in target.walk()))
        return _moved(target, path, line)

    def mapping(self, path: str, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: list[Node] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line_of(event)
            key = self.key(event, path, line, depth)
            value = self.node(next(self.events), _join(path, key), line, depth + 1)
            if key == "<<":
                merged.append(value)
            elif key in entries:
                first = entries[key].line
                self.fault(line, _join(path, key), f"written twice, first in line {first}; write it once")
            else:
                entries[key] = value
        return self.with_merged(entries, merged) if merged else entries

    def with_merged(self, entries: dict[str, Node], merged: list[Node]) -> dict[str, Node]:
        below: dict[str, Node] = {}
        for value in merged:
            for item in value.value if value.is_list else [value]:
                if not item.is_map:
                    self.fault(value.line, value.path, "<<: takes maps only; write <<: *anchor of a map")
                    continue
                below = {**item.value, **below}
        return {**below, **entries}

    def key(self, event: yaml.Event, path: str, line: int, depth: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            is_template = _has_bare_template("".join(self.lines[line - 1 : line]))
            text = _UNQUOTED if is_template else "a key that is not text; write a name"
            raise _UnreadableError(_line_of(event), path, text)
        key = event.value
        if not event.style and _kind(key) in ("on", "off"):
            trap = _TRAPS[_kind(key)].format(key).partition(";")[0]
            self.fault(line, _join(path, key), f'key {trap}; write "{key}":')
        elif not isinstance(self.node(event, path, line, depth + 1).value, str):
            self.fault(line, _join(path, key), f'key {key} is not a string in YAML; write "{key}":')
        return key

    def sequence(self, path: str, depth: int) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, _join(path, len(items)), _line_of(event), depth + 1))
        return items

    def scalar(self, event: yaml.ScalarEvent, path: str, line: int) -> Node:
        text: str = event.value
        if event.style or (event.tag is not None and not event.implicit[0]):
            return Node(text, self.file, line, path)
        value, trap = _resolve(text)
        if trap is not None:
            self.fault(_line_of(event), path, trap)
        return Node(value, self.file, line, path, raw=text, is_broken=trap is not None)


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _kind(text: str) -> str:
    found = _PLAIN.fullmatch(text)
    return (found and found.lastgroup) or "text"


def _resolve(text: str) -> tuple[Scalar, str | None]:
    """Value of a plain scalar by the core schema of YAML 1.2, and a message if it is ambiguous."""
    kind = _kind(text)
    if kind in _TRAPS:
        return text, _TRAPS[kind].format(text)
    value = _VALUES.get(kind, str)(text)
    if isinstance(value, float) and not math.isfinite(value):
        return text, f"{text:.40} is too large a number; write a smaller one, or quote it"
    return value, None


def _moved(node: Node, path: str, line: int) -> Node:
    """A copy of *node* as the value at *path*; the nodes below keep their lines."""
    value = node.each(lambda item, name: _moved(item, _join(path, name), item.line))
    return replace(node, value=value, path=path, line=line)


def _join(path: str, name: str | int) -> str:
    if isinstance(name, int):
        return f"{path}[{name}]"
    shown = name if len(name) <= 80 and name.isprintable() else ascii(name)[:80]
    return f"{path}.{shown}" if path else shown
