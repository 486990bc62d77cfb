"""The contract suite of tests/e2e/kubernetes on the fake cluster, with real processes in its containers.

Its orders come through exec there, and here through the file system of the container.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from e2e.kubernetes.place import Place
from e2e.kubernetes.test_contract import *  # noqa: F403 - the tests are those of the real cluster
from e2e.kubernetes.test_contract import ClusterHarness
from fakes.kubernetes import Cluster
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One node of two CPUs, whose GPUs are counted and not there."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    folder = tmp_path_factory.mktemp("cluster")
    executor = Processes(folder / "state")
    with Cluster(nodes=0, speed=1, executor=executor) as cluster:
        cluster.add_node("node0", cpu="2", memory="24Gi", gpus=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(cluster.kubeconfig(folder / "config")))
            patch.setenv("ENVSCALER_IMAGE", f"python:{sys.version_info.major}")
            patch.setenv("ENVSCALER_STORE_URL", f"file://{folder}/store")
            made = Place.of_environment()
        made.executor = executor
        yield made
        made.close()


class ProcessHarness(ClusterHarness):
    """Reaches the pipe of a training from outside its container."""

    def _order(self, pod, text):
        until = time.monotonic() + 60
        while not any(self._write(pipe, text) for pipe in self._pipes(pod["metadata"]["uid"])):
            assert time.monotonic() < until, pod["metadata"]["name"]
            time.sleep(0.2)

    def _pipes(self, uid):
        """Where the processes of a pod see it."""
        for one in list(self._place.executor.running):
            if one.uid == uid and one._process is not None and one._process.returncode is None:
                with suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(one._process.pid).children(recursive=True):
                        yield Path(f"/proc/{process.pid}/root/envscaler/exchange/orders")

    @staticmethod
    def _write(pipe, text):
        try:
            if not pipe.is_fifo():
                return False
            pipe.write_text(f"{text}\n")
        except OSError:
            return False
        return True


@pytest.fixture
def harness(place):
    """The backend on the cluster, and a hand on its pods."""
    made = ProcessHarness(place)
    yield made
    made.close()
