"""Lay a pod that a user wrote over ours, in the way that Airflow's ``pod_override`` is merged. Pure.

Containers pair by position; their env, envFrom, ports, mounts and devices are appended to ours. Init
containers and volumes are appended, labels and annotations are joined, and any other field that the
user sets stands in the place of ours.

Source: Airflow, cncf.kubernetes provider, ``PodGenerator.reconcile_pods``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

_CONTAINER_LISTS = ("env", "envFrom", "ports", "volumeMounts", "volumeDevices")
_SPEC_LISTS = ("initContainers", "volumes")


def merge_pod(base: Mapping[str, Any], override: Mapping[str, Any], *, keep_name: str) -> dict[str, Any]:
    """*base* with *override* over it; the first container keeps the name *keep_name*."""
    if not override:
        return dict(base)
    spec, wanted = base["spec"], override.get("spec") or {}
    merged = {**spec, **{key: value for key, value in wanted.items() if value is not None}}
    for name in _SPEC_LISTS:
        if spec.get(name) or wanted.get(name):
            merged[name] = [*(spec.get(name) or ()), *(wanted.get(name) or ())]
    merged["containers"] = _containers(spec["containers"], wanted.get("containers") or ())
    merged["containers"][0]["name"] = keep_name
    return {"metadata": _metadata(base.get("metadata") or {}, override.get("metadata") or {}), "spec": merged}


def _metadata(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **wanted}
    for name in ("labels", "annotations"):
        joined = {**(base.get(name) or {}), **(wanted.get(name) or {})}
        if joined:
            merged[name] = joined
    return merged


def _containers(
    base: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    return [_container(one or {}, other or {}) for one, other in zip_longest(base, wanted)]


def _container(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **{key: value for key, value in wanted.items() if value is not None}}
    for name in _CONTAINER_LISTS:
        if base.get(name) or wanted.get(name):
            merged[name] = [*(base.get(name) or ()), *(wanted.get(name) or ())]
    return merged
