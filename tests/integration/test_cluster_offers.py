"""A cluster's nodes as offers, as its API server gives them."""

from __future__ import annotations

import json

from click.testing import CliRunner
from fakes.kubernetes import Cluster

from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.cli import main


def test_nodes_of_a_cluster_are_offers(tmp_path, monkeypatch):
    """Nodes of the API server, at the user's own price."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "cache"))
    with Cluster(nodes=2) as cluster:
        backend = KubernetesBackend(kubeconfig=str(cluster.kubeconfig(tmp_path / "config")))
        nodes = backend.cluster.list("/api/v1/nodes").body

    got = CliRunner().invoke(
        main, ["offers", "--nodes", "-", "--node-price", "*=0.5", "--json"], input=json.dumps(nodes)
    )

    assert got.exit_code == 0, got.output
    offers = json.loads(got.stdout)["offers"]
    assert offers
    assert {item["cloud"] for item in offers} == {"kubernetes"}
    assert {item["usd_per_node_hour"] for item in offers} == {0.5}
    first = nodes["items"][0]["status"]["allocatable"]
    assert offers[0]["vcpus"] == float(first["cpu"])
