"""The contract suite of tests/e2e/kubernetes on the fake cluster, with real processes in its containers.

Its orders come through exec, as on a real cluster (D10).
"""

import os
import sys

import pytest
from e2e.kubernetes.place import Place
from e2e.kubernetes.test_contract import *  # noqa: F403 - the tests are those of the real cluster
from e2e.kubernetes.test_contract import ClusterHarness
from fakes.kubernetes import Cluster, Pace
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One node of two CPUs, with counted but absent GPUs; its namespaces take a while to be deleted."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    folder = tmp_path_factory.mktemp("cluster")
    executor = Processes(folder / "state")
    with Cluster(nodes=0, speed=1, executor=executor, pace=Pace(namespace_s=3)) as cluster:
        cluster.add_node("node0", cpu="2", memory="24Gi", gpus=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(cluster.kubeconfig(folder / "config")))
            patch.setenv("ENVSCALER_IMAGE", f"python:{sys.version_info.major}")
            patch.setenv("ENVSCALER_STORE_URL", f"file://{folder}/store")
            patch.setenv("ENVSCALER_NAMESPACE", "tests")
            Place.of_environment().close()  # as the module before this one does
            made = Place.of_environment()
        yield made
        made.close()


@pytest.fixture
def harness(place):
    """The backend on the cluster, with control over its pods."""
    made = ClusterHarness(place)
    yield made
    made.close()
