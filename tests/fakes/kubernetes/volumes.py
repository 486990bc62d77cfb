"""Volumes of pods as folders of this machine."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from fakes.kubernetes.environment import field_of
from fakes.kubernetes.objects import Object
from fakes.kubernetes.resources import CONFIG_MAPS, SECRETS
from fakes.kubernetes.store import Store


class UnsupportedError(Exception):
    """A kind of volume that the fake does not support."""


def folder_of(store: Store, pod: Object, volume: Object, state: Path) -> Path:
    """The folder (or file) of *volume*, created and filled at first use; raises UnsupportedError."""
    if volume.get("hostPath"):
        return _host_path(volume["hostPath"])
    if volume.get("persistentVolumeClaim"):
        claim = volume["persistentVolumeClaim"]["claimName"]
        folder = state / "claims" / pod["metadata"]["namespace"] / claim
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = state / "pods" / pod["metadata"]["uid"] / "volumes" / volume["name"]
    if folder.exists():
        return folder
    files = _files(store, pod, volume)
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _host_path(source: Object) -> Path:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise UnsupportedError(f"hostPath {path} does not exist")
    return path


def _files(store: Store, pod: Object, volume: Object) -> dict[str, bytes]:
    if "emptyDir" in volume:
        return {}
    for kind in ("configMap", "secret", "downwardAPI"):
        if volume.get(kind):
            return _projected(store, pod, {kind: volume[kind]})
    if volume.get("projected"):
        found: dict[str, bytes] = {}
        for source in volume["projected"]["sources"]:
            found |= _projected(store, pod, source)
        return found
    kinds = ", ".join(key for key in volume if key != "name")
    raise UnsupportedError(f"volume {volume['name']}: no folder stands for {kinds}")


def _projected(store: Store, pod: Object, source: Object) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    if "configMap" in source:
        item = store.get(CONFIG_MAPS, namespace, source["configMap"]["name"]) or {}
        whole = {key: value.encode() for key, value in (item.get("data") or {}).items()}
        whole |= {key: base64.b64decode(value) for key, value in (item.get("binaryData") or {}).items()}
        return _chosen(whole, source["configMap"].get("items"))
    if "secret" in source:
        name = source["secret"].get("secretName") or source["secret"].get("name")
        item = store.get(SECRETS, namespace, name) or {}
        whole = {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}
        return _chosen(whole, source["secret"].get("items"))
    if "downwardAPI" in source:
        return {
            one["path"]: field_of(pod, one["fieldRef"]["fieldPath"]).encode()
            for one in source["downwardAPI"].get("items") or ()
            if one.get("fieldRef")
        }
    if "serviceAccountToken" in source:
        return {source["serviceAccountToken"]["path"]: b"fake-token"}
    return {}


def _chosen(whole: dict[str, bytes], items: list[Any] | None) -> dict[str, bytes]:
    if not items:
        return whole
    return {one["path"]: whole[one["key"]] for one in items if one["key"] in whole}
