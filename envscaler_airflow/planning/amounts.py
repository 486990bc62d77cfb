"""Amounts of money, time and data as text, with small amounts kept readable."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, isclose, isfinite, log10
from typing import Any

_DIGITS = 3
"""Significant digits of an amount below ten cents. Chosen: a difference of one percent is visible."""
SAME = "the same"
"""Text for two amounts that do not differ."""
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def usd_text(usd: float) -> str:
    """``$1,204.50``, ``$0.48``, ``$0.0312``, ``$0.000123``: an amount above zero never reads ``$0.00``."""
    size = abs(usd)
    if not isfinite(size):
        return f"${usd}"
    sign = "-" if usd < 0 else ""
    if size == 0 or size >= 0.1:
        return f"{sign}${size:,.2f}"
    decimals = _DIGITS - 1 - floor(log10(size))
    text = f"{size:.{decimals}f}".rstrip("0")
    whole, _, part = text.partition(".")
    return f"{sign}${whole}.{part:0<2}"


_NANO = 9
"""Decimals of an amount in JSON, USD. Chosen: a thousandth of what a second at $0.004/h costs."""


def rounded_money(body: Any, *, is_money: bool = False) -> Any:
    """Return JSON *body* without the noise of sums and differences, such as -3e-21, in its amounts of USD.

    Those are the numbers whose own name, or that of an object around them, has the word ``usd``.
    """
    if isinstance(body, Mapping):
        return {
            key: rounded_money(part, is_money=is_money or "usd" in str(key).split("_"))
            for key, part in body.items()
        }
    if isinstance(body, list | tuple):
        return [rounded_money(part, is_money=is_money) for part in body]
    return round(body, _NANO) + 0.0 if is_money and isinstance(body, float) else body


def duration_text(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``: two units at most."""
    left = max(0, round(seconds))
    if left < _MINUTE_S:
        return f"{left} s"
    if left < _HOUR_S:
        return _two(left, _MINUTE_S, "min", 1, "s")
    if left < _DAY_S:
        return _two(left, _HOUR_S, "h", _MINUTE_S, "min")
    return _two(left, _DAY_S, "d", _HOUR_S, "h")


def bytes_text(size: int) -> str:
    """``700 bytes``, ``512 MiB``, ``1.2 GiB``: one decimal below ten of a unit."""
    amount, unit = float(size), 0
    while amount >= 1024 and unit < len(_BYTE_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    decimals = 1 if unit and amount < 10 else 0
    return f"{amount:.{decimals}f} {_BYTE_UNITS[unit]}"


def usd_less(saved: float, *, of: float) -> str:
    """``$0.48 less``, ``$0.0008 more`` for -0.0008; ``the same`` for a mere rounding difference at *of*."""
    if isclose(of, of - saved, rel_tol=1e-9):
        return SAME
    return f"{usd_text(abs(saved))} {'less' if saved > 0 else 'more'}"


def duration_less(sooner_s: float) -> str:
    """``20 s less``, ``5 s more`` for -5; ``the same`` below half a second."""
    if round(sooner_s) == 0:
        return SAME
    return f"{duration_text(abs(sooner_s))} {'less' if sooner_s > 0 else 'more'}"


def _two(seconds: int, big_s: int, big: str, small_s: int, small: str) -> str:
    many, rest = seconds // big_s, seconds % big_s // small_s
    return f"{many} {big} {rest} {small}" if rest else f"{many} {big}"
