"""Paths of a stage's folders in its pod: volumes, and mounts of training and sidecar. Pure."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from envscaler_airflow.backends.kubernetes.names import HOLDS, claim_name, dns_label
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
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
_PLACES = ("pvc", "nfs", "hostPath")
"""Sources that Kubernetes mounts itself; any other is copied in."""
_READ = "ReadOnly"


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


def drivers_for(spec: Mapping[str, Any]) -> frozenset[str]:
    """Names of CSI drivers that could mount the spec's volumes."""
    kinds = (str(volume.get("source") or "").partition(":")[0] for volume in spec.get("volumes") or ())
    return frozenset(DRIVERS[kind].name for kind in kinds if kind in DRIVERS)


def _driver(kind: str, drivers: Collection[str]) -> Driver | None:
    """The driver that mounts a source of that scheme on a cluster with *drivers*; None: it is copied."""
    driver = DRIVERS.get(kind)
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


def cache_key(volume: Mapping[str, Any]) -> str | None:
    """Its folder in a machine's cache; None for volumes without one: writable ones, stages' outputs."""
    source, mode = str(volume["source"]), str(volume.get("access_mode") or "")
    is_bucket = "://" in source and not source.startswith("file:") and not is_output_uri(source)
    if not is_bucket or not mode.startswith(_READ):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def mounts_of(
    spec: Mapping[str, Any],
    *,
    run: str = "",
    drivers: Collection[str] = (),
    cache: str | None = None,
) -> Mounts:
    """Volumes and mounts of a stage, without ``/dev/shm`` and what the deployment adds.

    Args:
        spec: The frozen spec.
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
    for index, volume in enumerate(spec.get("volumes") or ()):
        _volume(found, index, volume, run, drivers)
    for what, path in shared_paths(spec):
        _shared(found, what, path)
    return found


def shared_paths(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(field, path)`` of what the sidecar uploads from the training: outputs and checkpoints."""
    paths = [(f"outputs.{name}", str(path)) for name, path in sorted((spec.get("outputs") or {}).items())]
    checkpoint = (spec.get("checkpoint") or {}).get("path")
    return paths + ([("checkpoint.path", str(checkpoint))] if checkpoint else [])


def _volume(found: Mounts, index: int, volume: Mapping[str, Any], run: str, drivers: Collection[str]) -> None:
    path, source = str(volume["mount_path"]), str(volume.get("source") or "")
    read_only = volume.get("access_mode") in ("ReadOnly", "ReadOnlyMany")
    kind = source.partition(":")[0]
    if kind == "hdfs":
        raise SpecError(
            f"volumes.{volume['name']}: {source}: HDFS is not mounted on Kubernetes; "
            "write pvc://claim or nfs://host/path"
        )
    name, driver = dns_label(f"v{index}-{volume['name']}"), _driver(kind, drivers)
    if kind not in _PLACES and driver is None:
        digest = cache_key(volume) if found.cache else None
        if digest is not None:
            found.keep(path, digest)
        else:
            found.share(path, read_only=read_only)
        return
    if driver is not None:
        found.annotations |= driver.annotations
        found.volumes.append({"name": name, "csi": _csi(driver, source, read_only=read_only)})
    elif kind == "pvc":
        claim = {"claimName": claim_name(volume, run)} | ({"readOnly": True} if read_only else {})
        found.volumes.append({"name": name, "persistentVolumeClaim": claim})
    else:
        found.volumes.append({"name": name, **_source(kind, source, read_only=read_only)})
    mount = {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
    found.training.append(mount)
    found.sidecar.append(mount)


def _csi(driver: Driver, source: str, *, read_only: bool) -> dict[str, Any]:
    bucket, _, folder = source.partition("://")[2].partition("/")
    options = "implicit-dirs" + (f",only-dir={folder.rstrip('/')}" if folder.strip("/") else "")
    attributes = {"bucketName": bucket, "mountOptions": options}
    return {"driver": driver.name, "readOnly": read_only, "volumeAttributes": attributes}


def _source(kind: str, source: str, *, read_only: bool) -> dict[str, Any]:
    place = source.partition(":")[2]
    if kind == "hostPath":
        path = "/" + place.lstrip("/")
        return {"hostPath": {"path": path, "type": "Directory" if read_only else "DirectoryOrCreate"}}
    flag = {"readOnly": True} if read_only else {}
    server, _, path = place.removeprefix("//").partition("/")
    return {"nfs": {"server": server, "path": f"/{path}", **flag}}


def claims_of(spec: Mapping[str, Any], *, run: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Claims to create if they do not exist; those that are deleted with the run have its *labels*."""
    made = []
    for volume in spec.get("volumes") or ():
        mode = str(volume.get("access_mode") or "ReadWriteOnce")
        if (
            not str(volume.get("source")).startswith("pvc:")
            or not volume.get("size")
            or mode.startswith(_READ)
        ):
            continue
        metadata: dict[str, Any] = {"name": claim_name(volume, run)}
        if volume.get("retain") == "run":
            metadata["labels"] = dict(labels)
        spec_of = {"accessModes": [mode], "resources": {"requests": {"storage": str(volume["size"])}}}
        if volume.get("storage_class"):
            spec_of["storageClassName"] = str(volume["storage_class"])
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
    holds = (job["metadata"].get("annotations") or {}).get(HOLDS) == "true"
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
            f"{what}: {path} lies in a folder of the image; write a folder of its own, such as /output/..."
        )
    else:
        found.share(path)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def layout_of(
    spec: Mapping[str, Any],
    command: list[str],
    store_options: Mapping[str, Any],
    *,
    drivers: Collection[str] = (),
    cache: str | None = None,
) -> dict[str, Any]:
    """``layout.json``: what the sidecar copies in and uploads."""
    checkpoint = (spec.get("checkpoint") or {}).get("path")
    copied = [
        volume
        for volume in spec.get("volumes") or ()
        if volume.get("source")
        and (kind := str(volume["source"]).partition(":")[0]) not in _PLACES
        and _driver(kind, drivers) is None
    ]
    return {
        "work": WORK,
        "mounts": [
            {
                "name": volume["name"],
                "source": volume["source"],
                "path": str(volume["mount_path"]),
                "read_only": volume.get("access_mode") in ("ReadOnly", "ReadOnlyMany"),
            }
            | ({"index": f"{INDEX}/{key}.json"} if cache and (key := cache_key(volume)) else {})
            for volume in copied
        ],
        "outputs": {name: str(path) for name, path in (spec.get("outputs") or {}).items()},
        "checkpoint_path": str(checkpoint) if checkpoint else None,
        "command": command,
        "store_options": dict(store_options),
        "own": OWN,
    } | _processes(spec)


def _processes(spec: Mapping[str, Any]) -> dict[str, int]:
    """From this the sidecar computes how many nodes saved a checkpoint, where their number changes."""
    if not (spec.get("distributed") or {}).get("elastic"):
        return {}
    return {"processes_per_node": EnvSpec.from_dict(spec).processes_per_node}
