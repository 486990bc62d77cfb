"""The cluster for tests of stages, and what the tests do there, without a dependency on the fake."""

import os
import threading
import time
import uuid
from pathlib import Path

import attempts
import pytest
import yaml

from envscaler_agent.protocol import Control
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import RefusedError
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.run import Actor
from envscaler_airflow.store import RunKey, check_store, open_store
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run

NEEDED = ("KUBECONFIG", "ENVSCALER_IMAGE", "ENVSCALER_STORE_URL")
LOGIN = "envscaler-test-store"
"""Secret with the AWS variables of this process, for sidecars."""


class Place:
    """A namespace of a cluster, a run store that its pods reach, and an image with Python."""

    def __init__(self, backend, store_url, image):
        """Use the existing cluster, store and image."""
        self.backend = backend
        self.store = open_store(store_url)
        check_store(self.store)
        self.image = image
        self._made = None

    @classmethod
    def of_environment(cls):
        """From KUBECONFIG, ENVSCALER_IMAGE, ENVSCALER_STORE_URL and optional variables; otherwise skips."""
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            pytest.skip(f"no cluster: {', '.join(missing)} not set; see tests/e2e/kubernetes/README.md")
        image, url = os.environ["ENVSCALER_IMAGE"], os.environ["ENVSCALER_STORE_URL"]
        settings = {
            "namespace": os.environ.get("ENVSCALER_NAMESPACE", "default"),
            "sidecar_image": os.environ.get("ENVSCALER_SIDECAR_IMAGE", image),
            "image": image,
            "wait_for_node_s": 0,
        }
        if os.environ.get("ENVSCALER_NODE"):
            settings["node_selector"] = {"kubernetes.io/hostname": os.environ["ENVSCALER_NODE"]}
        if url.startswith("file://"):
            folder = url.removeprefix("file://")
            settings |= {"store_volume": {"hostPath": {"path": folder}}, "store_mount": folder}
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            settings["store_secret"] = LOGIN
        if os.environ.get("ENVSCALER_CONFIG"):
            settings |= yaml.safe_load(Path(os.environ["ENVSCALER_CONFIG"]).read_text(encoding="utf-8"))
        backend = KubernetesBackend(kubeconfig=os.environ["KUBECONFIG"], **settings)
        place = cls(backend, url, image)
        place.move_in()
        place.log_in()
        return place

    def move_in(self):
        """Create the namespace if it does not exist, and wait for the account that its pods run as.

        Kubernetes takes a while to delete the one of the previous module.
        """
        cluster, name = self.backend.cluster, self.backend.namespace
        until = time.monotonic() + 180
        while (found := cluster.find(f"/api/v1/namespaces/{name}")) is not None:
            if found.body["status"].get("phase") != "Terminating":
                break
            assert time.monotonic() < until, f"{name}: is still being removed"
            time.sleep(1)
        if found is None:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self._made = cluster.create("/api/v1/namespaces", body)["metadata"]["uid"]
        until = time.monotonic() + 30
        while cluster.find(f"/api/v1/namespaces/{name}/serviceaccounts/default") is None:
            assert time.monotonic() < until, f"{name}: no service account 'default'"
            time.sleep(0.2)

    def log_in(self):
        """Give sidecars the credentials of this process, if it has any."""
        values = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if self.backend.settings.store_secret != LOGIN:
            return
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": LOGIN}, "stringData": values}
        try:
            self.backend.cluster.create(names.secrets(self.backend.namespace), body)
        except RefusedError as err:
            if err.status != 409:
                raise
            self.backend.cluster.patch(names.secrets(self.backend.namespace, LOGIN), body)

    def run(self, script, **fields):
        """A run of *script* (Python), not started yet; *fields* are of the spec."""
        spec = {
            "version": "v1",
            "name": "stage",
            "base": {"image": self.image},
            "resources": {"requests": {"cpu": "200m", "memory": "128Mi"}},
            "entrypoint": ["python3", "-c", script],
            **fields,
        }
        return ClusterRun(self, EnvSpec.from_dict(spec))

    def pods(self):
        """Pods of this namespace that belong to envscaler."""
        query = {"labelSelector": f"{names.MANAGED_BY}={names.MANAGER}"}
        return self.backend.cluster.list(names.pods(self.backend.namespace), query).body["items"]

    def jobs(self):
        """Jobs of this namespace that the tests created: those of their store."""
        found = self.backend.jobs()
        return [job for job in found if job["metadata"]["annotations"].get(names.STORE) == self.store.url]

    def delete(self, job):
        """Remove a Job and what it owns."""
        metadata = job["metadata"]
        path = names.jobs(metadata["namespace"], metadata["name"])
        self.backend.cluster.delete(path, uid=metadata["uid"])

    def kill(self, pod):
        """End a pod now."""
        metadata = pod["metadata"]
        path = names.pods(metadata["namespace"], metadata["name"])
        self.backend.cluster.delete(path, uid=metadata["uid"], grace_s=1)

    def clear(self):
        """Delete the Jobs and pods that the tests created."""
        hashes = set()
        for job in self.jobs():
            hashes.add(job["metadata"]["labels"][names.RUN])
            self.delete(job)
        left = [pod for pod in self.pods() if pod["metadata"]["labels"].get(names.RUN) in hashes]
        for pod in left:
            self.kill(pod)
        self.wait_for_no({pod["metadata"]["uid"] for pod in left})

    def wait_for_no(self, uids):
        """Wait until the pods of these uids are gone."""
        until = time.monotonic() + 120
        while left := uids & {pod["metadata"]["uid"] for pod in self.pods()}:
            assert time.monotonic() < until, left
            time.sleep(0.5)

    def close(self):
        """Delete everything that the tests created."""
        self.clear()
        if self._made is not None:
            path = f"/api/v1/namespaces/{self.backend.namespace}"
            self.backend.cluster.delete(path, uid=self._made)


class ClusterRun:
    """One run, owned by a thread of the test."""

    def __init__(self, place, spec):
        """Start nothing yet."""
        self.place = place
        self.spec = spec
        self.key = RunKey("e2e", "kubernetes", uuid.uuid4().hex[:12], spec.name)
        self.run = Run(place.store, self.key)
        self.result = self.error = None
        now = time.time_ns()
        actor = Actor(str(uuid.uuid4()), now, now, life="e2e")
        stage = Stage(spec=spec, spec_source="test")
        owner = Owner(run=self.run, backend=place.backend, actor=actor, stage=stage)
        self._owner = ForegroundOwner(owner)
        self._thread = threading.Thread(target=self._own, daemon=True)

    def start(self):
        """Own it from now on."""
        self._thread.start()
        return self

    def _own(self):
        try:
            self.result = self._owner.own()
        except Exception as err:  # noqa: BLE001 - the thread's edge: the test looks at it
            self.error = err

    def end(self, *, seconds=180):
        """Wait for the end; raises the error that ended it."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.state()}\n{self.output()}"
        if self.error is not None:
            raise self.error
        return self.result

    def state(self):
        """State folded from its events."""
        return Run(self.place.store, self.key).events.load()  # the owner's thread has its own

    def output(self, *, attempt=1, node=0):
        """Output of a node so far, from the store."""
        data, _ = read_logs(self.run, attempt=(1, attempt), node=node, budget=1 << 20)
        return data.decode()

    def shows(self, text, *, seconds=120, **which):
        """Wait until the node has printed *text*."""
        until = time.monotonic() + seconds
        while text not in self.output(**which):
            assert self._thread.is_alive(), (self.error, self.output(**which))
            assert time.monotonic() < until, (self.state(), self.output(**which))
            time.sleep(0.5)

    def pods(self):
        """Its pods."""
        return [pod for pod in self.place.pods() if self.is_mine(pod)]

    def is_mine(self, body):
        """True for a Job or pod of this run."""
        hashed = names.run_hash(self.place.store.url, self.key.prefix)
        return body["metadata"]["labels"].get(names.RUN) == hashed

    def handle(self):
        """Number of the live attempt."""
        return self.state().live.handle

    def alone(self, allocation):
        """Start one attempt on *allocation* without an owner; returns its handle."""
        spec = self.spec.to_dict()
        self.run.write_control((1, 1), Control())
        self.run.lease.renew(holder="test")
        request = attempts.request(
            store_url=self.place.store.url,
            run_prefix=self.key.prefix,
            run_label="e2e.alone",
            generation=1,
            attempt=1,
            allocation=allocation,
            command=self.spec.entrypoint,
            spec=spec,
        )
        return self.place.backend.submit(request)

    def evict(self, pod):
        """Request the eviction of *pod* from the Eviction API."""
        metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = names.pods(metadata["namespace"], metadata["name"], "eviction")
        self.place.backend.cluster.create(path, body)

    def stop(self):
        """Request its cancellation."""
        request_stop(self.run, reason="test", by="test")
