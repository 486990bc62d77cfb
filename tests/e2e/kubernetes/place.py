"""The cluster that stages are tested on, and what the tests do there. Nothing of it knows a fake."""

import json
import os
import threading
import time
import uuid
from pathlib import Path

import yaml

from envscaler_airflow.backends.kubernetes import KubernetesBackend, names, paths
from envscaler_airflow.backends.kubernetes.client import RefusedError
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.hold import Holder
from envscaler_airflow.controller.request import request_stop
from envscaler_airflow.controller.stage import Stage
from envscaler_airflow.lifecycle import Actor
from envscaler_airflow.spec import EnvSpec
from envscaler_airflow.store import RunKey, check_store, open_store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.logs import read_logs

LOGIN = "envscaler-test-store"
"""Secret with the AWS variables of this process, for couriers."""


class Place:
    """A namespace of a cluster, a run store that its pods reach, and an image with Python."""

    def __init__(self, backend, store_url, image):
        """Use what is there."""
        self.backend = backend
        self.store = open_store(store_url)
        check_store(self.store)
        self.image = image
        self._secret = None

    @classmethod
    def of_environment(cls):
        """By KUBECONFIG, ENVSCALER_IMAGE, ENVSCALER_STORE_URL and, if need be, the others."""
        image, url = os.environ["ENVSCALER_IMAGE"], os.environ["ENVSCALER_STORE_URL"]
        settings = {
            "namespace": os.environ.get("ENVSCALER_NAMESPACE", "default"),
            "agent_image": os.environ.get("ENVSCALER_AGENT_IMAGE", image),
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
        place.log_in()
        return place

    def log_in(self):
        """Give couriers the credentials of this process, where there are any."""
        values = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if self.backend.settings.store_secret != LOGIN:
            return
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": LOGIN}, "stringData": values}
        try:
            self.backend.cluster.create(paths.secrets(self.backend.namespace), body)
        except RefusedError as err:
            if err.status != 409:
                raise
            self.backend.cluster.patch(paths.secrets(self.backend.namespace, LOGIN), body)

    def run(self, script, **fields):
        """A run of *script* (Python), not begun yet; *fields* are of the spec."""
        spec = {
            "version": "v1",
            "name": "stage",
            "base": {"image": self.image},
            "resources": {"requests": {"cpu": "200m", "memory": "128Mi"}},
            "entrypoint": ["python3", "-c", script],
            **fields,
        }
        return Run(self, EnvSpec.from_dict(spec))

    def pods(self):
        """Pods of this namespace that are of ours."""
        query = {"labelSelector": f"{names.MANAGED_BY}={names.MANAGER}"}
        return self.backend.cluster.list(paths.pods(self.backend.namespace), query).body["items"]

    def close(self):
        """Leave nothing that the tests made."""
        for job in self.backend.jobs():
            uid = job["metadata"]["uid"]
            self.backend.cluster.delete(paths.jobs(self.backend.namespace, job["metadata"]["name"]), uid=uid)


class Run:
    """One run, owned by a thread of the test."""

    def __init__(self, place, spec):
        """Begin nothing yet."""
        self.place = place
        self.key = RunKey("e2e", "kubernetes", uuid.uuid4().hex[:12], spec.name)
        self.result = self.error = None
        now = time.time_ns()
        actor = Actor(str(uuid.uuid4()), now, now)
        stage = Stage(spec=spec, spec_source="test")
        controller = Controller(
            store=place.store, key=self.key, backend=place.backend, actor=actor, stage=stage
        )
        self._holder = Holder(controller, place.store, self.key.prefix, place.backend, actor)
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def start(self):
        """Own it from here on."""
        self._thread.start()
        return self

    def _hold(self):
        try:
            self.result = self._holder.hold()
        except Exception as err:  # noqa: BLE001 - the thread's edge: the test looks at it
            self.error = err

    def end(self, *, seconds=180):
        """Wait for the end; the error it ended with is raised."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.state()}\n{self.output()}"
        if self.error is not None:
            raise self.error
        return self.result

    def state(self):
        """Fold of its events."""
        return EventLog(self.place.store, self.key.prefix, snapshots=False).load()

    def output(self, *, attempt=1, node=0):
        """What a node printed so far, by the store."""
        data, _ = read_logs(
            self.place.store, self.key.prefix, attempt=(1, attempt), node=node, budget=1 << 20
        )
        return data.decode()

    def shows(self, text, *, seconds=120, **which):
        """Wait until it has printed *text*."""
        until = time.monotonic() + seconds
        while text not in self.output(**which):
            assert self._thread.is_alive(), (self.error, self.output(**which))
            assert time.monotonic() < until, (self.state(), self.output(**which))
            time.sleep(0.5)

    def pods(self):
        """Its pods."""
        hashed = names.run_hash(self.place.store.url, self.key.prefix)
        return [pod for pod in self.place.pods() if pod["metadata"]["labels"].get(names.RUN) == hashed]

    def evict(self, pod):
        """Ask the Eviction API to end *pod*."""
        metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = paths.pods(metadata["namespace"], metadata["name"], "eviction")
        self.place.backend.cluster.create(path, body)

    def stop(self):
        """Ask for its end."""
        request_stop(self.place.store, self.key.prefix, reason="test", by="test")

    def address(self, node):
        """What *node* printed, as JSON."""
        return json.loads(self.output(node=node).strip().splitlines()[-1])
