"""The contract suite of every backend, on the cluster that KUBECONFIG names."""

import os
import time
import uuid

import pytest
from contract.test_backend_contract import *  # noqa: F403 - the suite is the same
from e2e.kubernetes.place import Place
from e2e.kubernetes.test_stages import NEEDED

from envscaler_airflow.backends.kubernetes import failures, paths
from envscaler_airflow.backends.kubernetes.offers import room_of
from envscaler_airflow.protocol import Control, control_name
from envscaler_airflow.store import for_run
from envscaler_airflow.store.lease import renew_lease

pytestmark = pytest.mark.timeout(240)
WAITS = """
import os, sys, time
path = "/tmp/orders"
os.mkfifo(path)
with open(path) as orders, open(path, "w"):
    for line in orders:
        word = line.rstrip("\\n")
        if word.isdigit():
            sys.exit(int(word))
        sys.stdout.write(word)
        sys.stdout.flush()
"""


class ClusterHarness:
    """Drives real pods: their training waits for orders, which come through exec."""

    def __init__(self, place):
        """Make runs of its own in the store."""
        self._place = place
        self.backend = place.backend
        label = uuid.uuid4().hex[:8]
        self.fields = {
            "store_url": place.store.url,
            "run_prefix": f"e2e/contract/{label}/train/-1",
            "run_label": f"contract-{label}.train",
            "spec": {
                "version": "v1",
                "name": "train",
                "base": {"image": place.image},
                "entrypoint": ["x"],
                "resources": {"requests": {"memory": "128Mi"}},
            },
        }
        store = for_run(place.store, self.fields["run_prefix"])
        store.write("spec.yaml", b'{"version": "v1", "name": "train", "entrypoint": ["x"]}')
        for attempt in (1, 2):
            store.write(control_name(1, attempt), Control().to_json())
        renew_lease(place.store, self.fields["run_prefix"], holder="test")
        self.full = 4.0

    def command(self):
        """Print what comes before a number, and exit with that."""
        return ("python3", "-c", WAITS)

    def _order(self, pod, text):
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        api = CoreV1Api(self.backend.cluster._api)
        metadata = pod["metadata"]
        until = time.monotonic() + 60
        command = ["sh", "-c", f"test -p /tmp/orders && printf '%s\\n' '{text}' > /tmp/orders && echo done"]
        while "done" not in stream(
            api.connect_get_namespaced_pod_exec,
            metadata["name"],
            metadata["namespace"],
            container="main",
            command=command,
            stdout=True,
            stderr=True,
        ):
            assert time.monotonic() < until
            time.sleep(0.5)

    def _pods(self, handle):
        pods = self.backend._look(handle).pods
        return sorted(pods, key=failures.index_of)

    def end(self, handle, exit_code):
        """Let the command of every node end."""
        for pod in self._pods(handle):
            self._order(pod, str(exit_code))

    def vanish(self, handle):
        """Somebody deletes the Job."""
        path = paths.jobs(self.backend.namespace, handle.name)
        self.backend.cluster.delete(path, uid=handle.details["uid"])

    def printed(self, handle, text):
        """Let node 0 print."""
        self._order(self._pods(handle)[0], text.decode())

    def close(self):
        """Leave nothing."""
        for job in self.backend.jobs():
            uid = job["metadata"]["uid"]
            path = paths.jobs(self.backend.namespace, job["metadata"]["name"])
            self.backend.cluster.delete(path, uid=uid)
        until = time.monotonic() + 120
        while self._place.pods():
            assert time.monotonic() < until
            time.sleep(0.5)


@pytest.fixture(scope="module")
def place():
    """The cluster, with one node's free CPUs in four slices: what else runs there is left its part."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"no cluster: {', '.join(missing)} not set")
    made = Place.of_environment()
    name, free = free_cpus(made.backend.cluster)
    classes = [
        {
            "name": f"quarter-{count}",
            "vcpus": float(count),
            "memory_gib": 0.5,
            "node_selector": {"kubernetes.io/hostname": name},
        }
        for count in (1, 2, 4)
    ]
    # The suite counts in CPUs; a slice asks for a quarter of what is free, whatever it is called.
    made.backend.settings = made.backend.settings.model_copy(
        update={
            "cluster_prices": type(made.backend.settings).read({"cluster_prices": classes}).cluster_prices
        }
    )
    assert free >= 4.2, f"{name} has {free:g} free CPUs; this suite needs 4.2"
    yield made
    made.close()


def free_cpus(cluster):
    """Name and free CPUs of the node of ENVSCALER_NODE, else of the freest that is ready."""
    nodes = cluster.list(paths.nodes()).body["items"]
    pods = cluster.list("/api/v1/pods").body["items"]
    found = {}
    for node in nodes:
        name = node["metadata"]["name"]
        if os.environ.get("ENVSCALER_NODE", name) == name:
            found[name] = room_of(node).vcpus - sum(asked(pod) for pod in pods if of(pod, name))
    return max(found.items(), key=lambda item: item[1])


def of(pod, name):
    """True for a pod that holds something of the node."""
    return pod["spec"].get("nodeName") == name and pod["status"].get("phase") not in ("Succeeded", "Failed")


def asked(pod):
    """CPUs that a pod asks for."""
    from envscaler_airflow.backends.kubernetes.offers import quantity

    requests = [(one.get("resources") or {}).get("requests") or {} for one in pod["spec"]["containers"]]
    return sum(quantity(str(one.get("cpu", "0"))) for one in requests)


@pytest.fixture
def harness(place):
    """The backend on the cluster, and a hand on its pods."""
    made = ClusterHarness(place)
    yield made
    made.close()
