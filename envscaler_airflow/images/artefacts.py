"""What rendering gives: named texts, and the quoting that keeps a value a value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*\Z")
"""Texts that every version of YAML reads as text when they are not one of the words below."""
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


class _Dumper(yaml.SafeDumper):
    """Quotes whatever another YAML reader could take for a number or a truth value (``1e3``, ``0o17``)."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Write equal parts twice: anchors hide what is meant."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and text.isascii():
        style: str | None = "|"
    else:
        style = None if _PLAIN.match(text) and text.lower() not in _NOT_TEXT else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """*documents* as YAML, in the order of their keys; any string stays that string."""
    parts = [
        yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=False)
        for document in documents
    ]
    return "---\n".join(parts)


def json_words(words: Iterable[str]) -> str:
    """The exec form of a Dockerfile: JSON, which nothing expands."""
    return json.dumps(list(words))


def dockerfile_value(text: str) -> str:
    """*text* quoted for ENV and LABEL: one line, nothing expanded.

    Raises:
        ValueError: It has several lines, which a Dockerfile cannot hold.
    """
    if "\n" in text or "\r" in text:
        raise ValueError("has several lines")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def comment(lines: Sequence[str]) -> str:
    """*lines* as comments of a shell, YAML or Dockerfile; none can leave its line."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
