"""Which files git tracks or ignores: the patterns of ``.gitignore``, and the names in the index.

As in git, a pattern matches a path but never the paths below it. An ignored folder is not entered, and
``!*/`` re-includes folders without their content. (pathspec's matcher, which only sees complete paths, gives
a different result for ``*``, ``!*/``, ``!*.py``.)

Source: git 2.39, gitignore(5), wildmatch.c, and gitformat-index(5).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, cast

MAX_RULES_BYTES = 1 << 20
"""Largest .gitignore that is read. Chosen: a hundred times the largest usual template."""
MAX_PATTERN_BYTES = 4096
"""Longest pattern; longer ones are skipped. Source: Linux, PATH_MAX: no path has as many bytes."""
MAX_INDEX_BYTES = 256 << 20
"""Largest index that is read. Chosen: a million files."""
_BOM = b"\xef\xbb\xbf"
_CLASSES = {
    b"alnum": rb"0-9A-Za-z", b"alpha": rb"A-Za-z", b"blank": rb" \t", b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9", b"graph": rb"\x21-\x7e", b"lower": rb"a-z", b"print": rb"\x20-\x7e",
    b"punct": rb"!-/:-@\[-`{-~", b"space": rb" \t\n\r\x0b\x0c", b"upper": rb"A-Z", b"xdigit": rb"0-9A-Fa-f",
}  # fmt: skip


_SLASH = ord("/")
_FEW_STARS = 2
"""Most stars of a pattern that ``re`` matches. Chosen: a name of 255 bytes is then tried in 65,000 ways."""


class _Regex(Protocol):
    def fullmatch(self, text: bytes, /) -> object | None: ...


@dataclass(frozen=True, slots=True)
class _Pattern:
    regex: _Regex
    takes_back: bool
    is_for_folders: bool
    is_of_name: bool


@dataclass(frozen=True, slots=True)
class IgnoreFile:
    """The patterns of one file, in their order; paths are relative to its folder."""

    patterns: tuple[_Pattern, ...]

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """True if *path* is ignored, False if it is re-included, None if no pattern matches it."""
        name = os.fsencode(path)
        last = name.rpartition(b"/")[2]
        for pattern in reversed(self.patterns):
            if pattern.is_for_folders and not is_folder:
                continue
            if pattern.regex.fullmatch(last if pattern.is_of_name else name):
                return not pattern.takes_back
        return None


def read_ignore_file(path: Path) -> IgnoreFile | None:
    """The patterns in *path*; None unless it is a regular file. Like git, this does not follow links.

    Raises:
        OSError: It cannot be read.
    """
    data = _read(path, MAX_RULES_BYTES)
    return None if data is None else parse(data)


def parse(data: bytes) -> IgnoreFile:
    """Parse the content of an ignore file; lines that git skips are skipped."""
    lines = data.removeprefix(_BOM).split(b"\n")
    found = (_pattern(line.removesuffix(b"\r")) for line in lines)
    return IgnoreFile(tuple(pattern for pattern in found if pattern is not None))


def _pattern(line: bytes) -> _Pattern | None:
    if line[:1] == b"#":
        return None
    text = line.rstrip(b" ")
    is_escaped = (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
    text += b" " if is_escaped and len(text) < len(line) else b""
    if len(text) > MAX_PATTERN_BYTES:
        return None
    takes_back = text[:1] == b"!"
    text = text[takes_back:]
    is_for_folders = text[-1:] == b"/"
    text = text.removesuffix(b"/")
    is_of_name = b"/" not in text
    try:
        regex = _compiled(_translate(text.removeprefix(b"/"), is_of_name=is_of_name), stars=text.count(b"*"))
    except (re.error, _NeverMatchesError):
        return None
    return _Pattern(regex, takes_back, is_for_folders, is_of_name) if text else None


def _compiled(regex: bytes, *, stars: int) -> _Regex:
    """Compile *regex* with RE2 if ``re`` could try too many ways: its time grows with a power of *stars*."""
    if stars <= _FEW_STARS:
        return re.compile(regex, re.DOTALL)
    import re2  # noqa: PLC0415  (10 ms that most folders do without)

    options = re2.Options()
    options.encoding, options.dot_nl, options.log_errors = re2.Options.Encoding.LATIN1, True, False
    try:
        return cast("_Regex", re2.compile(regex, options))
    except re2.error as err:  # too large for it
        raise _NeverMatchesError from err


class _NeverMatchesError(Exception):
    """The pattern has an unclosed bracket or a trailing backslash, or is too large."""


def _translate(text: bytes, *, is_of_name: bool) -> bytes:
    parts, at = list[bytes](), 0
    while at < len(text):
        char = text[at : at + 1]
        if char == b"*":
            stars = len(text) - at - len(text[at:].lstrip(b"*"))
            part, used = _stars(text, at, stars, is_of_name=is_of_name)
        elif char == b"?":
            part, used = b"[^/]", 1
        elif char == b"[":
            part, used = _bracket(text, at)
        elif char == b"\\":
            if at + 1 == len(text):
                raise _NeverMatchesError
            part, used = re.escape(text[at + 1 : at + 2]), 2
        else:
            part, used = re.escape(char), 1
        parts.append(part)
        at += used
    return b"".join(parts)


def _stars(text: bytes, at: int, stars: int, *, is_of_name: bool) -> tuple[bytes, int]:
    """Translate stars: ``**`` between slashes matches across folders, other stars within one path part."""
    after = text[at + stars : at + stars + 1]
    begins = at == 0 or text[at - 1 : at] == b"/"
    if is_of_name or stars == 1 or not begins or after not in (b"", b"/"):
        return b"[^/]*", stars
    if after == b"/":
        return b"(?:.*/)?", stars + 1
    return b".*", stars


def _bracket(text: bytes, at: int) -> tuple[bytes, int]:
    """Translate a bracket expression, which never matches a slash."""
    start, at = at, at + 1
    is_negated = text[at : at + 1] in (b"!", b"^")
    at += is_negated
    parts, is_first = list[bytes](), True
    while at < len(text) and (is_first or text[at : at + 1] != b"]"):
        is_first = False
        if named := re.match(rb"\[:([a-z]*):\]", text[at:]):
            if named[1] not in _CLASSES:
                raise _NeverMatchesError
            parts.append(_CLASSES[named[1]])
            at += len(named[0])
            continue
        low, at = _member(text, at)
        if text[at : at + 1] == b"-" and text[at + 1 : at + 2] not in (b"]", b""):
            high, at = _member(text, at + 1)
            parts += [re.escape(low) + b"-" + re.escape(high)] if low <= high else []
        else:
            parts.append(re.escape(low))
    if at >= len(text):
        raise _NeverMatchesError
    inner = b"".join(parts)
    if is_negated:
        return b"[^/" + inner + b"]", at + 1 - start
    members = re.compile(b"[" + inner + b"]") if inner else None
    codes = [code for code in range(256) if code != _SLASH and members and members.match(bytes((code,)))]
    if not codes:
        raise _NeverMatchesError
    return b"[" + b"".join(b"\\x%02x" % code for code in codes) + b"]", at + 1 - start


def _member(text: bytes, at: int) -> tuple[bytes, int]:
    if text[at : at + 1] == b"\\":
        at += 1
        if at >= len(text):
            raise _NeverMatchesError
    return text[at : at + 1], at + 1


def _read(path: Path, most: int) -> bytes | None:
    """Bytes of the regular file *path*; None if it is absent or larger than *most*."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        if path.is_symlink():
            return None
        raise OSError(err.errno, err.strerror, str(path)) from err
    with os.fdopen(handle, "rb") as stream:
        seen = os.fstat(stream.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > most:
            return None
        return stream.read(most)


def tracked_names(repository: Path) -> frozenset[bytes]:
    """Paths in the index of *repository*: git tracks these files even if a pattern matches them.

    Empty if there is no index, or its format is not supported (split, sparse, or a newer version).
    """
    folder = _git_folder(repository)
    try:
        data = None if folder is None else _read(folder / "index", MAX_INDEX_BYTES)
        return frozenset(_index_names(data)) if data is not None else frozenset()
    except (OSError, ValueError, IndexError):
        return frozenset()


def info_exclude(repository: Path) -> Path:
    """The ignore file of a repository that is never committed: ``.git/info/exclude``."""
    return (_git_folder(repository) or repository / ".git") / "info" / "exclude"


def _git_folder(repository: Path) -> Path | None:
    """``.git``, or the folder that its text ``gitdir: PATH`` names in a worktree or submodule."""
    path = repository / ".git"
    if path.is_dir():
        return path
    try:
        data = _read(path, 4096) or b""
    except OSError:
        return None
    if not data.startswith(b"gitdir:"):
        return None
    return repository / os.fsdecode(data.removeprefix(b"gitdir:").strip())


def _index_names(data: bytes) -> Iterator[bytes]:
    version, count = int.from_bytes(data[4:8]), int.from_bytes(data[8:12])
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        return
    at, name = 12, b""
    for _ in range(count):
        flags = int.from_bytes(data[at + 60 : at + 62])
        begin = at + 62 + (2 if version > 2 and flags & 0x4000 else 0)
        if version == 4:
            less, begin = _varint(data, begin)
            end = data.index(b"\0", begin)
            name = name[: len(name) - less] + data[begin:end]
            at = end + 1
        else:
            end = data.index(b"\0", begin)
            name = data[begin:end]
            at += (end - at + 8) & ~7  # entries are padded with 1 to 8 zeros to a multiple of 8 bytes
        yield name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An offset-encoded number, of gitformat-pack(5)."""
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1


@cache
def _folders_of(names: frozenset[bytes]) -> frozenset[bytes]:
    return frozenset(
        name[:index] for name in names for index in range(1, len(name)) if name[index : index + 1] == b"/"
    )


def is_tracked(names: frozenset[bytes], path: str, *, is_folder: bool) -> bool:
    """True when *path* is in the index, or is a folder of a file in it."""
    name = os.fsencode(path)
    return name in (_folders_of(names) if is_folder else names)
