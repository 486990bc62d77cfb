"""Find phrases that plain English avoids, in docstrings, messages, comments and Markdown pages.

``words.yaml`` lists the phrases with better wording.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDERS = ("envscaler_airflow", "agent", "dags", "docs", "tests")  # and the pages beside them
RECORDED = "tests/data/"  # recordings and golden files repeat texts that are checked where they are written
CODE = re.compile(r"^ *```.*?^ *```|(?<!`)(`+)(?!`).+?\1", re.MULTILINE | re.DOTALL)


class Frame(NamedTuple):
    """A phrase to avoid, the better wording, and path prefixes where the phrase is fine."""

    pattern: re.Pattern[str]
    better: str
    exempt: tuple[str, ...]


class Finding(NamedTuple):
    """One match of a frame."""

    path: str
    line: int
    phrase: str
    frame: Frame

    def __str__(self) -> str:
        """Return the line to print."""
        return f"{self.path}:{self.line}: {self.phrase} -> {self.frame.better}"


def frame_of(entry: Mapping[str, str]) -> Frame:
    """Compile one entry of ``words.yaml``; a space in its pattern matches any white space."""
    pattern = re.compile(entry["frame"].replace(" ", r"\s+"), re.IGNORECASE | re.MULTILINE)
    return Frame(pattern, entry["better"], tuple(entry.get("except", ())))


def without_code(text: str) -> str:
    """Remove code blocks and code spans, keeping the number of lines."""
    return CODE.sub(lambda found: "`" + "\n" * found[0].count("\n") + "`", text)


def docstrings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body[0].lineno if node.body else 1, ast.get_docstring(node, clean=False) or ""


def literals_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string literal; an f-string is one text with ``{}`` for each value."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from literals_of(child)


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment; comments on consecutive lines are one text."""
    start, lines = 0, [""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != start + len(lines):
                yield start, "\n".join(lines)
                start, lines = token.start[0], []
            lines.append(token.string.lstrip("#! "))
    yield start, "\n".join(lines)


def texts_of(path: str, source: str) -> list[tuple[int, str]]:
    """Return the prose of a file with its lines; of a test only docstrings. A text of one word is a name."""
    if path.endswith(".md"):
        return [(1, without_code(source))]
    tree = ast.parse(source)
    found = docstrings_of(tree) if path.startswith("tests/") else [*literals_of(tree), *comments_of(source)]
    return [(line, without_code(text)) for line, text in found if " " in text]


def findings_of(path: str, source: str, frames: Sequence[Frame]) -> list[Finding]:
    """Return the matches in one file, in the order of lines."""
    found = [
        Finding(path, start + text.count("\n", 0, match.start()), " ".join(match[0].split()), frame)
        for start, text in texts_of(path, source)
        for frame in frames
        if not path.startswith(frame.exempt)
        for match in frame.pattern.finditer(text)
    ]
    return sorted(found, key=lambda finding: finding.line)


def main() -> int:
    """List every finding; there may be none."""
    frames = [frame_of(entry) for entry in yaml.safe_load((HERE / "words.yaml").read_text())]
    files = [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.*")))]
    paths = [p.relative_to(ROOT).as_posix() for p in files if p.suffix in {".py", ".md"}]
    sources = {path: (ROOT / path).read_text() for path in paths if not path.startswith(RECORDED)}
    found = [finding for path, source in sources.items() for finding in findings_of(path, source, frames)]
    sys.stdout.write("\n".join([*map(str, found), f"{len(found)} findings\n"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
