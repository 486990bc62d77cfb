"""The rights that a cluster's owner grants: ``rbac.yaml``, for one namespace and account. Pure."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

_CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


def rbac(
    namespace: str, *, account: str = "envscaler", nodes: bool = True, all_pods: bool = False
) -> list[dict[str, Any]]:
    """Objects that let *account* run stages in *namespace*.

    Args:
        namespace: Where stages run.
        account: Name of the service account.
        nodes: False leaves out the right to read nodes: ``cluster_prices`` then lists the available ones.
        all_pods: True adds the right to list the pods of the whole cluster, for one that adds no nodes.
    """
    shipped = [one for one in _documents("rbac.yaml") if nodes or one["kind"] not in _CLUSTER_WIDE]
    found = []
    for document in shipped + (_documents("rbac_all_pods.yaml") if all_pods else []):
        is_cluster_wide = document["kind"] in _CLUSTER_WIDE
        if not is_cluster_wide:
            document["metadata"]["namespace"] = namespace
        if document["kind"] == "ServiceAccount":
            document["metadata"]["name"] = account
        if document["kind"] == "ClusterRoleBinding":
            document["metadata"]["name"] += f"-{namespace}"
        for subject in document.get("subjects") or ():
            subject.update(name=account, namespace=namespace)
        found.append(document)
    return found


def _documents(name: str) -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))
