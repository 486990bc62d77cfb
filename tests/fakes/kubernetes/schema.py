"""Unknown fields and wrong JSON types, checked against the official client's own models."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from fakes.kubernetes.errors import bad_request
from fakes.kubernetes.objects import Object, quantity
from fakes.kubernetes.resources import Resource

_JSON = {"str": (str, "string"), "int": (int, "int64"), "bool": (bool, "bool"), "float": (float, "float64")}
_NO_QUANTITY = r"quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_FREE = {"object", "datetime", "dict(str, object)", "dict(str, str)", "V1MicroTime", "IntOrString"}


@functools.cache
def _model(name: str) -> Any:
    client = importlib.import_module("kubernetes.client.models")
    return getattr(client, name, None)


def _root(resource: Resource) -> Any:
    special = {"Event": "CoreV1Event", "EndpointSlice": "V1EndpointSlice", "StorageClass": "V1StorageClass"}
    return _model(special.get(resource.kind, f"V{resource.version[1:]}{resource.kind}"))


def check(resource: Resource, body: Object) -> list[str]:
    """Remove unknown fields from *body* and name them; raises 400 for a wrong type or quantity."""
    model = _root(resource)
    if model is None:
        return []
    unknown: list[str] = []
    try:
        _walk(model, body, "", unknown)
    except _WrongError as wrong:
        text = (
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {wrong}'
        )
        raise bad_request(text) from wrong
    return unknown


class _WrongError(Exception):
    """A value that Go cannot decode."""


def _walk(model: Any, body: Any, path: str, unknown: list[str]) -> None:
    types, names = model.openapi_types, {json: python for python, json in model.attribute_map.items()}
    for key, value in list(body.items()):
        spot = f"{path}.{key}" if path else key
        if key not in names:
            unknown.append(spot)
            del body[key]
        elif value is not None:
            _judge(types[names[key]], value, spot, unknown, f"{model.__name__[2:]}.{spot}")


def _judge(kind: str, value: Any, path: str, unknown: list[str], shown: str) -> None:
    if path.endswith((".limits", ".requests", ".hard")) and isinstance(value, dict):
        _quantities(value)
    if kind in _FREE:
        return
    if found := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        _expect(value, list, "[]", shown)
        for at, one in enumerate(value):
            _judge(found.group(1), one, f"{path}[{at}]", unknown, shown)
    elif kind.startswith(("dict(", "Dict[")):
        _expect(value, dict, "map", shown)
    elif kind in _JSON:
        wanted, name = _JSON[kind]
        _expect(value, wanted, name, shown)
    elif (model := _model(kind)) is not None:
        _expect(value, dict, kind, shown)
        _walk(model, value, path, unknown)


def _quantities(amounts: Object) -> None:
    for text in amounts.values():
        try:
            quantity(text)
        except ValueError:
            raise _WrongError(_NO_QUANTITY) from None


def _expect(value: Any, wanted: type, name: str, shown: str) -> None:
    is_bool = isinstance(value, bool) and wanted is not bool
    if isinstance(value, wanted) and not is_bool:
        return
    if wanted is float and isinstance(value, int) and not is_bool:
        return
    found = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}[
        type(value)
    ]
    field = re.sub(r"\[\d+\]", "", shown)
    raise _WrongError(f"json: cannot unmarshal {found} into Go struct field {field} of type {name}")
