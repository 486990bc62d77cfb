"""Read one YAML or JSON document into nodes that know their file, line and path.

YAML 1.2's core rules for plain scalars, on PyYAML's parser. What YAML 1.1 readers take for
something else (``10:30``, ``yes``, ``010``, ``on:`` as a key) is a fault that names the trap, so
that every reader agrees on the file. Size, depth, aliases and number of nodes are bounded.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from envscaler_airflow.envspec.faults import Faults

MAX_BYTES = 128 * 1024
"""Largest file read. Chosen: twice a spec of 1000 variables."""
MAX_DEPTH = 32
"""Deepest nesting. Chosen: the deepest field of the models is at 8."""
MAX_NODES = 20_000
"""Values after aliases are expanded. Chosen: a 64-node spec with 500 variables has 2,000."""
MAX_ALIASES = 200
"""Uses of anchors. Chosen likewise."""
MAX_INT_DIGITS = 15
"""Whole numbers beyond are refused: they do not survive JSON as doubles (2**53 is 9.0e15)."""

Scalar = str | int | float | bool | None

_NULL = re.compile(r"(~|null|Null|NULL|)\Z")
_TRUE = re.compile(r"(true|True|TRUE)\Z")
_FALSE = re.compile(r"(false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_BASED = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
_OCTAL_1_1 = re.compile(r"[-+]?0[0-9_]+\Z")
_SEXAGESIMAL_1_1 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?\Z")
_BOOL_1_1 = re.compile(r"(yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)\Z")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Node:
    """One value and where it was written.

    Attributes:
        value: A scalar, a dict of nodes or a list of nodes.
        file: As the user named it.
        line: Line of its key, or of the item; from 1.
        path: ``volumes[0].mount_path``, in the file.
        raw: Text of a plain scalar as it stands in the file; None otherwise.
        resets: In a merge it replaces what is below it instead of joining it.
        is_broken: A fault was already reported for it; later checks keep silent.
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
        """Entry *name* of a map; None when it is absent or this is no map."""
        found = self.value.get(name) if isinstance(self.value, dict) else None
        return found if isinstance(found, Node) else None

    def with_value(self, value: Any) -> Node:
        """The same place with another value."""
        return replace(self, value=value, raw=None)

    def without(self, *names: str) -> Node:
        """A map less *names*."""
        return self.with_value({key: item for key, item in self.value.items() if key not in names})

    def entry_path(self, name: str | int) -> str:
        """Path of an entry of this map or list."""
        return _join(self.path, name)

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        items = self.value.values() if self.is_map else self.value if self.is_list else ()
        for item in items:
            yield from item.walk()


def node_of(value: Any, at: Node, name: str | int | None = None) -> Node:
    """*value* (plain or nodes) as a node at the place of *at*, or of its entry *name*."""
    path = at.path if name is None else at.entry_path(name)
    if isinstance(value, Node):
        return value
    place = replace(at, path=path, raw=None, is_broken=False, resets=False, value=None)
    if isinstance(value, dict):
        return replace(place, value={key: node_of(item, place, key) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return replace(place, value=[node_of(item, place, index) for index, item in enumerate(value)])
    return replace(place, value=value)


_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|(?:^|\s)#.*")
"""What of a line is in quotes or a comment."""
_UNQUOTED = 'a template without quotes; write it in quotes: "{{ parameters.x }}"'


def _has_bare_template(line: str) -> bool:
    """True when *line* has a template outside of quotes, which YAML reads as a map in a map."""
    return "{{" in _QUOTED.sub("", line)


def read_file(path: Path, faults: Faults, *, shown_as: str) -> Node | None:
    """The document in *path*; None when a fault makes it unreadable."""
    text = _read_text(path, faults, shown_as)
    return None if text is None else read_text(text, faults, file=shown_as)


def read_text(text: str, faults: Faults, *, file: str = "spec") -> Node | None:
    """The document in *text*, a map; None when it cannot be read."""
    if len(text) > MAX_BYTES:
        faults.add(file, 0, "", f"larger than {MAX_BYTES >> 10} KiB; write a spec, and keep data in volumes")
        return None
    if text.lstrip().startswith("{"):  # JSON may be indented by tabs, YAML may not
        text = re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)
    reader = _Reader(file, faults)
    try:
        root = reader.read(text)
    except _StopReadingError:
        return None
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        begun = err.context_mark.line if err.context_mark else 0
        lines = text.splitlines()[begun : (mark.line if mark else begun) + 1]
        bare = next((begun + number for number, line in enumerate(lines) if _has_bare_template(line)), None)
        if bare is not None:
            faults.add(file, bare + 1, "", _UNQUOTED)
        else:
            faults.add(file, mark.line + 1 if mark else 0, "", _syntax(err.problem or err.context or ""))
        return None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as err:
        faults.add(file, 0, "", f"is no YAML: {str(err).splitlines()[0]:.200}; write plain UTF-8 text")
        return None
    if root is None or not root.is_map:
        got = "nothing" if root is None or root.value is None else "a list" if root.is_list else "a scalar"
        faults.add(file, 1, "", f"got {got}; write a map that begins with version: v1")
        return None
    return root


def _read_text(path: Path, faults: Faults, shown_as: str) -> str | None:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                faults.add(shown_as, 0, "", "is no regular file; write the path of a spec file")
                return None
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        faults.add(shown_as, 0, "", f"cannot be read ({reason}); write the path of a spec file")
        return None
    if len(content) > MAX_BYTES:
        faults.add(
            shown_as, 0, "", f"larger than {MAX_BYTES >> 10} KiB; write a spec, and keep data in volumes"
        )
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        faults.add(shown_as, line, "", f"byte {content[err.start]:#04x} is no UTF-8; save the file as UTF-8")
        return None


def _open_at_once(path: str, flags: int) -> int:
    """Waits for nobody to write to a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class _StopReadingError(Exception):
    """A bound was passed; the fault is noted."""


class _Reader:
    """Builds nodes from PyYAML's events; no recursion in the parser, a bounded one here."""

    def __init__(self, file: str, faults: Faults) -> None:
        self.file = file
        self.faults = faults
        self.anchors: dict[str, Node | None] = {}
        self.aliases = 0
        self.nodes = 0
        self.lines: list[str] = []

    def read(self, text: str) -> Node | None:
        self.lines = text.splitlines()
        self.events = yaml.parse(text, Loader=yaml.SafeLoader)
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.stop(event, "", "a second document; write one document, without ---")
                root = self.node(next(self.events), "", 1, 0)
        return root

    def stop(self, event: yaml.Event, path: str, text: str) -> None:
        self.fault(_line_of(event), path, text)
        raise _StopReadingError

    def fault(self, line: int, path: str, text: str) -> None:
        self.faults.add(self.file, line, path, text)

    def node(self, event: yaml.Event, path: str, line: int, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.stop(event, path, f"nested deeper than {MAX_DEPTH}; write it flatter")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path, line)
        self.count(event, path, 1)
        self.check_tag(event, path)
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self.anchors[anchor] = None
        if isinstance(event, yaml.MappingStartEvent):
            made = self.mapping(path, line, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            made = self.sequence(path, line, depth)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            made = self.scalar(event, path, line)
        if anchor is not None:
            self.anchors[anchor] = made
        return made

    def count(self, event: yaml.Event, path: str, added: int) -> None:
        self.nodes += added
        if self.nodes > MAX_NODES:
            self.stop(
                event, path, f"more than {MAX_NODES} values; write a shorter spec, without nested anchors"
            )

    def check_tag(self, event: yaml.Event, path: str) -> None:
        tag = getattr(event, "tag", None)
        if tag in (None, "!", *(_TAG + kind for kind in ("str", "map", "seq"))):
            return
        self.fault(_line_of(event), path, f"tag {tag!r:.60} is not read; write the plain value")

    def alias(self, event: yaml.AliasEvent, path: str, line: int) -> Node:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            self.stop(event, path, f"more than {MAX_ALIASES} aliases; write values out, or use a module")
        target = self.anchors.get(str(event.anchor))
        if target is None:
            problem = "holds itself" if str(event.anchor) in self.anchors else "is defined nowhere above"
            self.stop(event, path, f"anchor {event.anchor!r:.60} {problem}; write the value out")
            raise _StopReadingError
        self.count(event, path, sum(1 for _ in target.walk()))
        return _moved(target, path, line)

    def mapping(self, path: str, line: int, depth: int) -> Node:
        entries: dict[str, Node] = {}
        merged: list[Node] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key_line = _line_of(event)
            key = self.key(event, path, key_line, depth)
            value = self.node(next(self.events), _join(path, key), key_line, depth + 1)
            if key == "<<":
                merged.append(value)
            elif key in entries:
                first = entries[key].line
                self.fault(key_line, _join(path, key), f"written twice, first in line {first}; write it once")
            else:
                entries[key] = value
        return Node(self.with_merged(entries, merged), self.file, line, path)

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
            line_text = self.lines[line - 1] if line <= len(self.lines) else ""
            is_template = _has_bare_template(line_text)
            self.stop(event, path, _UNQUOTED if is_template else "a key that is not text; write a name")
        assert isinstance(event, yaml.ScalarEvent)
        if event.style is None and _BOOL_1_1.match(event.value):
            self.fault(line, _join(path, event.value), _key_trap(event.value))
            return str(event.value)
        node = self.node(event, path, line, depth + 1)
        text = node.raw if node.raw is not None else node.value
        if isinstance(node.value, str) or node.is_broken:
            return str(text)
        self.fault(line, _join(path, str(text)), f'key {text} is no text for YAML; write "{text}":')
        return str(text)

    def sequence(self, path: str, line: int, depth: int) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            item_line = _line_of(event)
            items.append(self.node(event, _join(path, len(items)), item_line, depth + 1))
        return Node(items, self.file, line, path)

    def scalar(self, event: yaml.ScalarEvent, path: str, line: int) -> Node:
        text: str = event.value
        if event.style is not None or (event.tag is not None and not event.implicit[0]):
            return Node(text, self.file, line, path)
        value, trap = _resolve(text)
        if trap is not None:
            self.fault(_line_of(event), path, trap)
        return Node(value, self.file, line, path, raw=text, is_broken=trap is not None)


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _resolve(text: str) -> tuple[Scalar, str | None]:
    """Value of a plain scalar by YAML 1.2's core schema, and the trap that it is, if any."""
    if _NULL.match(text):
        return None, None
    if _TRUE.match(text) or _FALSE.match(text):
        return text[0] in "tT", None
    if _BOOL_1_1.match(text):
        wanted = "true" if text.lower() in ("yes", "on") else "false"
        return text, f'{text} is {wanted} for YAML 1.1 and text for YAML 1.2; write {wanted}, or "{text}"'
    if _SEXAGESIMAL_1_1.match(text):
        return text, f'{text:.40} without quotes is a number of base 60 for YAML 1.1; write "{text:.40}"'
    if _NOT_FINITE.match(text):
        return text, f"{text} is no finite number; write one, or leave the field out"
    return _number(text)


def _key_trap(text: str) -> str:
    wanted = "true" if text.lower() in ("yes", "on") else "false"
    return f'key {text} is {wanted} for YAML 1.1 and text for YAML 1.2; write "{text}":'


def _number(text: str) -> tuple[Scalar, str | None]:
    if _INT.match(text) or _BASED.match(text):
        if len(text) > MAX_INT_DIGITS + 1:
            return (
                text,
                f"{text:.20}... is too large a number; write at most {MAX_INT_DIGITS} digits, or quote it",
            )
        return int(text, 0) if _BASED.match(text) else int(text), None
    if _OCTAL_1_1.match(text):
        return (
            text,
            f'{text:.40} is octal for YAML 1.1; write "{text:.40}", or the number without the leading 0',
        )
    if _FLOAT.match(text):
        value = float(text)
        if not math.isfinite(value):
            return text, f"{text:.40} is too large a number; write a smaller one, or quote it"
        return value, None
    return text, None


def _moved(node: Node, path: str, line: int) -> Node:
    """A copy of *node* as the value at *path*; what is below keeps the lines where it stands."""
    if node.is_map:
        value: Any = {key: _moved(item, _join(path, key), item.line) for key, item in node.value.items()}
    elif node.is_list:
        value = [_moved(item, _join(path, index), item.line) for index, item in enumerate(node.value)]
    else:
        value = node.value
    return replace(node, value=value, path=path, line=line)


def _join(path: str, name: str | int) -> str:
    if isinstance(name, int):
        return f"{path}[{name}]"
    shown = name if len(name) <= 80 and name.isprintable() else ascii(name)[:80]
    return f"{path}.{shown}" if path else shown


def _syntax(problem: str) -> str:
    if "\\t" in problem or "'\t'" in problem:
        return "a tab where YAML wants spaces; indent by spaces"
    return f"is no YAML: {problem:.200}; check indentation, colons and quotes"
