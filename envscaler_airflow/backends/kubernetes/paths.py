"""Paths of the API server. Pure."""

from __future__ import annotations


def jobs(namespace: str, name: str = "") -> str:
    """Jobs of a namespace, or one of them."""
    return _join(f"/apis/batch/v1/namespaces/{namespace}/jobs", name)


def pods(namespace: str, name: str = "", part: str = "") -> str:
    """Pods of a namespace, one of them, or its ``status``, ``log``, ``resize``."""
    return _join(f"/api/v1/namespaces/{namespace}/pods", name, part)


def all_pods() -> str:
    """Pods of all namespaces."""
    return "/api/v1/pods"


def config_maps(namespace: str, name: str = "") -> str:
    """ConfigMaps of a namespace, or one of them."""
    return _join(f"/api/v1/namespaces/{namespace}/configmaps", name)


def secrets(namespace: str, name: str = "") -> str:
    """Secrets of a namespace, or one of them."""
    return _join(f"/api/v1/namespaces/{namespace}/secrets", name)


def claims(namespace: str, name: str = "") -> str:
    """Persistent volume claims of a namespace, or one of them."""
    return _join(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", name)


def drivers(name: str = "") -> str:
    """CSI drivers of the cluster, or one of them."""
    return _join("/apis/storage.k8s.io/v1/csidrivers", name)


def events(namespace: str) -> str:
    """Events of a namespace."""
    return f"/api/v1/namespaces/{namespace}/events"


def nodes(name: str = "") -> str:
    """Nodes of the cluster, or one of them."""
    return _join("/api/v1/nodes", name)


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
