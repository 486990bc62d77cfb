"""The kinds of object that the fake serves, as discovery lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object.

    Attributes:
        subresources: Name to (verbs, kind) as in discovery.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    subresources: tuple[tuple[str, tuple[str, ...], str], ...] = ()

    @property
    def full(self) -> str:
        """Name with its group, as in messages: ``jobs.batch``, ``pods``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def full_kind(self) -> str:
        """Kind with its group, as in validation errors: ``Job.batch``, ``Pod``."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def api_version(self) -> str:
        """``batch/v1`` or ``v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def discovery(self) -> list[dict[str, Any]]:
        """Entries of this resource and its subresources in an APIResourceList."""
        whole: dict[str, Any] = {
            "name": self.plural,
            "singularName": self.kind.lower(),
            "namespaced": self.namespaced,
            "kind": self.kind,
            "verbs": list(self.verbs),
        }
        if self.short:
            whole["shortNames"] = list(self.short)
        if self.plural in {"pods", "jobs", "services"}:
            whole["categories"] = ["all"]
        rest = [
            {
                "name": f"{self.plural}/{name}",
                "singularName": "",
                "namespaced": self.namespaced,
                "kind": kind,
                "verbs": list(verbs),
            }
            for name, verbs, kind in self.subresources
        ]
        return [whole, *rest]


_STATUS = ("get", "patch", "update")


def _status(kind: str) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    return (("status", _STATUS, kind),)


PODS = Resource(
    "",
    "v1",
    "pods",
    "Pod",
    short=("po",),
    subresources=(
        ("binding", ("create",), "Binding"),
        ("eviction", ("create",), "Eviction"),
        ("log", ("get",), "Pod"),
        ("resize", _STATUS, "Pod"),
        ("status", _STATUS, "Pod"),
    ),
)
JOBS = Resource("batch", "v1", "jobs", "Job", subresources=_status("Job"))
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, short=("no",), subresources=_status("Node"))
EVENTS = Resource("", "v1", "events", "Event", short=("ev",))
NAMESPACES = Resource(
    "",
    "v1",
    "namespaces",
    "Namespace",
    namespaced=False,
    short=("ns",),
    verbs=("create", "delete", "get", "list", "patch", "update", "watch"),
    subresources=_status("Namespace"),
)
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", short=("cm",))
QUOTAS = Resource(
    "", "v1", "resourcequotas", "ResourceQuota", short=("quota",), subresources=_status("ResourceQuota")
)
LIMIT_RANGES = Resource("", "v1", "limitranges", "LimitRange", short=("limits",))
SERVICES = Resource("", "v1", "services", "Service", short=("svc",), subresources=_status("Service"))
CLAIMS = Resource(
    "",
    "v1",
    "persistentvolumeclaims",
    "PersistentVolumeClaim",
    short=("pvc",),
    subresources=_status("PersistentVolumeClaim"),
)
ACCOUNTS = Resource(
    "",
    "v1",
    "serviceaccounts",
    "ServiceAccount",
    short=("sa",),
    subresources=(("token", ("create",), "TokenRequest"),),
)
PRIORITIES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False, short=("pc",)
)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_BINDINGS = Resource(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
BUDGETS = Resource(
    "policy",
    "v1",
    "poddisruptionbudgets",
    "PodDisruptionBudget",
    short=("pdb",),
    subresources=_status("PodDisruptionBudget"),
)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
STORAGE_CLASSES = Resource(
    "storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False, short=("sc",)
)
DRIVERS = Resource("storage.k8s.io", "v1", "csidrivers", "CSIDriver", namespaced=False)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
    verbs=("create",),
)
RULES_REVIEWS = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectrulesreviews",
    "SelfSubjectRulesReview",
    namespaced=False,
    verbs=("create",),
)

RESOURCES: tuple[Resource, ...] = (
    PODS, JOBS, NODES, EVENTS, NAMESPACES, SECRETS, CONFIG_MAPS, QUOTAS, LIMIT_RANGES, SERVICES, CLAIMS,
    ACCOUNTS,
    PRIORITIES, ROLES, BINDINGS, CLUSTER_ROLES, CLUSTER_BINDINGS, BUDGETS, LEASES, SLICES, STORAGE_CLASSES,
    DRIVERS,
    ACCESS_REVIEWS, RULES_REVIEWS,
)  # fmt: skip
"""Served from the start; `Cluster.serve` adds custom ones (Kueue's, for example)."""
