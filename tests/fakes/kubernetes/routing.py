"""Parse method and path."""

from __future__ import annotations

from dataclasses import dataclass

from fakes.kubernetes import errors
from fakes.kubernetes.resources import Resource

TRUE = {"1", "t", "T", "true", "True", "TRUE"}
"""What Go's ParseBool accepts as true."""


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed request."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    subresource: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def what(self) -> str:
        """Resource and subresource, as RBAC names them: ``pods/log``."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural


_NAMED = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_UNNAMED = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}


def parse(
    resources: tuple[Resource, ...], method: str, path: str, query: dict[str, str], headers: dict[str, str]
) -> Call:
    """Parse a request; raises 404 and 405."""
    parts = [part for part in path.split("/") if part]
    if not parts or parts[0] not in {"api", "apis"}:
        raise errors.plain_not_found()
    group, version, rest = (
        ("", parts[1:2], parts[2:]) if parts[0] == "api" else (parts[1], parts[2:3], parts[3:])
    )
    if parts[0] == "apis" and all(one.group != group for one in resources):
        raise errors.plain_not_found()
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    known = [one for one in resources if (one.group, [one.version]) == (group, version)]
    found = next((one for one in known if rest and one.plural == rest[0]), None)
    if found is None:
        raise errors.no_such_path()
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    return Call(
        _verb(found, method, name, subresource, query), found, namespace, name, subresource, query, headers
    )


def _verb(resource: Resource, method: str, name: str, subresource: str, query: dict[str, str]) -> str:
    if subresource:
        known = next((verbs for one, verbs, _kind in resource.subresources if one == subresource), None)
        if known is None:
            raise errors.no_such_path()
        verb = {**_NAMED, "POST": "create"}.get(method, "")
        if verb not in known:
            raise errors.no_such_method()
        return verb
    verb = (_NAMED if name else _UNNAMED).get(method, "")
    if verb in {"list", "get"} and query.get("watch") in TRUE:
        verb = "watch"
    if verb not in resource.verbs:
        raise errors.no_such_method()
    return verb
