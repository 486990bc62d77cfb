"""The four kinds of PATCH."""

from __future__ import annotations

from typing import Any

import jsonpatch
import jsonpointer
from fakes.kubernetes.errors import ApiError, bad_request, status, unprocessable
from fakes.kubernetes.objects import Object, clone

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "conditions": "type",
    "taints": "key",
    "ownerReferences": "uid",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "resizePolicy": "resourceName",
    "subjects": None,
}
_SETS = {"finalizers"}
"""Lists that a strategic merge patch joins; it replaces every other one (tolerations, command, rules).

Source: patchMergeKey tags of k8s.io/api core/v1 and meta/v1."""


def patch(item: Object, media_type: str, body: Any) -> Object:
    """Apply *body* to a copy of *item*.

    Raises:
        ApiError: 415 for another media type, 422 for a JSON patch that fails.
    """
    if media_type == "application/json-patch+json":
        return _json_patch(item, body)
    if not isinstance(body, dict):
        raise bad_request("json: cannot unmarshal array into Go value of type map[string]interface {}")
    if media_type == "application/merge-patch+json":
        return _merge(clone(item), clone(body))
    if media_type in {"application/strategic-merge-patch+json", "application/apply-patch+yaml"}:
        return _strategic(clone(item), clone(body))
    raise ApiError(415, status(415, "UnsupportedMediaType", "415: Unsupported Media Type", {}))


def _json_patch(item: Object, body: Any) -> Object:
    try:
        return jsonpatch.apply_patch(clone(item), body)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as error:
        raise unprocessable() from error


def _merge(into: Any, fresh: Any) -> Any:
    """RFC 7386: null removes, lists are replaced."""
    if not isinstance(fresh, dict):
        return fresh
    if not isinstance(into, dict):
        into = {}
    for key, value in fresh.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = _merge(into.get(key), value)
    return into


def _strategic(into: Any, fresh: Object) -> Object:
    if fresh.get("$patch") == "replace":
        return {key: value for key, value in fresh.items() if key != "$patch"}
    if not isinstance(into, dict):
        into = {}
    for key, value in fresh.items():
        if key.startswith("$"):
            _directive(into, key, value)
        elif value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            into[key] = _strategic(into.get(key), value)
        elif isinstance(value, list):
            into[key] = _join(key, into.get(key) or [], value)
        else:
            into[key] = value
    return into


def _directive(into: Object, key: str, value: Any) -> None:
    kind, _, field = key.partition("/")
    if kind == "$deleteFromPrimitiveList":
        into[field] = [one for one in into.get(field) or [] if one not in value]
    elif kind == "$retainKeys":
        for gone in set(into) - set(value):
            into.pop(gone)


def _join(field: str, old: list[Any], fresh: list[Any]) -> list[Any]:
    if field in _SETS:
        return old + [one for one in fresh if one not in old]
    key = _KEYS.get(field)
    if key is None or any(not isinstance(one, dict) for one in fresh):
        return fresh
    if any(one.get("$patch") == "replace" for one in fresh):
        return [one for one in fresh if one.get("$patch") != "replace"]
    joined = list(old)
    for one in fresh:
        place = next((at for at, other in enumerate(joined) if other.get(key) == one.get(key)), None)
        if one.get("$patch") == "delete":
            if place is not None:
                joined.pop(place)
        elif place is None:
            joined.append(_strategic({}, one))
        else:
            joined[place] = _strategic(joined[place], one)
    return joined
