"""Where the demo's stages run: on this machine, or on a cluster."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from envscaler_airflow.backends.kubernetes import BACKEND, names
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.catalog.packaged import scaled_price, shadow_offer
from envscaler_airflow.cli.backends import settings_of
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.run import Handle
from envscaler_airflow.store.run_store import Store, check_store, open_store

CPUS = (1, 2)
"""Sizes of pods that the training may have. Chosen: what it can use, and what a laptop's cluster has."""
GIB_PER_CPU = 2.0
"""Memory of such a pod for each CPU. Chosen: the training needs 1 GiB."""

_NEEDED = {
    "ENVSCALER_STORE_URL": "a run store that this machine and the pods reach",
    "ENVSCALER_DEMO_IMAGE": "an image with python3, numpy and many other packages",
}
"""Variables without which the demo cannot run on a cluster."""


class Place(Protocol):
    """What the demo has to know of where its stages run.

    Attributes:
        compute: The backend's name.
        deployment: Name of this demo in the store.
        store: Run store of the stages.
        notes: What a person should know of it before it begins.
    """

    compute: str
    deployment: str
    store: Store
    notes: tuple[str, ...]

    def config(self) -> dict[str, Mapping[str, str]]:
        """Settings of the demo's Airflow."""

    def lose(self, handle: Handle) -> str:
        """Remove the machine of an attempt; return a human-readable description."""

    def close(self) -> None:
        """Leave nothing that runs."""


class ThisMachine:
    """Processes below the demo's home; they end with it."""

    compute = "local"
    deployment = "local"
    notes: tuple[str, ...] = ()
    store: Store

    def __init__(self, home: Path) -> None:
        """Nothing is started."""
        self.store = open_store(str(home / "store"))
        self._backend = LocalBackend(home / "local")

    def config(self) -> dict[str, Mapping[str, str]]:
        """What the demo's Airflow has by itself."""
        return {}

    def lose(self, handle: Handle) -> str:
        """As a spot loss: SIGKILL to all of it, without notice."""
        self._backend.take_away(handle)
        return "took the machine of attempt {attempt} away at step {step}"

    def close(self) -> None:
        """Its processes are ended with the demo's Airflow."""


class OnCluster:
    """Pods of the kubeconfig's current context, with the same variables as `envscaler submit`."""

    compute = "kubernetes"
    deployment: str
    notes: tuple[str, ...]
    store: Store

    def __init__(self) -> None:
        """Check what is given; nothing is made.

        Raises:
            SpecError: A variable is missing, or the cluster cannot be used.
        """
        missing = [f"{name}: {what}" for name, what in _NEEDED.items() if not os.environ.get(name)]
        if missing:
            raise SpecError("the demo on Kubernetes needs\n  " + "\n  ".join(missing))
        self.store = open_store(os.environ["ENVSCALER_STORE_URL"])
        check_store(self.store)
        self.deployment = f"demo-{uuid.uuid4().hex[:8]}"
        self.settings = _settings(self.store, os.environ["ENVSCALER_DEMO_IMAGE"])
        self._backend = KubernetesBackend(**self.settings)
        self.notes = (
            f"stages run as pods of {self._backend.cluster.host}, namespace {self._backend.namespace}",
            *(("prices of pods are those of the nearest published cloud type",) if self._is_shadow else ()),
        )

    @property
    def _is_shadow(self) -> bool:
        return any(str(item.get("name", "")).startswith("cpu-") for item in self.settings["cluster_prices"])

    def config(self) -> dict[str, Mapping[str, str]]:
        """Store, deployment and cluster."""
        return {
            "envscaler": {
                "store_url": self.store.url,
                "deployment": self.deployment,
                "kubernetes": json.dumps(self.settings),
            }
        }

    def lose(self, handle: Handle) -> str:
        """Evict its pods, as a drained node does."""
        for _, pod in self._backend.pods(handle):
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            metadata = {"name": name, "namespace": namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            self._backend.cluster.create(names.pods(namespace, name, "eviction"), body)
        return "evicted the pod of attempt {attempt} at step {step}"

    def close(self) -> None:
        """Remove every Job of this demo, its pods with it; as far as the cluster answers."""
        with suppress(EnvScalerError):
            for job in self._backend.jobs():
                prefix = (job["metadata"].get("annotations") or {}).get(names.PREFIX, "")
                if prefix.startswith(f"{self.deployment}/"):
                    path = names.jobs(self._backend.namespace, job["metadata"]["name"])
                    self._backend.cluster.delete(path, uid=job["metadata"]["uid"])


def _settings(store: Store, image: str) -> dict[str, Any]:
    """Of the Kubernetes backend: what the environment and its ENVSCALER_CONFIG say, over the demo's own."""
    config = os.environ.get("ENVSCALER_CONFIG")
    own: dict[str, Any] = {"cluster_prices": _classes(), "sidecar_image": image}
    if store.url.startswith("file://"):
        folder = store.url.removeprefix("file://")
        own |= {"store_volume": {"hostPath": {"path": folder}}, "store_mount": folder}
    return own | settings_of(BACKEND, Path(config) if config else None, {"image": image})


def _classes() -> list[dict[str, Any]]:
    """Pods of one and of two CPUs, priced as the nearest cloud type."""
    shadow = shadow_offer(max(CPUS), GIB_PER_CPU * max(CPUS))
    classes = []
    for cpus in CPUS:
        price = None if shadow is None else scaled_price(shadow, vcpus=cpus)
        known = {} if price is None else {"usd_per_hour": price}
        classes.append({"name": f"cpu-{cpus}", "vcpus": cpus, "memory_gib": GIB_PER_CPU * cpus, **known})
    return classes
