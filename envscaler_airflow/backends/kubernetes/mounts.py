"""Paths of a stage's folders in its pod: volumes, and mounts of training and sidecar. Pure."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from envscaler_airflow.backends.kubernetes.names import DELETES_CLAIMS, claim_name, dns_label
from envscaler_airflow.envspec.models import OBJECT_STORES, Volume
from envscaler_airflow.errors import SpecError
from envscaler_airflow.launch import Launch, Paths
from envscaler_airflow.store.outputs import is_output_uri

HOME = "/envscaler"
"""Mounted in the training and the sidecar: agent, spool folder, working directory."""
AGENT = f"{HOME}/agent"
SPOOL = f"{HOME}/spool"
WORK = f"{HOME}/work"
LAYOUT = "/etc/envscaler"
"""Path of ``layout.json`` in the sidecar."""
CACHE = "cache"
INDEX = "/var/lib/envscaler-index"
"""Path of the machine's cache in the sidecar."""
OWN = "/tmp/sidecar"  # noqa: S108  # an emptyDir of the pod
"""Folder for the sidecar's state that the training cannot write."""
SCRATCH = "envscaler"
"""The emptyDir for all of these, and for folders that the training and the sidecar share."""

_IMAGE_FOLDERS = frozenset(
    (
        "/",
        "/app",
        "/bin",
        "/boot",
        "/code",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib64",
        "/media",
        "/mnt",
        "/opt",
        "/proc",
        "/root",
        "/run",
        "/sbin",
        "/src",
        "/srv",
        "/sys",
        "/tmp",  # noqa: S108  # a name, not a file
        "/usr",
        "/usr/local",
        "/var",
        "/var/lib",
        "/workspace",
    )
)
"""Folders with content in images: nothing is mounted over them. Chosen."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A CSI driver that mounts a bucket as a volume of the pod itself.

    Attributes:
        name: Name of its CSIDriver object.
        annotations: Annotations that a pod needs for it.
    """

    name: str
    annotations: Mapping[str, str] = field(default_factory=dict)


GCS_FUSE = Driver("gcsfuse.csi.storage.gke.io", {"gke-gcsfuse/volumes": "true"})
"""Source: Google Kubernetes Engine, Cloud Storage FUSE CSI driver, ephemeral volumes."""
DRIVERS: Mapping[str, Driver] = {"gs": GCS_FUSE, "gcs": GCS_FUSE}
"""CSI drivers by scheme. Drivers that only bind persistent volumes (Mountpoint for S3, OSS) are not included:
use claims for those, ``pvc://``.
"""


def drivers_for(volumes: Iterable[Volume]) -> frozenset[str]:
    """Names of CSI drivers that could mount *volumes*."""
    return frozenset(DRIVERS[volume.kind].name for volume in volumes if volume.kind in DRIVERS)


def _driver(volume: Volume, drivers: Collection[str]) -> Driver | None:
    """The driver that mounts *volume* on a cluster with *drivers*; None without one."""
    driver = DRIVERS.get(volume.kind)
    return driver if driver is not None and driver.name in drivers else None


@dataclass(slots=True)
class Mounts:
    """The volumes and mounts of one pod.

    Attributes:
        volumes: Volumes of the pod.
        training: Mounts of the training's container.
        sidecar: Mounts of the sidecar's container, which prepares what is read-only for the training.
        annotations: Annotations of the pod.
        cache: Folder of every machine that caches copied buckets; None: no cache.
    """

    volumes: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    sidecar: list[dict[str, Any]] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cache: str | None = None

    @property
    def paths(self) -> list[str]:
        """Paths that are mounted in the training's container."""
        return [str(item["mountPath"]) for item in self.training]

    def keep(self, path: str, digest: str) -> None:
        """Mount a folder of the machine's cache, which only the sidecar writes."""
        if not any(volume["name"] == CACHE for volume in self.volumes):
            where = {"path": self.cache, "type": "DirectoryOrCreate"}
            self.volumes.append({"name": CACHE, "hostPath": where})
            self.sidecar.append({"name": CACHE, "mountPath": INDEX, "subPath": "index"})
        mount = {"name": CACHE, "mountPath": path, "subPath": f"data/{digest}"}
        self.sidecar.append(mount)
        self.training.append({**mount, "readOnly": True})

    def share(self, path: str, *, read_only: bool = False) -> None:
        """Mount a folder of the scratch volume in both containers, under the same path."""
        mount = {"name": SCRATCH, "mountPath": path, "subPath": "root" + path}
        self.sidecar.append(mount)
        self.training.append({**mount, "readOnly": True} if read_only else mount)


def cache_key(volume: Volume) -> str | None:
    """Its folder in a machine's cache; None for volumes without one: writable ones, stages' outputs."""
    is_bucket = volume.kind in OBJECT_STORES and not is_output_uri(volume.source)
    if not is_bucket or not volume.is_read_only:
        return None
    return hashlib.sha256(volume.source.encode()).hexdigest()[:32]


def mounts_of(
    paths: Paths,
    *,
    run: str = "",
    drivers: Collection[str] = (),
    cache: str | None = None,
) -> Mounts:
    """Volumes and mounts of a stage, without ``/dev/shm`` and what the deployment adds.

    Args:
        paths: What the training reads and writes.
        run: Hash of the run, for claims that are deleted with it.
        drivers: CSI drivers that the cluster has.
        cache: Folder of every machine that caches copied buckets.

    Raises:
        SpecError: A source that is not available here, or a path directly below the root.
    """
    found = Mounts(volumes=[{"name": SCRATCH, "emptyDir": {}}], cache=cache)
    home = {"name": SCRATCH, "mountPath": HOME, "subPath": "home"}
    found.training.append(home)
    found.sidecar.append(home)
    for index, volume in enumerate(paths.volumes):
        _volume(found, index, volume, run, drivers)
    for output, path in sorted(paths.outputs.items()):
        _shared(found, f"outputs.{output}", path)
    if paths.checkpoint:
        _shared(found, "checkpoint.path", paths.checkpoint)
    return found


def _volume(found: Mounts, index: int, volume: Volume, run: str, drivers: Collection[str]) -> None:
    path, read_only = volume.mount_path, volume.is_read_only
    if volume.kind == "hdfs":
        raise SpecError(
            f"volumes.{volume.name}: {volume.source}: HDFS is not mounted on Kubernetes; "
            "write pvc://claim or nfs://host/path"
        )
    name, driver = dns_label(f"v{index}-{volume.name}"), _driver(volume, drivers)
    if volume.is_copied and driver is None:
        digest = cache_key(volume) if found.cache else None
        if digest is not None:
            found.keep(path, digest)
        else:
            found.share(path, read_only=read_only)
        return
    if driver is not None:
        found.annotations |= driver.annotations
        found.volumes.append({"name": name, "csi": _csi(driver, volume)})
    elif volume.kind == "pvc":
        claim = {"claimName": claim_name(volume, run)} | ({"readOnly": True} if read_only else {})
        found.volumes.append({"name": name, "persistentVolumeClaim": claim})
    else:
        found.volumes.append({"name": name, **_source(volume)})
    mount = {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
    found.training.append(mount)
    found.sidecar.append(mount)


def _csi(driver: Driver, volume: Volume) -> dict[str, Any]:
    bucket, _, folder = volume.location.partition("/")
    options = "implicit-dirs" + (f",only-dir={folder.rstrip('/')}" if folder.strip("/") else "")
    attributes = {"bucketName": bucket, "mountOptions": options}
    return {"driver": driver.name, "readOnly": volume.is_read_only, "volumeAttributes": attributes}


def _source(volume: Volume) -> dict[str, Any]:
    if volume.kind == "hostPath":
        kind = "Directory" if volume.is_read_only else "DirectoryOrCreate"
        return {"hostPath": {"path": volume.location, "type": kind}}
    flag = {"readOnly": True} if volume.is_read_only else {}
    server, _, path = volume.location.partition("/")
    return {"nfs": {"server": server, "path": f"/{path}", **flag}}


def claims_of(volumes: Iterable[Volume], *, run: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Claims to create if they do not exist; those that are deleted with the run have its *labels*."""
    made = []
    for volume in volumes:
        if not volume.is_made:
            continue
        metadata: dict[str, Any] = {"name": claim_name(volume, run)}
        if volume.retain == "run":
            metadata["labels"] = dict(labels)
        spec_of = {"accessModes": [volume.access_mode], "resources": {"requests": {"storage": volume.size}}}
        if volume.storage_class:
            spec_of["storageClassName"] = volume.storage_class
        made.append(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec_of}
        )
    return made


def holds_s(job: Mapping[str, Any], ttl_s: int) -> int:
    """How long an ended *job* stays for the claims of its run, seconds: a later attempt may need the data.

    A Job whose nodes all succeeded is the last of its run, and keeps nothing for others.
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    is_complete = any(one["type"] == "Complete" and one["status"] == "True" for one in conditions)
    holds = (job["metadata"].get("annotations") or {}).get(DELETES_CLAIMS) == "true"
    return ttl_s if holds and not is_complete else 0


def _shared(found: Mounts, what: str, path: str) -> None:
    """Mount the parent folder of *path*, so that the training may replace *path* itself."""
    path = posixpath.normpath(path)
    if any(_is_within(path, mounted) for mounted in found.paths):
        return
    parent = posixpath.dirname(path)
    if parent not in _IMAGE_FOLDERS and not any(_is_within(mounted, parent) for mounted in found.paths):
        found.share(parent)
    elif PurePosixPath(path).suffix and what.startswith("outputs."):
        raise SpecError(
            f"{what}: {path} is in a folder of the image; write a folder of its own, such as /output/..."
        )
    else:
        found.share(path)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def layout_of(
    launch: Launch,
    store_options: Mapping[str, Any],
    *,
    drivers: Collection[str] = (),
    cache: str | None = None,
) -> dict[str, Any]:
    """``layout.json``: what the sidecar copies in and uploads."""
    copied = [item for item in launch.paths.volumes if item.is_copied and _driver(item, drivers) is None]
    return (
        launch.layout()
        | {
            "work": WORK,
            "mounts": [
                {
                    "name": volume.name,
                    "source": volume.source,
                    "path": volume.mount_path,
                    "read_only": volume.is_read_only,
                }
                | ({"index": f"{INDEX}/{key}.json"} if cache and (key := cache_key(volume)) else {})
                for volume in copied
            ],
            "store_options": dict(store_options),
            "private_folder": OWN,
        }
        | ({"processes_per_node": launch.processes_per_node} if launch.max_nodes is not None else {})
    )
