"""Quantities in specs: cpu and memory by Kubernetes' rules, durations, GPU memory.

Each function parses one value and raises a ValueError that says what to write instead.

Source:
    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/ (suffixes).
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, Decimal

MAX_CORES = 100_000
"""Chosen: no machine and no total of ours has more cores; a typing error does."""
MIN_MEMORY_BYTES = 1 << 20
"""1Mi. Chosen: a smaller request has a wrong unit; Python does not start in it."""
MAX_MEMORY_BYTES = 1 << 50
"""1Pi per node. Chosen: ten times the largest machine on offer."""
MAX_DURATION_S = 366 * 86400.0
"""A year. Chosen: a longer duration has a wrong unit."""
MAX_GPU_MEMORY_GB = 4096.0
"""Chosen: ten times the largest GPU of 2026."""
GPU_MEMORY_USABLE = 0.93
"""Fraction of the nominal GPU memory that sizing assumes. Chosen: driver and context use the rest."""

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_NUMBER = re.compile(r"(?P<digits>[0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?P<unit>[A-Za-z]*)\Z")
_DURATION_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION_ORDER = ("d", "h", "m", "s", "ms")


def cpu_cores(value: str | float) -> float:
    """Cores of a Kubernetes cpu quantity: ``8``, ``"0.5"`` and ``"500m"``.

    Raises:
        ValueError: The value is not a cpu quantity, finer than 1m, or more than :data:`MAX_CORES`.
    """
    digits, unit = _split(value, "an amount of cpu: write 8, 0.5 or 500m")
    if unit not in ("", "m"):
        raise ValueError(
            f"{_shown(value)} is not a cpu quantity; write cores (8 or 0.5) or millicores (500m)"
        )
    cores = digits / 1000 if unit == "m" else digits
    if cores * 1000 != (cores * 1000).to_integral_value():
        raise ValueError(f"{_shown(value)} is finer than a millicore; write whole millicores such as 500m")
    if not 0 < cores <= MAX_CORES:
        raise ValueError(f"{_shown(value)} is out of range; write more than 0 and at most {MAX_CORES} cores")
    return float(cores)


def memory_bytes(value: str | float) -> int:
    """Bytes of a Kubernetes memory quantity with a unit: ``"4Gi"``, ``"512Mi"``, ``"32G"``.

    Bare numbers (bytes in Kubernetes) and ``512m`` (half a byte there) are rejected: in a spec both are
    always mistakes.

    Raises:
        ValueError: The unit is absent or unknown, or the value is outside 1Mi to 1Pi.
    """
    digits, unit = _split(value, "an amount of memory: write 4Gi or 512Mi")
    number = _plain(digits)
    if not unit:
        raise ValueError(f"{_shown(value)} has no unit; {_bare_memory_fix(digits)}")
    if unit == "m":
        raise ValueError(f"{_shown(value)} is {number} thousandths of a byte; write {number}Mi")
    factor = _BINARY.get(unit) or _DECIMAL.get(unit)
    if factor is None:
        raise ValueError(f"{_shown(value)} has an unknown unit; {_unit_fix(number, unit)}")
    size = int((digits * factor).to_integral_value(rounding=ROUND_CEILING))
    if not MIN_MEMORY_BYTES <= size <= MAX_MEMORY_BYTES:
        raise ValueError(f"{_shown(value)} is out of range; write between 1Mi and 1Pi, such as 4Gi")
    return size


def duration_s(value: str) -> float:
    """Seconds of a duration: ``"10m"``, ``"1h30m"``, ``"90s"``, ``"500ms"``, ``"2d"``.

    Raises:
        ValueError: The unit is absent, units are out of order, or the value is more than a year.
    """
    if not isinstance(value, str):  # pydantic handles ValueError
        number = value if isinstance(value, int) and not isinstance(value, bool) else 10
        fix = f'write it with a unit in quotes: "{number}s", "10m"'
        raise ValueError(f"{_shown(value)} is not a duration; {fix}")  # noqa: TRY004 (pydantic takes ValueError)
    parts = _DURATION_PART.findall(value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        fix = (
            f'"{value}s" or "{value}m"'
            if value.isascii() and value.isdigit() and len(value) < 10
            else '"10m"'
        )
        raise ValueError(f'{_shown(value)} is not a duration; write {fix}, "1h30m" or "90s"')
    ranks = [_DURATION_ORDER.index(unit) for _, unit in parts]
    if ranks != sorted(set(ranks)):
        raise ValueError(f'{_shown(value)} has its units out of order; write the largest first: "1h30m"')
    seconds = float(sum(Decimal(number) * Decimal(str(_SECONDS[unit])) for number, unit in parts))
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{_shown(value)} is more than a year; write at most 366d")
    return seconds


def duration_text(seconds: float) -> str:
    """Shortest spelling of *seconds*: 5400 is ``1h30m``. Inverse of :func:`duration_s` to a millisecond."""
    left_ms = round(seconds * 1000)
    parts = []
    for unit in _DURATION_ORDER:
        size_ms = round(_SECONDS[unit] * 1000)
        count, left_ms = divmod(left_ms, size_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def gpu_memory_gb(value: str | float) -> float:
    """Nominal memory of one GPU: ``141Gi``, ``141GB`` and ``141`` all mean the vendor's 141.

    Raises:
        ValueError: The unit is another one, or the value is out of range.
    """
    digits, unit = _split(value, "an amount of GPU memory: write 80GB")
    if unit not in ("", "G", "GB", "Gi", "GiB"):
        raise ValueError(
            f"{_shown(value)} is not an amount of GPU memory; write the vendor's figure, such as 80GB"
        )
    if not 0 < digits <= int(MAX_GPU_MEMORY_GB):
        raise ValueError(f"{_shown(value)} is out of range; write the vendor's figure, such as 80GB")
    return float(digits)


def _split(value: str | float, expected: str) -> tuple[Decimal, str]:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{_shown(value)} is not {expected}")  # noqa: TRY004 (pydantic takes ValueError)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not {expected}")
    text = value if isinstance(value, str) else _number_text(value)
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{_shown(value)} is not {expected}")
    return Decimal(match["digits"]), match["unit"]


def _number_text(value: float) -> str:
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else "too large"
    return f"{value:.9f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else "too large"


def _plain(digits: Decimal) -> str:
    text = f"{digits:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _bare_memory_fix(digits: Decimal) -> str:
    number = _plain(digits)
    mib = int(digits)
    if digits >= 1 << 20:
        return f"bytes are written as {max(1, mib >> 20)}Mi"
    if mib >= 1024 and mib % 1024 == 0:
        return f"write {number}Mi or {mib >> 10}Gi"
    return f"write {number}Gi or {number}Mi"


def _unit_fix(number: str, unit: str) -> str:
    letter = unit[0].upper()
    if letter == "K":
        return f"write {number}Ki or {number}k"
    if letter in "MGTP":
        return f"write {number}{letter}i (1024s) or {number}{letter} (1000s)"
    return f"write {number}Gi or {number}Mi"


def _shown(value: object) -> str:
    text = (
        repr(value) if isinstance(value, (str, int, float, bool)) or value is None else type(value).__name__
    )
    return text if len(text) <= 60 else text[:57] + "..."
