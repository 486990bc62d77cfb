"""The stages of tests/e2e/kubernetes on the fake cluster, with real processes in its containers."""

import os
import sys

import pytest
from e2e.kubernetes.place import Place
from e2e.kubernetes.test_stages import *  # noqa: F403 - the tests are those of the real cluster
from fakes.kubernetes import Cluster, Pace
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cluster of three nodes, one with a GPU, whose containers are processes of this machine."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    folder = tmp_path_factory.mktemp("cluster")
    executor = Processes(folder / "state")
    with Cluster(nodes=2, speed=1, executor=executor, pace=Pace(namespace_s=3)) as cluster:
        cluster.add_node("gpus", gpus=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(cluster.kubeconfig(folder / "config")))
            patch.setenv("ENVSCALER_IMAGE", f"python:{sys.version_info.major}")
            patch.setenv("ENVSCALER_STORE_URL", f"file://{folder}/store")
            patch.setenv("ENVSCALER_NAMESPACE", "tests")
            Place.of_environment().close()  # like an earlier module: the namespace is deleted slowly
            made = Place.of_environment()
        yield made
        made.close()
