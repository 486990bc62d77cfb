"""JSON objects with a schema version that the owner's side and the training's side exchange.

Everything read from the other side is untrusted: bounded in size, and checked against the fields' types.

Runs on Python 3.8 with only the standard library.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple, Type, TypeVar, Union, get_type_hints

from envscaler_agent import __version__
from envscaler_agent.errors import ProtocolError

SCHEMA = "2.0"
"""``major.minor``. Readers accept this and the previous minor, and ignore unknown fields."""
MAX_JSON_BYTES = 1 << 20
"""Largest object that is read, bytes. Chosen: a thousand times the usual size of a control or status."""

_MOST_INT = 2**63  # beyond it no field has a meaning, and far beyond it no float is large enough
_T = TypeVar("_T", bound="Message")


@dataclass(frozen=True)
class Message:
    """A JSON object with ``schema``; its subclasses are the messages."""

    MAX_BYTES = MAX_JSON_BYTES

    def to_json(self) -> bytes:
        """Compact UTF-8 JSON; unknown (None) fields are left out."""
        body = {"schema": SCHEMA}
        body.update(_plain(self))
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls: Type[_T], text: Union[bytes, str], *, where: str) -> _T:
        """Read *text* written by this or the previous minor version.

        Raises:
            ProtocolError: Too large, not JSON, other major version, or a field of the wrong type.
        """
        message: _T = _build(cls, read_object(text, where=where, max_bytes=cls.MAX_BYTES), where)
        return message


def read_object(text: Union[bytes, str], *, where: str, max_bytes: int = MAX_JSON_BYTES) -> Dict[str, Any]:
    """Read *text* as a JSON object of this major version.

    Raises:
        ProtocolError: Too large, not JSON, not an object, or another major version.
    """
    if len(text) > max_bytes:
        raise ProtocolError(f"{where}: {len(text)} bytes, at most {max_bytes} are read")
    body = parse_object(text, where=where, parse_constant=_refuse_constant)
    check_schema(body.get("schema"), where=where)
    return body


def parse_object(text: Union[bytes, str], *, where: str, **options: Any) -> Dict[str, Any]:
    """Read *text* as a JSON object of any version; *options* are those of ``json.loads``.

    Raises:
        ProtocolError: Not JSON, or not an object.
    """
    try:
        body = json.loads(text, **options)
    except (ValueError, RecursionError) as err:
        raise ProtocolError(f"{where}: not JSON: {err}") from err
    if not isinstance(body, dict):
        raise ProtocolError(f"{where}: got {type(body).__name__}, expected an object")
    return body


def object_or_empty(text: Union[bytes, str]) -> Dict[str, Any]:
    """Read *text* as a JSON object; {} for anything else."""
    try:
        return parse_object(text, where="")
    except ProtocolError:
        return {}


def check_schema(schema: object, *, where: str) -> None:
    """Refuse another major version; a newer or older minor is read, unknown fields are ignored.

    Raises:
        ProtocolError: Names both versions.
    """
    ours = SCHEMA.split(".", 1)[0]
    major = schema.split(".", 1)[0] if isinstance(schema, str) else None
    if major == "1":
        raise ProtocolError(
            f"{where}: was written by an unreleased 0.1.0 of envscaler-airflow (schema {schema}), which this "
            f"version (schema {SCHEMA}) does not read; start a new run, or use another store folder"
        )
    if major != ours:
        raise ProtocolError(
            f"{where}: schema {schema!r}, this side uses {SCHEMA} (envscaler {__version__}); install one "
            "version of envscaler-airflow, sidecar image and envscaler-agent"
        )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _plain(value: Any) -> Any:
    if value.__class__ in _SCALARS:
        return value
    if dataclasses.is_dataclass(value):
        pairs = ((name, getattr(value, name)) for name in _hints(type(value)))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_SCALARS = frozenset((str, int, float, bool))
_HINTS: Dict[Any, Dict[str, Any]] = {}
"""Fields of each message with their types: resolving them takes longer than reading a whole status."""


def _hints(cls: Type[Any]) -> Dict[str, Any]:
    found = _HINTS.get(cls)
    if found is None:
        known = get_type_hints(cls)
        found = _HINTS[cls] = {item.name: known[item.name] for item in dataclasses.fields(cls)}
    return found


def _build(cls: Type[Any], body: Mapping[str, Any], where: str) -> Any:
    values = {}
    for name, hint in _hints(cls).items():
        if name in body:
            value = body[name]
            values[name] = value if _is_as_said(hint, value) else _read(hint, value, f"{where}: {name}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as err:
        raise ProtocolError(f"{where}: {err}") from err


def _is_as_said(hint: Any, value: Any) -> bool:
    """True for what :func:`_read` returns unchanged; fast, because a manifest has 100,000 files."""
    if value.__class__ is not hint:
        return False
    if hint is str:
        return bool(value.isascii())
    return hint is bool or (hint is int and -_MOST_INT < value < _MOST_INT)


def _read(hint: Any, value: Any, where: str) -> Any:
    origin: Any = getattr(hint, "__origin__", None)
    args: Tuple[Any, ...] = getattr(hint, "__args__", ())
    if origin is Union:  # Optional[...]
        return None if value is None else _read(args[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where}: got {type(value).__name__}, expected a list")
        return tuple(_read(args[0], item, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where}: got {type(value).__name__}, expected an object")
        return {str(key): _read(args[1], item, where) for key, item in value.items()}
    return _read_plain(hint, value, where)


def _read_plain(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where}: got {type(value).__name__}, expected an object")
        return _build(hint, value, where)  # type: ignore[arg-type]  # is_dataclass() lets instances by, too
    if hint is Any:
        return value
    if hint is float and type(value) is int and abs(value) < _MOST_INT:
        return float(value)
    if type(value) is float and not math.isfinite(value):  # JSON can contain 1e999
        raise ProtocolError(f"{where}: {value!r} is not a number")
    if type(value) is not hint or (type(value) is int and abs(value) >= _MOST_INT):
        expected = getattr(hint, "__name__", hint)
        raise ProtocolError(f"{where}: got {value!r:.80}, expected {expected}")
    return _sayable(value) if hint is str else value


def _sayable(text: str) -> str:
    """*text* with what no terminal or file accepts escaped, such as half of an invalid UTF-8 name."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def check_allowed(value: object, allowed: Tuple[str, ...], name: str) -> None:
    """Raise ValueError unless the field *name* has an *allowed* value."""
    if value not in allowed:
        raise ValueError("{} must be one of {}, got {!r}".format(name, ", ".join(allowed), value))


def check_finite(**values: Optional[float]) -> None:
    """Raise ValueError unless each value is None, or finite and at least 0."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
