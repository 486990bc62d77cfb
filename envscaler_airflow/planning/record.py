"""Dataclasses that round-trip through JSON.

Decisions, observations, plans and bills are recorded with all their numbers and replayed, so each of them is
a :class:`Record`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any, Self, get_type_hints


class Record:
    """A dataclass with a JSON form. Unknown (None) fields are omitted if None is the default."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON form; :meth:`from_dict` restores an equal object."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote; unknown fields are ignored.

        Raises:
            ValueError: A field is missing, of another type, or out of range.
        """
        built: Self = _build(cls, body, cls.__name__)
        return built


def check_finite(**values: float | None) -> None:
    """Reject NaN, infinity and negative numbers; None is unknown and passes.

    Raises:
        ValueError: Names the first such field.
    """
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


class _HasForm(typing.Protocol):
    """A class with its own JSON form, which may be shorter than its fields."""

    def to_dict(self) -> dict[str, Any]: ...


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, Record) and hasattr(value, "to_dict"):
        return typing.cast("_HasForm", value).to_dict()
    if dataclasses.is_dataclass(value):
        pairs = ((item, getattr(value, item.name)) for item in dataclasses.fields(value))
        # Omit None only where reading restores it.
        return {
            item.name: _plain(part) for item, part in pairs if part is not None or item.default is not None
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _hints(cls: Hashable) -> Mapping[str, Any]:
    return get_type_hints(typing.cast("type[Any]", cls))


def _build(cls: type[Any], body: object, where: str) -> Any:
    if not isinstance(body, Mapping):
        raise ValueError(f"{where}: got {type(body).__name__}, expected an object")  # noqa: TRY004 - bad text
    hints = _hints(typing.cast("Hashable", cls))
    values = {
        item.name: _read(hints[item.name], body[item.name], f"{where}.{item.name}")
        for item in dataclasses.fields(cls)
        if item.name in body
    }
    try:
        return cls(**values)
    except TypeError as err:
        raise ValueError(f"{where}: {err}") from err


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(args[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(args[0], item, where) for item in value)
    if origin is not None and isinstance(value, Mapping) and issubclass(origin, Mapping):
        return {str(key): _read(args[1], item, where) for key, item in value.items()}
    return _read_scalar(hint, value, where)


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint):
            return value
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{where}: got {value!r:.80}, expected {getattr(hint, '__name__', hint)}")
