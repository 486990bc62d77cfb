"""Label and field selectors, and node affinity terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fakes.kubernetes.errors import bad_request
from fakes.kubernetes.objects import Object
from fakes.kubernetes.resources import Resource

Test = Callable[[Mapping[str, str]], bool]

_IN = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s=!]+)\s*(==|=|!=)\s*([^\s=!]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s=!,()]+)\s*$")

_FIELDS = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
             "status.phase", "status.podIP", "status.nominatedNodeName"),
    "jobs.batch": ("status.successful",),
    "nodes": ("spec.unschedulable",),
    "events": ("involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
               "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
               "reason", "reportingComponent", "source", "type"),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
}  # fmt: skip


def _split(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _requirement(text: str) -> Test:
    if found := _IN.match(text):
        key, operator, values = found.groups()
        allowed = {value.strip() for value in values.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in allowed
        return lambda labels: labels.get(key) not in allowed
    if found := _EQUAL.match(text):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(text):
        negated, key = found.groups()
        return lambda labels: (key in labels) != bool(negated)
    raise bad_request("unable to parse requirement: found '=', expected: identifier")


def label_test(text: str) -> Test:
    """Compile ``a=b,c in (d,e),!f``; raises 400."""
    tests = [_requirement(part) for part in _split(text)]
    return lambda labels: all(test(labels) for test in tests)


def _field(item: Object, path: str) -> str:
    value: Any = item
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value is not None else ""


def field_test(resource: Resource, text: str) -> Callable[[Object], bool]:
    """Compile ``status.phase=Running,metadata.name!=x``; raises 400 for a field that has no index."""
    tests: list[tuple[str, bool, str]] = []
    for part in _split(text):
        path, negated, value = part, False, ""
        for operator in ("!=", "==", "="):
            if operator in part:
                path, _, value = part.partition(operator)
                negated = operator == "!="
                break
        if path not in ("metadata.name", "metadata.namespace", *_FIELDS.get(resource.full, ())):
            raise bad_request(f"field label not supported: {path}")
        tests.append((path, negated, value))
    return lambda item: all((_field(item, path) == value) != negated for path, negated, value in tests)


def selector_test(selector: Object | None) -> Test:
    """Compile a LabelSelector object; None selects nothing, an empty one everything."""
    if selector is None:
        return lambda _labels: False
    wanted = selector.get("matchLabels") or {}
    terms = selector.get("matchExpressions") or []
    return lambda labels: (
        all(labels.get(key) == value for key, value in wanted.items())
        and all(term_holds(term, labels) for term in terms)
    )


def term_holds(term: Object, labels: Mapping[str, str]) -> bool:
    """Evaluate one matchExpressions entry (In, NotIn, Exists, DoesNotExist, Gt, Lt)."""
    key, operator, values = term["key"], term["operator"], term.get("values") or []
    found = labels.get(key)
    if operator == "In":
        return found in values
    if operator == "NotIn":
        return found not in values
    if operator == "Exists":
        return found is not None
    if operator == "DoesNotExist":
        return found is None
    if found is None or not re.fullmatch(r"-?\d+", found):
        return False
    return int(found) > int(values[0]) if operator == "Gt" else int(found) < int(values[0])
