"""The contract suite of every backend, on the cluster that KUBECONFIG names."""

import time
import uuid

import pytest
from contract.test_backend_contract import *  # noqa: F403 - the suite is the same
from e2e.kubernetes.place import Place

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow.store.run import Run

pytestmark = pytest.mark.timeout(240)
WAITS = """
import os, sys, time
path = os.environ["ENVSCALER_SPOOL"] + "/orders"
os.mkfifo(path)
with open(path) as orders, open(path, "w"):
    for line in orders:
        word = line.rstrip("\\n")
        if word.isdigit():
            sys.exit(int(word))
        sys.stdout.write(word)
        sys.stdout.flush()
"""


ORDERS = '"$ENVSCALER_SPOOL/orders"'


class ClusterHarness:
    """Drives real pods: their training waits for orders through exec."""

    def __init__(self, place):
        """Create runs of this suite in the store."""
        self._place = place
        self.backend = place.backend
        self.patience_s = 90.0  # chosen: pulls, starts and ends of pods on a small machine
        self.poll_s = 0.2
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
        self.full = max(offer.vcpus for offer in self.backend.offers())
        spec = self.fields["spec"]
        self.small = {"spec": {**spec, "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}}}

    def prepare(self, request):
        """Write what an owner writes before it starts an attempt."""
        store = Run(self._place.store, request.run_prefix)
        store.write(control_name(request.generation, request.attempt), Control().to_json())
        store.lease.renew(holder="test")

    def command(self):
        """Print the text before the number, and exit with the number."""
        return ("python3", "-c", WAITS)

    def _order(self, pod, text):
        until = time.monotonic() + 60
        # Print before the order is written: the process may end at once.
        command = f"test -p {ORDERS} && echo given && printf '%s\\n' '{text}' > {ORDERS}"
        while "given" not in self._run_in(pod, command):
            assert time.monotonic() < until, pod["metadata"]["name"]
            time.sleep(0.5)

    def _run_in(self, pod, command):
        """Output of the shell *command* in the training's container; closes the socket."""
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        metadata = pod["metadata"]
        socket = stream(
            CoreV1Api(self.backend.cluster._api).connect_get_namespaced_pod_exec,
            metadata["name"],
            metadata["namespace"],
            container="main",
            command=["sh", "-c", command],
            stdout=True,
            stderr=True,
            _preload_content=False,
        )
        try:
            socket.run_forever(timeout=30)
            return socket.read_all()
        finally:
            socket.close()
            socket.sock.shutdown()

    def _pods(self, handle):
        return [pod for _, pod in self.backend.pods(handle)]

    def end(self, handle, exit_code):
        """Let the command of every node end, once all have started: none starts after node 0 has ended."""
        for text in ("", str(exit_code)):
            for pod in self._pods(handle):
                self._order(pod, text)

    def vanish(self, handle):
        """Delete the Job and free its resources."""
        uids = {pod["metadata"]["uid"] for pod in self._pods(handle)}
        for job in self._place.jobs():
            if job["metadata"]["name"] == handle.name:
                self._place.delete(job)
        for pod in self._place.pods():
            if pod["metadata"]["uid"] in uids:
                self._place.kill(pod)
        self._place.wait_for_no(uids)

    def printed(self, handle, text):
        """Let node 0 print."""
        self._order(self._pods(handle)[0], text.decode())

    def close(self):
        """Leave nothing behind."""
        self._place.clear()


@pytest.fixture(scope="module")
def place():
    """The cluster; its nodes should run little else, since the suite takes all CPUs of one."""
    made = Place.of_environment()
    yield made
    made.close()


@pytest.fixture
def harness(place):
    """The backend on the cluster, with control over its pods."""
    made = ClusterHarness(place)
    yield made
    made.close()
