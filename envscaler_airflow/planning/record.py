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
from typing import TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class Record:
    """A dataclass with a JSON form. Unknown (None) fields are omitted if None is the default."""

    __slots__ = ()

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

        Raises:
            ValueError: A field is missing, of another type, or out of range.
        """
        if not isinstance(body, Mapping):
            raise ValueError(f"{cls.__name__}: got {body!r:.80}, expected an object")  # noqa: TRY004 - bad text
        try:
            found: Self = _adapter(cast("Hashable", cls)).validate_json(json.dumps(dict(body)), strict=True)
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
