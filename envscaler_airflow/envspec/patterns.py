"""Patterns of parameters: matched here in linear time, and passed to Airflow only if linear there too.

RE2 matches any pattern in linear time. Airflow's form and API server use Python's ``re``, which backtracks:
some patterns need more than a day for 41 characters. A pattern is passed to them only in two cases. Either it
is deterministic: at each character at most one part can continue, in one way, so no alternative is retried
(the strongly one-unambiguous expressions of Brüggemann-Klein and Wood, 1998, found with Glushkov's
automaton). Or it has a single loop over one character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

MAX_PATTERN = 500
"""Longest pattern, characters. Chosen: the longest in the docs of known form generators has 120."""
_MAX_POSITIONS = 400
"""Largest number of positions in an expanded pattern. Chosen: ``[a-z]{1,253}`` fits."""
_MAX_CHOICES = 64
"""Largest number of paths through a pattern with one loop. Chosen: six optional parts."""
_ANY = (1 << 129) - 1
"""The set of all characters: one bit for each ASCII character, and one for all others."""
_OTHER = 1 << 128
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:@%+=,-")
"""Characters without a special meaning in any shell, after Python's ``shlex.quote``, plus non-ASCII
letters.
"""


@cache
def compiled(pattern: str) -> Any:
    """Compile *pattern* for :func:`matches`.

    Raises:
        ValueError: *pattern* is too long, not valid, or cannot be matched in linear time.
    """
    import re2  # noqa: PLC0415  (10 ms that most DAG files do without)

    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters; write a pattern of at most {MAX_PATTERN}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise ValueError(f"is not a valid regular expression: {err}; write one such as [a-z]+") from err
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as err:
        why = err.args[0].decode(errors="replace") if isinstance(err.args[0], bytes) else str(err)
        raise ValueError(
            f"cannot be matched in linear time ({why:.100}); write it without look-around, "
            "back-references and large counts, such as [a-z]+"
        ) from err


def matches(pattern: str, text: str) -> bool:
    """True when *pattern* matches *text* completely."""
    return compiled(pattern).fullmatch(text) is not None


@cache
def is_safe_elsewhere(pattern: str) -> bool:
    """True when a backtracking matcher also needs linear time; False when unsure."""
    walked = _walk(pattern)
    return walked is not None and (walked.is_deterministic or walked.has_one_loop)


@cache
def is_shell_safe(pattern: str) -> bool:
    """True when no matching text has a special meaning in a shell; False when unsure."""
    walked = _walk(pattern)
    if walked is None:
        return False
    plain = _union(1 << ord(char) for char in _PLAIN) | _OTHER
    return not _union(walked.sets) & ~plain


@dataclass(slots=True)
class _Part:
    """Positions at which a part of a pattern can start and end."""

    first: frozenset[int]
    last: frozenset[int]
    is_nullable: bool


class _Walk:
    """Glushkov's automaton of one pattern."""

    def __init__(self) -> None:
        self.sets: list[int] = []
        self.follow: list[set[int]] = []
        self.first: frozenset[int] = frozenset()
        self.loops = 0
        self.choices = 1
        self.has_simple_loops = True
        self.is_twofold = False

    @property
    def is_deterministic(self) -> bool:
        """True if no two parts, nor one part in two ways as in ``(a+)+``, can match the same character."""
        return not self.is_twofold and all(map(self._are_apart, (self.first, *self.follow)))

    @property
    def has_one_loop(self) -> bool:
        """True if at most one part, a single character, repeats, with few choices: each end is tried once."""
        return self.loops <= 1 and self.has_simple_loops and self.choices <= _MAX_CHOICES

    def _are_apart(self, positions: Iterable[int]) -> bool:
        seen = 0
        for at in positions:
            if seen & self.sets[at]:
                return False
            seen |= self.sets[at]
        return True

    def position(self, chars: int) -> _Part:
        if len(self.sets) >= _MAX_POSITIONS:
            raise _UnsureError
        self.sets.append(chars)
        self.follow.append(set())
        only = frozenset({len(self.sets) - 1})
        return _Part(only, only, is_nullable=False)

    def sequence(self, items: Iterable[Any]) -> _Part:
        whole = _Part(frozenset(), frozenset(), is_nullable=True)
        for item in items:
            whole = self.joined(whole, self.item(item))
        return whole

    def joined(self, left: _Part, right: _Part) -> _Part:
        self.link(left.last, right.first)
        return _Part(
            left.first | right.first if left.is_nullable else left.first,
            left.last | right.last if right.is_nullable else right.last,
            is_nullable=left.is_nullable and right.is_nullable,
        )

    def item(self, item: Any) -> _Part:
        name, value = str(item[0]), item[1]
        if name == "SUBPATTERN":
            _, added, removed, items = value
            if added or removed:
                raise _UnsureError
            return self.sequence(items)
        if name == "BRANCH":
            return self.either([self.sequence(items) for items in value[1]])
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self.repeated(*value)
        if name == "AT" and str(value) in ("AT_BEGINNING", "AT_END", "AT_BEGINNING_STRING", "AT_END_STRING"):
            return _Part(frozenset(), frozenset(), is_nullable=True)
        return self.position(_chars(name, value))

    def either(self, parts: list[_Part]) -> _Part:
        self.choices *= len(parts)
        self.is_twofold |= sum(part.is_nullable for part in parts) > 1  # several parts match the empty text
        return _Part(
            frozenset().union(*(part.first for part in parts)),
            frozenset().union(*(part.last for part in parts)),
            is_nullable=any(part.is_nullable for part in parts),
        )

    def repeated(self, low: int, high: Any, items: Any) -> _Part:
        """Expand ``x{2,4}`` to ``xx(x(x)?)?``, and ``x{2,}`` to ``xx`` whose last part may repeat."""
        is_endless = str(high) == "MAXREPEAT"
        count = max(low, 1) if is_endless else int(high)
        before = (len(self.sets), self.choices)
        parts = [self.sequence(items) for _ in range(min(count, _MAX_POSITIONS))]
        if not parts or len(parts) < count or (count > 1 and parts[0].is_nullable):
            raise _UnsureError
        for left, right in pairwise(parts):
            self.link(left.last, right.first)
        is_loop = count > 1 or is_endless
        self.is_twofold |= (is_loop or low == 0) and parts[0].is_nullable
        if is_endless:
            self.link(parts[-1].last, parts[-1].first)
        if is_loop:
            self.loops += 1
            self.has_simple_loops &= (len(self.sets) - count, self.choices) == before
        else:
            self.choices *= 2
        return _Part(
            parts[0].first if parts else frozenset(),
            frozenset().union(*(part.last for part in parts[max(low - 1, 0) :])),
            is_nullable=low == 0 or parts[0].is_nullable,
        )

    def link(self, lasts: frozenset[int], firsts: frozenset[int]) -> None:
        for at in lasts:
            self.is_twofold |= not self.follow[at].isdisjoint(firsts)
            self.follow[at] |= firsts


class _UnsureError(Exception):
    """This module does not support a part of the pattern."""


def _walk(pattern: str) -> _Walk | None:
    parser: Any = import_module("re._parser")  # the parse tree that ``re`` uses
    walk = _Walk()
    try:
        whole = walk.sequence(parser.parse(pattern))
    except (_UnsureError, RecursionError, re.error):
        return None
    walk.first = whole.first
    return walk


def _chars(name: str, value: Any) -> int:
    """The set of characters of one position; may contain too many but never too few."""
    if name == "LITERAL":
        return _bit(value)
    if name == "NOT_LITERAL":
        return _ANY & ~_bit(value) | _OTHER
    if name == "ANY":
        return _ANY
    if name == "RANGE":
        low, high = value
        return _union(_bit(code) for code in range(low, min(high, 128) + 1)) | (_OTHER if high > 127 else 0)
    if name == "CATEGORY":
        return _category(str(value))
    if name == "IN":
        parts = [(str(key), item) for key, item in value]
        if parts and parts[0][0] == "NEGATE":
            inside = _union(_chars(key, item) for key, item in parts[1:])
            return _ANY & ~inside | _OTHER
        return _union(_chars(key, item) for key, item in parts)
    raise _UnsureError


def _category(name: str) -> int:
    is_kind: dict[str, Callable[[str], bool]] = {
        "DIGIT": str.isdigit,
        "SPACE": str.isspace,
        "WORD": lambda char: char.isalnum() or char == "_",
    }
    kind = name.removeprefix("CATEGORY_")
    check = is_kind.get(kind.removeprefix("NOT_"))
    if check is None:
        raise _UnsureError
    inside = _union(1 << code for code in range(128) if check(chr(code)))
    return (_ANY & ~inside if kind.startswith("NOT_") else inside) | _OTHER


def _bit(code: int) -> int:
    return 1 << code if code < 128 else _OTHER


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found
