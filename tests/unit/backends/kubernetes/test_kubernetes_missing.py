"""What a cluster lacks for a stage, reported before anything starts."""

from __future__ import annotations

import json
import sys

import pytest

from envscaler_airflow.backends.kubernetes import client
from envscaler_airflow.backends.kubernetes.missing import missing_on_cluster
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.programs import Output


def stage(requests=None, **body):
    """A stage that requests *requests*."""
    told = {"version": "v1", "name": "s", "base": {"image": "b"}, "entrypoint": ["true"]}
    return EnvSpec.from_dict({**told, "resources": {"requests": requests or {}}, **body})


def cluster(nodes=(), claims=(), secrets=None, labels=None):
    """A kubectl that answers for a cluster of these nodes (all with *labels*), claims and secrets."""

    def ask(words: list[str]) -> Output:
        kind, name = words[1], words[2]
        if kind == "nodes":
            items = [
                {"metadata": {"labels": labels or {}}, "status": {"allocatable": node}} for node in nodes
            ]
            return Output(0, json.dumps({"items": items}), "")
        there = {"pvc": claims, "secret": secrets or {}}[kind]
        if name not in there:
            return Output(1, "", f'Error from server (NotFound): {kind} "{name}" not found')
        return Output(0, "\n".join(there[name]) if kind == "secret" else name, "")

    return ask


NOT_READY = {"type": "Ready", "status": "False"}
NODE = {"cpu": "7910m", "memory": "32386544Ki", "nvidia.com/gpu": "1"}


def test_a_cluster_that_has_everything_lacks_nothing():
    """A node that fits, the claim, and every key of the secrets."""
    spec = stage(
        {"cpu": 7, "memory": "30Gi", "gpu": {"count": 1}},
        volumes=[{"name": "v", "source": "pvc://data", "mount_path": "/d"}],
        env=[{"name": "K", "value_from": "secret:wandb/api-key"}, {"name": "OWN", "value_from": "env:OWN"}],
    )

    got = missing_on_cluster(
        spec, kubectl=cluster([NODE], ["data"], {"wandb": ["api-key"], "s-env": ["OWN"]})
    )

    assert got == []


def test_a_cluster_is_told_what_it_lacks():
    """Nodes, claim, an absent secret and an absent key."""
    spec = stage(
        {"cpu": 8, "gpu": {"count": 1}},
        volumes=[{"name": "v", "source": "pvc://data", "mount_path": "/d"}],
        env=[
            {"name": "K", "value_from": "secret:wandb/api-key"},
            {"name": "L", "value_from": "secret:gone/key"},
        ],
    )

    got = missing_on_cluster(spec, kubectl=cluster([NODE], [], {"wandb": ["other"]}))

    assert got == [
        "nodes: none of 1 fits 1 x (8 cores, 1 x GPU); add a node pool that does, or ask for less",
        "volumes: v: no claim data; make it in the namespace of the stage",
        "secret wandb has no key api-key; it has other",
        "secret gone does not exist; run `kubectl create secret generic gone --from-literal=KEY=...`",
    ]


@pytest.mark.parametrize(
    ("gpu", "product", "lacks"),
    [
        ({"type": "T4"}, "Tesla-T4", False),
        ({"type": "A100"}, "Tesla-T4", True),
        ({"type": "A100"}, None, False),
        ({"memory": "24GB"}, "Tesla-T4", True),
        ({"memory": "16GB"}, "Tesla-T4", False),
        ({"count": 2, "type": "T4"}, "Tesla-T4", True),
        ({}, "Tesla-T4-SHARED", True),
        ({"type": "T4-shared"}, "Tesla-T4-SHARED", False),
    ],
)
def test_gpus_of_a_cluster_count_by_the_labels_of_its_nodes(gpu, product, lacks):
    """Nodes without labels may have any; a share needs an explicit request (D13)."""
    labels = {"nvidia.com/gpu.product": product} if product else {}

    got = missing_on_cluster(stage({"gpu": {"count": 1, **gpu}}), kubectl=cluster([NODE], labels=labels))

    assert [text.startswith("nodes: none of 1 fits") for text in got] == [True] * lacks


def test_a_claim_that_will_be_made_is_not_missing():
    """Its size shows that it will be created."""
    spec = stage(volumes=[{"name": "v", "source": "pvc://new", "mount_path": "/d", "size": "10Gi"}])

    assert missing_on_cluster(spec, kubectl=cluster([NODE])) == []


def test_a_node_that_takes_no_pods_is_none():
    """Cordoned, or not ready."""
    for state in ({"spec": {"unschedulable": True}}, {"status": {"conditions": [NOT_READY]}}):
        node = {"metadata": {}, "status": {"allocatable": NODE}}
        node |= {"status": {**node["status"], **state.get("status", {})}, "spec": state.get("spec", {})}
        answer = Output(0, json.dumps({"items": [node]}), "")

        got = missing_on_cluster(stage({"cpu": 1}), kubectl=lambda words, answer=answer: answer)

        assert [text.partition(" fits")[0] for text in got] == ["nodes: none of 0"]


def test_a_cluster_that_does_not_answer_is_unknown():
    """Refused is not "absent": nothing is reported as missing."""
    said = 'E1129 memcache.go:265] "Unhandled Error"\nE1129 again\nThe connection was refused\n'

    with pytest.raises(BackendError) as told:
        missing_on_cluster(stage(), kubectl=lambda words: Output(1, "", said))

    assert str(told.value) == "the cluster cannot be asked: The connection was refused"


def test_a_secret_that_may_not_be_read_is_unknown_and_not_absent():
    """Forbidden is not an answer."""

    def ask(words: list[str]) -> Output:
        if words[1] == "nodes":
            return Output(0, json.dumps({"items": [{"metadata": {}, "status": {"allocatable": NODE}}]}), "")
        return Output(1, "", "Error from server (Forbidden): secrets is forbidden")

    spec = stage(env=[{"name": "K", "value_from": "secret:wandb/api-key"}])

    with pytest.raises(BackendError, match="Forbidden"):
        missing_on_cluster(spec, kubectl=ask)


def test_without_the_package_a_shell_names_the_extra(monkeypatch):
    """Also where the cluster's address is recorded before it is asked: one sentence, and no traceback."""
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)

    with pytest.raises(SpecError, match=r"install envscaler-airflow\[kubernetes\]"):
        client.located(context=None, kubeconfig=None, in_cluster=False)
