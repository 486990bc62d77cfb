"""Turn a reference to a secret into its value, in the process that needs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from airflow.sdk import BaseHook, Variable
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError
from airflow.sdk.log import mask_secret

from envscaler_airflow.envspec.secrets import Reference, parse_reference
from envscaler_airflow.errors import SpecError

_FIELDS = {"login": "login", "username": "login", "password": "password", "host": "host", "schema": "schema"}


def resolve_secret(reference: str) -> str:
    """Return the value of ``secret:NAME/key``, ``connection:ID/field``, ``variable:NAME`` or ``env:NAME``.

    ``secret:NAME/key`` is what Kubernetes would mount. Without a cluster it is the Airflow
    connection NAME with that field or extra, else key ``key`` of the JSON variable NAME. The value is
    registered with Airflow's masker before it is returned.

    Raises:
        SpecError: The reference is not valid, or its target does not exist; no message contains the value.
    """
    try:
        parsed = parse_reference(reference)
    except ValueError as err:
        raise SpecError(f"value_from: {err}") from err
    value = _READERS[parsed.kind](parsed)
    if value is None:
        raise SpecError(f"{parsed}: {_MISSING[parsed.kind]}")
    mask_secret(value)
    return value


def _from_connection(reference: Reference) -> str | None:
    try:
        connection = BaseHook.get_connection(reference.name)
    except (AirflowNotFoundException, AirflowRuntimeError):
        return None
    key = reference.key or "password"
    if key in _FIELDS:
        return _text(getattr(connection, _FIELDS[key]))
    extra: object = connection.extra_dejson
    return _text(extra.get(key)) if isinstance(extra, Mapping) else None


def _from_secret(reference: Reference) -> str | None:
    found = _from_connection(reference)
    if found is not None:
        return found
    value = _variable(reference.name, as_json=True)
    return _text(value.get(reference.key)) if isinstance(value, dict) else None


def _variable(name: str, *, as_json: bool = False) -> Any:
    try:
        return Variable.get(name, default=None, deserialize_json=as_json)
    except (ValueError, AirflowRuntimeError):
        return None


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


_READERS: dict[str, Callable[[Reference], str | None]] = {
    "env": lambda reference: os.environ.get(reference.name),
    "variable": lambda reference: _text(_variable(reference.name)),
    "connection": _from_connection,
    "secret": _from_secret,
}
_MISSING = {
    "env": "the worker has no such environment variable",
    "variable": "Airflow has no such variable, or it is empty",
    "connection": "Airflow has no such connection, or that field of it is empty",
    "secret": "neither a connection of that name has such a field, nor a JSON variable such a key",
}
