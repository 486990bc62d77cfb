"""What the containers of a pod may do, and which credentials each has. Pure.

The training runs arbitrary code: it gets no token of the cluster, no key of the store and no identity of the
cloud. Only the sidecar gets these.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.envspec.models import Volume
from envscaler_airflow.errors import SpecError

_CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


def rbac(
    namespace: str, *, account: str = "envscaler", nodes: bool = True, all_pods: bool = False
) -> list[dict[str, Any]]:
    """Objects that let *account* run stages in *namespace*.

    Args:
        namespace: Where stages run.
        account: Name of the service account.
        nodes: False leaves out the right to read nodes: ``cluster_prices`` then lists the available ones.
        all_pods: True adds the right to list the pods of the whole cluster, for a cluster that adds no nodes.
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


STORE_KEYS = "/etc/envscaler-store-keys"
"""Path of the run store's keys in the sidecar, a file for each variable."""
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105  # a folder
"""Where client libraries look for a pod's token. Source: Kubernetes, "Access the API from a pod"."""
TOKEN_S = 3607
"""Lifetime of the token, seconds. Source: Kubernetes gives it to tokens that it mounts by itself; the kubelet
renews it at 80 % of that."""
OF_STORE = "store."
"""Prefix of the store's keys in the Secret of an attempt; no name of a variable contains a dot."""
_INSTEAD = "set service_account or store_secret of the cluster, by which its pods reach the run store"
_FILES_OF_OTHERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
"""Capabilities that root in an image expects for files and users: unpack archives, install packages, write
into volumes of other users. Chosen; all are among those of the "baseline" pod security standard.
"""


def pod_security(user: int | None) -> dict[str, Any]:
    """Security context of all containers, including those that a pod override adds."""
    seccomp: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is None:
        return seccomp
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user, **seccomp}


def main_security(user: int | None, *, read_only_root: bool = False) -> dict[str, Any]:
    """For the training: no capability with a *user* of the deployment, else those over files."""
    added = {} if user is not None else {"add": list(_FILES_OF_OTHERS)}
    root = {"readOnlyRootFilesystem": True} if read_only_root else {}
    return {"allowPrivilegeEscalation": False, **root, "capabilities": {"drop": ["ALL"], **added}}


def agent_security(user: int | None, *, reads_training: bool) -> dict[str, Any]:
    """For the sidecar and the installer.

    Without *user* the training's files belong to the user of its image, which is not known in advance. So the
    sidecar, which must read and remove them, is root with the capability over files and no other.
    """
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if user is None:
        context["runAsUser"] = 0
        if reads_training:
            context["capabilities"] = {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
    return context


def own_identity(skipped: Sequence[str]) -> dict[str, str]:
    """Annotations that make the clouds' webhooks give the containers *skipped* no identity of the pod.

    Source: amazon-eks-pod-identity-webhook (IRSA and EKS Pod Identity), "skip-containers", separated by
    commas; azure-workload-identity, "Service account labels and annotations", separated by semicolons. GKE
    has none: its metadata server answers every container of a pod.
    """
    return {
        "eks.amazonaws.com/skip-containers": ",".join(skipped),
        "azure.workload.identity/skip-containers": ";".join(skipped),
    }


def token_volume() -> dict[str, Any]:
    """The service account's token as Kubernetes itself would mount it, for the sidecar only."""
    sources: list[dict[str, Any]] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    return {"name": "token", "projected": {"sources": sources}}


def keys_volume(secret: str, names: Iterable[str] = ()) -> dict[str, Any]:
    """The Secret with the store's keys as files, which a link to ``/proc/self/environ`` cannot expose.

    *names* are those of a connection in the Secret of an attempt; () for a Secret without other keys.
    """
    items = [{"key": OF_STORE + name, "path": name} for name in sorted(names)]
    chosen = {"items": items} if items else {}
    return {"name": "store-keys", "secret": {"secretName": secret, "defaultMode": 0o400, **chosen}}


def store_keys(login: StoreLogin, settings: Settings) -> Mapping[str, str]:
    """Keys of the store's connection that a pod's sidecar needs; {} if pods have their own identity.

    Raises:
        SpecError: It could not open the store.
    """
    if settings.service_account or settings.store_secret:
        return {}
    login.check(_INSTEAD)
    if login.profile:
        raise SpecError(f"profile_name {login.profile!r} names files that a pod does not have: {_INSTEAD}")
    return login.variables


@dataclass(frozen=True, slots=True)
class StoreFolders:
    """Folders of a run store in a volume that one pod needs.

    Attributes:
        mount: Where the whole volume would be mounted.
        store_url: URL of the store.
        prefix: The run's own folder.
        read: URIs that the stage reads: outputs of earlier stages, a checkpoint of another run.
    """

    mount: str
    store_url: str
    prefix: str
    read: Sequence[str] = ()

    def mounts(self) -> list[dict[str, Any]]:
        """The run's own folder, and read-only those of the runs that it reads; else the whole volume.

        The whole volume is mounted if the store's URL is outside the volume.
        """
        own = self._below(f"{self.store_url.rstrip('/')}/{self.prefix}")
        if own is None:
            return [{"name": "store", "mountPath": self.mount}]
        others = {below for uri in self.read if (below := self._below(uri)) is not None}
        others -= {below for below in others if below == own or below.startswith(f"{own}/")}
        return [
            self._mount(own),
            *({**self._mount(below), "readOnly": True} for below in sorted(others)),
        ]

    def _below(self, uri: str) -> str | None:
        """The folder of *uri* in the volume; None when it is elsewhere, or is the volume itself."""
        path = posixpath.normpath(uri.removeprefix("file://"))
        root = self.mount.rstrip("/") + "/"
        return path[len(root) :] if path.startswith(root) else None

    def _mount(self, below: str) -> dict[str, Any]:
        return {"name": "store", "mountPath": posixpath.join(self.mount, below), "subPath": below}


def read_uris(volumes: Iterable[Volume], restore_from: str | None) -> list[str]:
    """URIs that a stage reads and that may be in the store of another run."""
    sources = [volume.source for volume in volumes]
    return [uri for uri in (*sources, restore_from or "") if uri.startswith(("file://", "/"))]
