"""The rights that a cluster's owner grants: ``rbac.yaml``, for one namespace and account. Pure."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

_CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


def rbac(namespace: str, *, account: str = "envscaler", nodes: bool = True) -> list[dict[str, Any]]:
    """Objects that let *account* run stages in *namespace*.

    Args:
        namespace: Where stages run.
        account: Name of the service account.
        nodes: False leaves out the right to read nodes: ``cluster_prices`` then says what can be had.
    """
    text = resources.files(__package__).joinpath("rbac.yaml").read_text(encoding="utf-8")
    found = []
    for document in yaml.safe_load_all(text):
        is_cluster_wide = document["kind"] in _CLUSTER_WIDE
        if is_cluster_wide and not nodes:
            continue
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
