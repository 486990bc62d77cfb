"""A fake cluster and backends on it, for every test of the Kubernetes backend."""

import time

import pytest
from fakes.kubernetes import Cluster, Program
from integration.kubernetes.rig import Stagehand

from envscaler_airflow.backends.kubernetes import client
from envscaler_airflow.backends.kubernetes.job_reader import close_views
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend


@pytest.fixture
def cluster():
    """One node; the training plays the wrapper."""
    with Cluster(nodes=1, speed=5) as made:
        made.script(Program(seconds=0), container="install")
        made.script(Program(term_code=0), container="sidecar")
        made.script(Program(term_code=87), container="main")
        yield made
        close_views()


@pytest.fixture
def connect(cluster, tmp_path):
    """Makes backends; *token* is that of another identity."""

    def make(*, token=None, **settings):
        path = cluster.kubeconfig(tmp_path / f"config-{token is None}", token=token)
        settings = {"image": "train:1", "wait_for_node_s": 0, "sleep": lambda _s: time.sleep(0.01)} | settings
        return KubernetesBackend(kubeconfig=str(path), **settings)

    return make


@pytest.fixture
def stage(cluster, connect, tmp_path, monkeypatch):
    """Makes one stage; the API server's clock is the cluster's."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())

    def make(*, settings=None, **spec):
        return Stagehand(tmp_path, connect(**(settings or {})), **spec)

    return make
