"""Semantic versions and ranges of them, as references to the registry name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import total_ordering

from envscaler_airflow.errors import SpecError

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?\Z")
_PART = re.compile(
    rf"(\^|~|>=|<=|>|<|=)?\s*{_NUMBER}(?:\.{_NUMBER})?(?:\.{_NUMBER})?(?:-([0-9A-Za-z.-]+))?\Z"
)


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """``1.2.3`` or ``1.2.3-rc.1``; build metadata, which orders nothing, is refused.

    Source: Semantic Versioning 2.0.0, sections 2, 9 and 11.
    """

    major: int
    minor: int
    patch: int
    pre: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read *text*.

        Raises:
            SpecError: It is no such version.
        """
        match = _VERSION.match(text)
        if match is None:
            raise SpecError(f"version {text!r:.60} is no semantic version; write 1.2.0 or 1.2.0-rc.1")
        pre = tuple(match[4].split(".")) if match[4] else ()
        return cls(int(match[1]), int(match[2]), int(match[3]), pre)

    def __str__(self) -> str:
        """``1.2.3-rc.1``."""
        text = f"{self.major}.{self.minor}.{self.patch}"
        return f"{text}-{'.'.join(self.pre)}" if self.pre else text

    def __lt__(self, other: Version) -> bool:
        """A pre-release comes before its release; its parts are compared as numbers, then as text."""
        return self._key() < other._key()

    def _key(self) -> tuple[tuple[int, int, int], bool, tuple[tuple[bool, int, str], ...]]:
        parts = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in self.pre)
        return (self.core, not self.pre, parts)

    @property
    def core(self) -> tuple[int, int, int]:
        """Major, minor and patch."""
        return (self.major, self.minor, self.patch)


def newest(found: Iterable[Version], wanted: str | None) -> Version | None:
    """The newest of *found* within the range *wanted*; None when none is.

    ``1.2`` is 1.2.x, ``1`` is 1.x, ``^1.2`` up to the next major, ``~1.2.3`` up to the next minor,
    ``>=1.2,<2`` both, ``*`` or None anything. A pre-release counts only when the range names one.

    Raises:
        SpecError: *wanted* is no range.
    """
    checks = _checks(wanted)
    has_pre = wanted is not None and "-" in wanted
    fitting = [version for version in found if all(check(version) for check in checks)]
    return max((version for version in fitting if has_pre or not version.pre), default=None)


def exact(wanted: str | None) -> Version | None:
    """The version when *wanted* names exactly one, else None."""
    return Version.parse(wanted) if wanted is not None and _VERSION.match(wanted) else None


def _checks(wanted: str | None) -> list[Callable[[Version], bool]]:
    if wanted is None or wanted.strip() in ("", "*"):
        return []
    return [check for part in wanted.split(",") for check in _check(part.strip(), wanted)]


def _check(part: str, whole: str) -> list[Callable[[Version], bool]]:
    match = _PART.match(part)
    if match is None:
        raise SpecError(f"range {whole!r:.60} is not understood; write 1.2, ^1.2, ~1.2.3 or >=1.2,<2")
    sign, numbers = match[1] or "", [int(group) for group in match.groups()[1:4] if group is not None]
    major, minor, patch = [*numbers, 0, 0][:3]
    low = Version(major, minor, patch, tuple(match[5].split(".")) if match[5] else ())
    if sign == ">=":
        return [lambda version: version >= low]
    if sign == "<":
        return [lambda version: version < low]
    above, is_full = _above(sign, numbers), len(numbers) == 3
    if sign == "<=":
        return [lambda version: version <= low if is_full else version.core < above]
    if sign == ">":
        return [lambda version: version > low if is_full else version.core >= above]
    if is_full and sign in ("", "="):
        return [lambda version: version == low]
    return [lambda version: version >= low, lambda version: version.core < above]


def _above(sign: str, numbers: list[int]) -> tuple[int, int, int]:
    """The first version that a part no longer means."""
    major, minor, patch = [*numbers, 0, 0][:3]
    if sign == "^":
        if major or len(numbers) == 1:
            return (major + 1, 0, 0)
        return (0, minor + 1, 0) if minor or len(numbers) < 3 else (0, 0, patch + 1)
    if len(numbers) == 1:
        return (major + 1, 0, 0)
    if sign == "~" or len(numbers) == 2:
        return (major, minor + 1, 0)
    return (major, minor, patch + 1)
