"""The result of rendering: named texts, and quoting that prevents values from being interpreted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*\Z")
"""Strings that every version of YAML reads as text, unless they are one of the words below."""
_NOT_TEXT = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n", "t", "f", "nan", "inf"))


@dataclass(frozen=True, slots=True)
class Artefact:
    """One file of a rendering.

    Attributes:
        name: Path relative to the folder of the rendering, with ``/``.
        text: Its content.
        is_executable: True for scripts.
    """

    name: str
    text: str
    is_executable: bool = False

    def write(self, folder: Path) -> Path:
        """Write it below *folder*; everyone who may read a script may execute it."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text, encoding="utf-8")
        if self.is_executable:
            path.chmod(path.stat().st_mode | (path.stat().st_mode & 0o444) >> 2)
        return path


class _Dumper(yaml.SafeDumper):
    """Quotes any string that another YAML reader could read as a number or boolean (``1e3``, ``0o17``)."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Write equal parts twice, because anchors are hard to read."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and text.isascii():
        style: str | None = "|"
    else:
        style = None if _PLAIN.match(text) and text.lower() not in _NOT_TEXT else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Write *documents* as YAML, in the order of their keys; every string stays a string."""
    parts = [
        yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=False)
        for document in documents
    ]
    return "---\n".join(parts)


def json_words(words: Iterable[str]) -> str:
    """The exec form of a Dockerfile: JSON, in which nothing is expanded."""
    return json.dumps(list(words))


def dockerfile_value(text: str) -> str:
    """Quote *text* for ENV and LABEL: one line, without expansion.

    Raises:
        ValueError: *text* has several lines, which a Dockerfile value cannot have.
    """
    if "\n" in text or "\r" in text:
        raise ValueError("has several lines")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def comment(lines: Sequence[str]) -> str:
    """*lines* as comments of a shell, YAML or Dockerfile; a line break cannot end the comment."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
