"""The values that the API server and its admission plugins fill in."""

from __future__ import annotations

import random
import re
from typing import Any

from fakes.kubernetes.objects import Object, stamp

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Source: k8s.io/apimachinery/pkg/util/rand: no vowels, no look-alikes."""


def suffix(length: int = 5) -> str:
    """A random suffix of a name."""
    return "".join(random.choices(_ALPHABET, k=length))


def named(meta: Object) -> None:
    """Derive a name from generateName: 58 characters at most and five random ones."""
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = meta["generateName"][:58] + suffix()


def default_pod_spec(spec: Object, restart_policy: str | None = "Always") -> None:
    """Defaults of the scheme, for pods and templates (without a policy of their own)."""
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        _default_container(container, is_pod=restart_policy is not None)
    if restart_policy:
        spec.setdefault("restartPolicy", restart_policy)
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    for volume in spec.get("volumes") or ():
        _default_volume(volume)


def _default_container(container: Object, *, is_pod: bool) -> None:
    resources = container.setdefault("resources", {})
    if is_pod and resources.get("limits"):
        requests = resources.setdefault("requests", {})
        for name, amount in resources["limits"].items():
            requests.setdefault(name, amount)
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    image = container.get("image", "")
    latest = ":" not in image.rpartition("/")[2] and "@" not in image
    container.setdefault(
        "imagePullPolicy", "Always" if latest or image.endswith(":latest") else "IfNotPresent"
    )
    for entry in container.get("env") or ():
        reference = (entry.get("valueFrom") or {}).get("fieldRef")
        if reference:
            reference.setdefault("apiVersion", "v1")
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")


def _default_volume(volume: Object) -> None:
    if set(volume) == {"name"}:
        volume["emptyDir"] = {}
    for kind in ("configMap", "secret", "projected", "downwardAPI"):
        if isinstance(volume.get(kind), dict):
            volume[kind].setdefault("defaultMode", 420)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")


def default_pod(pod: Object, now: float) -> None:
    """All defaults of a pod at its creation; admission sets the priority."""
    spec = pod["spec"]
    default_pod_spec(spec)
    spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = spec["serviceAccountName"]
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    if spec.get("automountServiceAccountToken") is not False:
        _mount_token(spec)
    _tolerate(spec)
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}
    if spec.get("schedulingGates"):
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "lastProbeTime": None,
                "lastTransitionTime": stamp(now),
                "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates",
            }
        ]


def _tolerate(spec: Object) -> None:
    """Add the 300 s for nodes that are not ready or unreachable, unless the pod sets its own."""
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        for one in tolerations:
            if one.get("key") in {key, None} and one.get("effect") in {"NoExecute", None, ""}:
                break
        else:
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )


def _mount_token(spec: Object) -> None:
    name = f"kube-api-access-{suffix()}"
    if any(volume["name"].startswith("kube-api-access-") for volume in spec.get("volumes") or ()):
        return
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]
    volume = {"name": name, "projected": {"sources": sources, "defaultMode": 420}}
    spec["volumes"] = [*(spec.get("volumes") or []), volume]
    mount = {"name": name, "readOnly": True, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        mounts = container.setdefault("volumeMounts", [])
        if all(one["mountPath"] != mount["mountPath"] for one in mounts):
            mounts.append(dict(mount))


def qos_class(spec: Object) -> str:
    """Quality of service from cpu and memory of all containers."""
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    some, all_equal = False, True
    for container in containers:
        resources = container.get("resources") or {}
        for name in ("cpu", "memory"):
            limit = (resources.get("limits") or {}).get(name)
            request = (resources.get("requests") or {}).get(name)
            some = some or limit is not None or request is not None
            all_equal = all_equal and limit is not None and limit == request
    if not some:
        return "BestEffort"
    return "Guaranteed" if all_equal else "Burstable"


def default_job(job: Object) -> None:
    """All defaults of a Job at its creation; it must have a uid."""
    spec = job["spec"]
    meta = job["metadata"]
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    if spec.get("backoffLimit") is None:
        spec["backoffLimit"] = 2**31 - 1 if spec.get("backoffLimitPerIndex") is not None else 6
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    policy = spec.get("podFailurePolicy")
    spec.setdefault("podReplacementPolicy", "Failed" if policy else "TerminatingOrFailed")
    for rule in (policy or {}).get("rules") or ():
        for one in rule.get("onPodConditions") or ():
            one.setdefault("status", "True")
    labels = {
        "batch.kubernetes.io/controller-uid": meta["uid"],
        "batch.kubernetes.io/job-name": meta["name"],
        "controller-uid": meta["uid"],
        "job-name": meta["name"],
    }
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": meta["uid"]}}
    template = spec.setdefault("template", {})
    template_meta = template.setdefault("metadata", {})
    template_meta["labels"] = {**(template_meta.get("labels") or {}), **labels}
    default_pod_spec(template.setdefault("spec", {}), restart_policy=None)
    meta["labels"] = meta.get("labels") or dict(template_meta["labels"])  # its own replace the template's
    job["status"] = {}


def default_any(item: Object, now: float) -> None:
    """Defaults of the other kinds."""
    kind = item["kind"]
    if kind == "Namespace":
        labels = item["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = item["metadata"]["name"]
        item["spec"] = {"finalizers": ["kubernetes"]}
        item["status"] = {"phase": "Active"}
    elif kind == "Secret":
        item.setdefault("type", "Opaque")
        _encode(item)
    elif kind == "PersistentVolumeClaim":
        item["status"] = {"phase": "Pending"}
    elif kind == "ResourceQuota":
        item.setdefault("status", {})
    elif kind == "Event":
        item.setdefault("firstTimestamp", stamp(now))


def _encode(secret: Object) -> None:
    import base64

    for key, text in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()


def node_defaults(node: Object) -> None:
    """Labels and status that a kubelet would report."""
    name = node["metadata"]["name"]
    labels: dict[str, Any] = node["metadata"].setdefault("labels", {})
    for key, value in (("arch", "amd64"), ("os", "linux"), ("hostname", name)):
        labels.setdefault(f"kubernetes.io/{key}", value)
    node.setdefault("spec", {})
    node.setdefault("status", {})


IMAGE = re.compile(
    r"^(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)
"""A reference that a kubelet can parse (distribution/reference, shortened)."""
