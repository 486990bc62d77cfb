"""Refusals of invalid objects, in the API server's words (422)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fakes.kubernetes.errors import cause, invalid
from fakes.kubernetes.objects import Object, quantity, said
from fakes.kubernetes.resources import Resource

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_SUBDOMAIN_MESSAGE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_MESSAGE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', "
    "and must start "
    "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
    "for validation "
    "is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)

Causes = list[dict[str, Any]]


def validate(resource: Resource, item: Object) -> None:
    """Check a new object; raises 422 with all causes."""
    causes = _meta_causes(item["metadata"])
    judge = _JUDGES.get(resource.kind)
    if judge is not None:
        causes += judge(item)
    if causes:
        raise invalid(resource.full_kind, item["metadata"]["name"], causes)


def _meta_causes(meta: Object) -> Causes:
    causes: Causes = []
    name = meta["name"]
    if len(name) > 253:
        causes.append(
            cause("metadata.name", "FieldValueInvalid", "must be no more than 253 bytes", f'"{name}"')
        )
    elif not _SUBDOMAIN.fullmatch(name):
        causes.append(cause("metadata.name", "FieldValueInvalid", _SUBDOMAIN_MESSAGE, f'"{name}"'))
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if value != name}
    causes += _label_causes(labels, "metadata.labels")
    if sum(len(key) + len(value) for key, value in (meta.get("annotations") or {}).items()) > 256 * 1024:
        causes.append(cause("metadata.annotations", "FieldValueTooLong", "may not be more than 262144 bytes"))
    return causes


def _label_causes(labels: dict[str, Any], field: str) -> Causes:
    causes: Causes = []
    for value in labels.values():
        if len(value) > 63:
            causes.append(cause(field, "FieldValueInvalid", "must be no more than 63 bytes", f'"{value}"'))
        elif not _LABEL.fullmatch(value):
            causes.append(cause(field, "FieldValueInvalid", _LABEL_MESSAGE, f'"{value}"'))
    return causes


def _negative(spec: Object, field: str) -> Causes:
    value = spec.get(field)
    if isinstance(value, int) and value < 0:
        return [cause(f"spec.{field}", "FieldValueInvalid", "must be greater than or equal to 0", str(value))]
    return []


def _job_causes(job: Object) -> Causes:
    spec, name = job["spec"], job["metadata"]["name"]
    causes: Causes = []
    for field in (
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
    ):
        causes += _negative(spec, field)
    causes += _label_causes(spec["template"]["metadata"].get("labels") or {}, "spec.template.labels")
    if len(name) > 63:
        return causes
    if spec["completionMode"] == "Indexed":
        last = f"{name}-{max(0, (spec.get('completions') or 1) - 1)}"
        if len(last) > 63:
            message = f"will not able to create pod with invalid DNS label: {last}"
            causes.append(cause("metadata.name", "FieldValueInvalid", message, f'"{name}"'))
        if spec.get("completions") is None:
            causes.append(cause("spec.completions", "FieldValueRequired", "when completion mode is Indexed"))
    causes += _pod_spec_causes(spec["template"]["spec"], "spec.template.spec")
    return causes + _restart_causes(spec) + _policy_causes(spec)


def _restart_causes(spec: Object) -> Causes:
    field = "spec.template.spec.restartPolicy"
    found = spec["template"]["spec"].get("restartPolicy")
    if found not in {"OnFailure", "Never"}:
        return [cause(field, "FieldValueRequired", 'valid values: "OnFailure", "Never"')]
    if spec.get("podFailurePolicy") and found != "Never":
        message = 'only "Never" is supported when podFailurePolicy is specified'
        return [cause(field, "FieldValueInvalid", message, f'"{found}"')]
    return []


def _policy_causes(spec: Object) -> Causes:
    template = spec["template"]["spec"]
    containers = [*(template.get("initContainers") or []), *(template.get("containers") or [])]
    names = {one["name"] for one in containers}
    causes: Causes = []
    for at, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules") or ()):
        field = f"spec.podFailurePolicy.rules[{at}].onExitCodes"
        exits = rule.get("onExitCodes") or {}
        if exits.get("containerName") not in {None, *names}:
            message = "must be one of the container or initContainer names in the pod template"
            causes.append(
                cause(f"{field}.containerName", "FieldValueInvalid", message, f'"{exits["containerName"]}"')
            )
        for place, code in enumerate(exits.get("values") or ()):
            if code == 0 and exits.get("operator") == "In":
                message = "must not be 0 for the In operator"
                causes.append(cause(f"{field}.values[{place}]", "FieldValueInvalid", message, "0"))
        codes = list(exits.get("values") or ())
        if codes != sorted(codes):  # from the Kubernetes documentation; not recorded
            causes.append(cause(f"{field}.values", "FieldValueInvalid", "must be ordered", str(codes)))
    return causes


def _pod_causes(pod: Object) -> Causes:
    return _pod_spec_causes(pod["spec"], "spec")


def _pod_spec_causes(spec: Object, field: str) -> Causes:
    if not spec.get("containers"):
        return [cause(f"{field}.containers", "FieldValueRequired", "")]
    causes: Causes = []
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    for group in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(group) or ()):
            place = f"{field}.{group}[{at}]"
            causes += _resource_causes(container.get("resources") or {}, f"{place}.resources")
            causes += _image_causes(container, place)
            for number, mount in enumerate(container.get("volumeMounts") or ()):
                if mount["name"] not in volumes:
                    spot = f"{place}.volumeMounts[{number}].name"
                    name = mount["name"]
                    causes.append(
                        {"reason": "FieldValueNotFound", "message": f'Not found: "{name}"', "field": spot}
                    )
    return causes


def _image_causes(container: Object, place: str) -> Causes:
    image = container.get("image") or ""
    if not image:
        return [cause(f"{place}.image", "FieldValueRequired", "")]
    if image != image.strip():
        message = "must not have leading or trailing whitespace"
        return [cause(f"{place}.image", "FieldValueInvalid", message, f'"{image}"')]
    return []


def _resource_causes(resources: Object, field: str) -> Causes:
    causes: Causes = []
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name, text in amounts.items():
            value = quantity(text)
            spot = f"{field}.{part}[{name}]"
            if "/" in name and value != value.to_integral_value():
                causes.append(cause(spot, "FieldValueInvalid", "must be an integer", f'"{said(value)}"'))
            if value < 0:
                causes.append(
                    cause(spot, "FieldValueInvalid", "must be greater than or equal to 0", f'"{text}"')
                )
    for name, text in requests.items():
        if "/" in name and name not in limits:
            message = "Limit must be set for non overcommitable resources"
            causes.append(cause(f"{field}.limits", "FieldValueRequired", message))
        elif name in limits and quantity(text) > quantity(limits[name]):
            message = f"must be less than or equal to {name} limit of {limits[name]}"
            causes.append(cause(f"{field}.requests", "FieldValueInvalid", message, f'"{text}"'))
    return causes


def _blob_causes(item: Object) -> Causes:
    size = sum(len(value) for value in (item.get("data") or {}).values())
    size += sum(len(value) for value in (item.get("binaryData") or {}).values())
    if size > 1024 * 1024:
        return [
            {
                "reason": "FieldValueTooLong",
                "message": "Too long: may not be more than 1048576 bytes",
                "field": "",
            }
        ]
    return []


_JUDGES: dict[str, Callable[[Object], Causes]] = {
    "Job": _job_causes,
    "Pod": _pod_causes,
    "ConfigMap": _blob_causes,
    "Secret": _blob_causes,
}

_SUSPENDED_MAY = ("nodeSelector", "tolerations", "schedulingGates", "affinity")


def validate_job_update(old: Object, fresh: Object) -> None:
    """Refuse changes of immutable fields of a Job (422)."""
    before, after = old["spec"], fresh["spec"]
    causes: Causes = []
    if before.get("completions") != after.get("completions"):
        causes += _completions_causes(before, after)
    for field in ("selector", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "manualSelector"):
        if before.get(field) != after.get(field):
            shown = json.dumps(after.get(field))
            causes.append(cause(f"spec.{field}", "FieldValueInvalid", "field is immutable", shown))
    causes += _template_causes(before, after, suspended=bool(before.get("suspend")))
    if causes:
        raise invalid("Job.batch", old["metadata"]["name"], causes)


def _completions_causes(before: Object, after: Object) -> Causes:
    wanted = str(after.get("completions"))
    if before["completionMode"] != "Indexed":
        return [cause("spec.completions", "FieldValueInvalid", "field is immutable", wanted)]
    if after.get("completions") != after.get("parallelism"):
        message = "can only be modified in tandem with spec.parallelism"
        return [cause("spec.completions", "FieldValueInvalid", message, wanted)]
    return []


def _template_causes(before: Object, after: Object, *, suspended: bool) -> Causes:
    """A suspended Job may change labels, annotations, node selection and requests."""
    old, new = before["template"], after["template"]
    if not suspended:
        if old == new:
            return []
        field = (
            "spec.template"
            if old["spec"].get("containers") == new["spec"].get("containers")
            else "spec.template.spec"
        )
        shown = json.dumps(new if field == "spec.template" else new["spec"])
        return [cause(field, "FieldValueInvalid", "field is immutable", shown)]
    if _frozen(old["spec"]) != _frozen(new["spec"]):
        return [
            cause("spec.template.spec", "FieldValueInvalid", "field is immutable", json.dumps(new["spec"]))
        ]
    return []


def _frozen(spec: Object) -> Object:
    kept = {key: value for key, value in spec.items() if key not in _SUSPENDED_MAY}
    for group in ("containers", "initContainers"):
        kept[group] = [
            {key: value for key, value in container.items() if key != "resources"}
            for container in spec.get(group) or ()
        ]
    return kept


def validate_pod_update(old: Object, fresh: Object) -> None:
    """Refuse changes of a pod's spec except images, deadline, gates and added tolerations (422)."""
    before, after = dict(old["spec"]), dict(fresh["spec"])
    name = old["metadata"]["name"]
    gates = [one["name"] for one in before.get("schedulingGates") or ()]
    for at, one in enumerate(after.get("schedulingGates") or ()):
        if one["name"] not in gates:
            message = f"only deletion is allowed, but found new scheduling gate '{one['name']}'"
            spot = f"spec.schedulingGates[{at}].name"
            raise invalid("Pod", name, [cause(spot, "FieldValueForbidden", message)])
    free = ["schedulingGates", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations"]
    if gates:
        free += ["nodeSelector", "affinity"]
    for part in free:
        before.pop(part, None)
        after.pop(part, None)
    for spec in (before, after):
        for group in ("containers", "initContainers"):
            if group in spec:
                spec[group] = [{**container, "image": ""} for container in spec[group]]
    if before != after:
        message = (
            "pod updates may not change fields other than "
            "`spec.containers[*].image`,`spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
            "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
        )
        raise invalid("Pod", name, [cause("spec", "FieldValueForbidden", message)])
