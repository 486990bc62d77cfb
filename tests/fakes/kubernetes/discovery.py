"""Answers about the API itself: versions, groups, resources, health."""

from __future__ import annotations

from typing import Any

from fakes.kubernetes.resources import Resource

VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "fake",
    "gitTreeState": "clean",
    "buildDate": "2026-08-21T00:00:00Z",
    "goVersion": "go1.26.3",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def answer(path: str, resources: tuple[Resource, ...], minor: int = 36) -> dict[str, Any] | str | None:
    """The discovery document at *path*, plain text of a health check, or None if it is neither."""
    path = path.rstrip("/")
    if path == "/version":
        patch = "2" if minor == 36 else "0"
        return VERSION | {
            "minor": str(minor),
            "emulationMinor": str(minor),
            "gitVersion": f"v1.{minor}.{patch}",
        }
    if path in {"/healthz", "/readyz", "/livez"}:
        return "ok"
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        names = list(dict.fromkeys(one.group for one in resources if one.group))
        groups = [_group(name, resources) for name in names]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path.startswith("/openapi/v3"):
        return _openapi(path.removeprefix("/openapi/v3").strip("/"), resources)
    return _below(path, resources)


def _openapi(path: str, resources: tuple[Resource, ...]) -> dict[str, Any]:
    """The part of OpenAPI that kubectl reads: the resources that validate fields on the server."""
    roots = {f"apis/{one.api_version}" if one.group else "api/v1": one.api_version for one in resources}
    if not path:
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    paths = {}
    for one in resources:
        if one.api_version != roots.get(path):
            continue
        kind = {"group": one.group, "version": one.version, "kind": one.kind}
        parameters = [{"name": "fieldValidation", "in": "query"}]
        where = f"/{path}/{'namespaces/{namespace}/' if one.namespaced else ''}{one.plural}/{{name}}"
        paths[where] = {"patch": {"x-kubernetes-group-version-kind": kind, "parameters": parameters}}
    return {"openapi": "3.0.0", "paths": paths}


def _below(path: str, resources: tuple[Resource, ...]) -> dict[str, Any] | None:
    parts = path.strip("/").split("/")
    if parts == ["api", "v1"]:
        return _listed("v1", [one for one in resources if not one.group])
    if parts[0] == "apis" and len(parts) == 2 and any(one.group == parts[1] for one in resources):
        return {"kind": "APIGroup", "apiVersion": "v1"} | _group(parts[1], resources)
    if parts[0] == "apis" and len(parts) == 3:
        found = [one for one in resources if (one.group, one.version) == (parts[1], parts[2])]
        return _listed(f"{parts[1]}/{parts[2]}", found) if found else None
    return None


def _group(name: str, resources: tuple[Resource, ...]) -> dict[str, Any]:
    versions = dict.fromkeys(one.version for one in resources if one.group == name)
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _listed(version: str, resources: list[Resource]) -> dict[str, Any]:
    entries = [entry for one in sorted(resources, key=lambda one: one.plural) for entry in one.discovery()]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": entries}
