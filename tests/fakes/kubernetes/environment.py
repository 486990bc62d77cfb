"""Environment of a container as the kubelet builds it, and which of its sources are missing."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from fakes.kubernetes.objects import Object, quantity
from fakes.kubernetes.resources import CONFIG_MAPS, SECRETS, Resource
from fakes.kubernetes.store import Store


class MissingError(Exception):
    """A Secret, ConfigMap or key that a container needs does not exist."""


def environment(store: Store, pod: Object, container: Object) -> dict[str, str]:
    """All variables of *container*, references resolved and ``$(NAME)`` expanded; raises MissingError."""
    namespace = pod["metadata"]["namespace"]
    found: dict[str, str] = {"HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"]}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        for key, value in _whole(store, namespace, source).items():
            found[prefix + key] = value
    for entry in container.get("env") or ():
        if entry.get("valueFrom"):
            value = _referenced(store, pod, container, entry["valueFrom"])
            if value is not None:
                found[entry["name"]] = value
        else:
            found[entry["name"]] = expand(entry.get("value") or "", found)
    return found


def expand(text: str, env: dict[str, str]) -> str:
    """Replace ``$(NAME)`` by known variables; ``$$`` is a dollar sign."""

    def one(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return env.get(match.group(1), match.group(0))

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", one, text)


def _whole(store: Store, namespace: str, source: Object) -> dict[str, str]:
    if "secretRef" in source:
        item = _object(store, SECRETS, namespace, source["secretRef"], "secret")
        return {key: base64.b64decode(value).decode() for key, value in (item.get("data") or {}).items()}
    item = _object(store, CONFIG_MAPS, namespace, source["configMapRef"], "configmap")
    return dict(item.get("data") or {})


def _object(store: Store, resource: Resource, namespace: str, reference: Object, word: str) -> Object:
    item = store.get(resource, namespace, reference["name"])
    if item is None:
        if reference.get("optional"):
            return {}
        raise MissingError(f'{word} "{reference["name"]}" not found')
    return item


def _referenced(store: Store, pod: Object, container: Object, source: Object) -> str | None:
    namespace = pod["metadata"]["namespace"]
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(container, source["resourceFieldRef"])
    for kind, resource, word in (
        ("secretKeyRef", SECRETS, "secret"),
        ("configMapKeyRef", CONFIG_MAPS, "configmap"),
    ):
        if kind in source:
            reference = source[kind]
            data = _object(store, resource, namespace, reference, word).get("data") or {}
            if reference["key"] not in data:
                if reference.get("optional"):
                    return None
                title = "Secret" if word == "secret" else "ConfigMap"
                raise MissingError(
                    f"couldn't find key {reference['key']} in {title} {namespace}/{reference['name']}"
                )
            value = data[reference["key"]]
            return base64.b64decode(value).decode() if word == "secret" else str(value)
    return None


def field_of(pod: Object, path: str) -> str:
    """Value of a downward API field."""
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str((pod["metadata"].get(found.group(1)) or {}).get(found.group(2), ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)


def _resource(container: Object, reference: Object) -> str:
    part, _, name = reference["resource"].partition(".")
    text = (container.get("resources", {}).get(part) or {}).get(name, "0")
    divisor = quantity(reference.get("divisor") or "1") or quantity("1")
    return str(math.ceil(quantity(text) / divisor))


def volumes_missing(store: Store, pod: Object) -> str:
    """Why a volume cannot be mounted yet (the text of a FailedMount event); empty if all can."""
    namespace = pod["metadata"]["namespace"]
    for volume in pod["spec"].get("volumes") or ():
        for kind, resource, key, word in (
            ("secret", SECRETS, "secretName", "secret"),
            ("configMap", CONFIG_MAPS, "name", "configmap"),
        ):
            source = volume.get(kind)
            if source is None or source.get("optional"):
                continue
            if store.get(resource, namespace, source[key]) is None:
                why = f'{word} "{source[key]}" not found'
                return f'MountVolume.SetUp failed for volume "{volume["name"]}" : {why}'
    return ""
