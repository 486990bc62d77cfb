"""The JSON codec of the owner's side: dataclasses that round-trip through JSON.

Events, decisions, observations, plans and bills are recorded with all their numbers and replayed, so each of
them is a :class:`Record`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import TypeAdapter


_Number = TypeVar("_Number", int, float)
_NOT_NEGATIVE, _POSITIVE = "finite and >= 0", "finite and > 0"
NotNegative = Annotated[_Number, _NOT_NEGATIVE]
"""Type of a record's field that every constructed record has within bounds; None is unknown and passes."""
Positive = Annotated[_Number, _POSITIVE]
"""The same, without 0."""

MOST_VALUE = 1e100
"""A larger value is not a valid measurement. Chosen: sums of squares of smaller values are finite."""


class Record:
    """A dataclass with a JSON form. Unknown (None) fields are omitted if None is the default.

    A :data:`NotNegative` or :data:`Positive` field, or a mapping of such numbers, rejects NaN, infinity and
    smaller numbers with a ValueError.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the bounds of all fields. A subclass with checks of its own calls this first."""
        for name, bound in _bounds(cast("Hashable", type(self))):
            value = getattr(self, name)
            if value is None or (value.__class__ is float and 0 < value < math.inf):
                continue  # nearly all: records are made by the ten thousand
            for key, number in (value if isinstance(value, Mapping) else {name: value}).items():
                if number is not None and not (
                    0 < number < math.inf or (number == 0 and bound == _NOT_NEGATIVE)
                ):
                    raise ValueError(f"{key} must be {bound}, got {number!r}")

    def to_dict(self) -> dict[str, Any]:
        """JSON form; :meth:`from_dict` restores an equal object."""
        # Omit None only where reading restores it.
        return {
            item.name: _plain(part)
            for item in dataclasses.fields(cast("Any", self))
            if (part := getattr(self, item.name)) is not None or item.default is not None
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote; unknown fields are ignored.

        What is not text in UTF-8, such as a byte of a file's name, is read as "?".

        Raises:
            ValueError: A field is missing, of another type, or out of range.
        """
        if not isinstance(body, Mapping):
            raise ValueError(f"{cls.__name__}: got {body!r:.80}, expected an object")  # noqa: TRY004 - bad text
        try:
            text = json.dumps(dict(body), ensure_ascii=False).encode("utf-8", "replace")
            found: Self = _adapter(cast("Hashable", cls)).validate_json(text, strict=True)
        except (OverflowError, RecursionError, TypeError, ValueError) as err:
            raise ValueError(_fault(err)) from err
        return found


def check_finite(**values: float | None) -> None:
    """Reject NaN, infinity and negative numbers; None is unknown and passes.

    Raises:
        ValueError: Names the first such field.
    """
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        own = getattr(value, "to_dict", None)
        return Record.to_dict(cast("Any", value)) if own is None else own()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _bounds(cls: Hashable) -> tuple[tuple[str, str], ...]:
    """Fields of *cls* that have a bound, and which."""
    hints = get_type_hints(cast("type[Any]", cls), include_extras=True)
    bounds = ((item.name, _bound_of(hints[item.name])) for item in dataclasses.fields(cast("Any", cls)))
    return tuple((name, bound) for name, bound in bounds if bound is not None)


def _bound_of(hint: Any) -> str | None:
    if get_origin(hint) is Annotated:
        return next((text for text in hint.__metadata__ if text in (_NOT_NEGATIVE, _POSITIVE)), None)
    return next((bound for part in get_args(hint) if (bound := _bound_of(part)) is not None), None)


@functools.cache
def _adapter(cls: Hashable) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - loads with the first record that is read

    return TypeAdapter(cast("type[Any]", cls))


def _fault(err: Exception) -> str:
    """Name the first wrong field: ``usage.0.1: got 'yesterday', input should be a valid number``."""
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    if not isinstance(err, ValidationError):
        return str(err)
    fault = err.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        text = "is missing"
    elif fault["type"] == "value_error":  # of the class itself
        text = str(fault["ctx"]["error"])
    else:
        text = f"got {fault['input']!r:.80}, {fault['msg'].lower()}"
    return f"{place}: {text}" if place else text
