"""The docstrings of the installed distributions, without importing any of them."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"_vendor", "_vendored", "vendor", "vendored", "extern", "tests", "test"})
"""Excluded: vendored copies would have the wrong label, and the text of tests is about tests."""
MAX_FILE_BYTES = 2_000_000
"""Largest source file that is read. Chosen: larger ones are generated tables."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Document:
    """One docstring.

    Attributes:
        label: Distribution that it comes from.
        source: ``package/file.py:line``.
        text: The docstring, indentation removed.
    """

    label: str
    source: str
    text: str


def installed() -> dict[str, importlib.metadata.Distribution]:
    """Distributions on this interpreter's path by name, sorted; the first one of two copies."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution)
    return dict(sorted(found.items()))


def python_files(distribution: importlib.metadata.Distribution) -> list[importlib.metadata.PackagePath]:
    """Its modules, in an order that depends only on their names.

    The order is that of a hash, so that the first thousand are a fair sample of a large distribution and the
    same on every machine.
    """
    files = [file for file in distribution.files or () if file.suffix == ".py"]
    files = [file for file in files if not SKIPPED_FOLDERS.intersection(file.parts)]
    return sorted(files, key=lambda file: hashlib.sha256(str(file).encode()).digest())


def documents(
    name: str,
    distribution: importlib.metadata.Distribution,
    files: Iterable[importlib.metadata.PackagePath] | None = None,
    *,
    on_file: Callable[[], None] = lambda: None,
) -> Iterator[Document]:
    """Docstrings of modules, classes and functions of *files*, or all; *on_file* is called for each file."""
    for file in python_files(distribution) if files is None else files:
        on_file()
        path = Path(str(distribution.locate_file(file)))
        for line, text in _docstrings_of(path):
            yield Document(name, f"{file}:{line}", text)


def names_of(labels: list[str]) -> frozenset[str]:
    """Words of the distributions' own names, which would give the label away."""
    return frozenset(word for label in labels for word in re.findall(r"[a-z]+|[0-9]+", label.lower()))


def _docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    try:
        source = path.read_bytes()
    except OSError:
        return  # listed by the distribution but removed since
    if len(source) > MAX_FILE_BYTES or (b'"""' not in source and b"'''" not in source):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore other projects' escape sequences
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return  # a template, or written for another Python
    for node in _documented(tree):
        text = ast.get_docstring(node)
        if text:
            yield getattr(node, "lineno", 1), text


def _documented(tree: ast.Module) -> Iterator[_Documented]:
    """Nodes that may have a docstring, in the order of the file; expressions are skipped."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Documented):
            yield node
        bodies = [getattr(node, name, []) for name in ("body", "orelse", "handlers", "finalbody")]
        inner = [child for body in bodies for child in body if hasattr(child, "body")]
        waiting.extend(reversed(inner))
