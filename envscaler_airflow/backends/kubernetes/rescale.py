"""The number of pods of a running Job, changed in place. Pure.

Source: Kubernetes, elastic Indexed Jobs: completions and parallelism change together, and the highest
indexes go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.errors import BackendError


def node_bound(spec: Mapping[str, Any], nodes: int) -> int:
    """Most nodes that an attempt begun on *nodes* may have: more only where its launcher is elastic."""
    if not (spec.get("distributed") or {}).get("elastic"):
        return nodes
    scaling, asked = spec.get("scaling") or {}, spec.get("num_nodes") or {}
    most = scaling.get("max_nodes") or (asked.get("max") if isinstance(asked, Mapping) else asked)
    return max(nodes, int(most or nodes))


LEAVING_TAINTS = frozenset(
    ("ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler", "karpenter.sh/disrupted")
)
"""Taints of nodes that are about to go. Source: Cluster Autoscaler FAQ; Karpenter, disruption."""


def is_removable(pod: Mapping[str, Any], node: Mapping[str, Any] | None) -> bool:
    """True for a pod that is marked, or whose *node* takes no new pods or is about to go."""
    annotations = pod["metadata"].get("annotations") or {}
    if annotations.get(names.REMOVABLE) == "true":
        return True
    spec = (node or {}).get("spec") or {}
    taints = {taint.get("key") for taint in spec.get("taints") or ()}
    return bool(spec.get("unschedulable")) or not taints.isdisjoint(LEAVING_TAINTS)


def rescale_patch(job: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """What lets *job* have *nodes* pods.

    Raises:
        BackendError: It was not made to have so many.
    """
    metadata = job["metadata"]
    most = int((metadata.get("labels") or {}).get(names.MOST) or 0)
    if not 1 <= nodes <= most:
        raise BackendError(f"{metadata['name']}: {nodes} nodes: it was made for {most or 'a fixed number'}")
    return {
        "metadata": {"uid": metadata["uid"], "labels": {names.NODES: str(nodes)}},
        "spec": {"completions": nodes, "parallelism": nodes},
    }
