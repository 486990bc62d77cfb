"""Which cluster a stage runs on, by settings and connections. No network."""

import json
import sys
from datetime import timedelta

import pytest
from airflow.sdk import DAG
from kubernetes.client import Configuration
from kubernetes.config import incluster_config

from envscaler_airflow.backends import backend_type
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.connections import resolve_secret
from envscaler_airflow.hooks.settings import compute_place, open_backend
from envscaler_airflow.operators.stage import EnvStageOperator

HOOK = "airflow.providers.cncf.kubernetes.hooks.kubernetes"


def kubeconfig(*servers):
    """Write a kubeconfig with a context for each server; the first one is current."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c0",
        "clusters": [{"name": f"k{n}", "cluster": {"server": url}} for n, url in enumerate(servers)],
        "users": [{"name": f"u{n}", "user": {"token": f"token-{n}"}} for n in range(len(servers))],
        "contexts": [
            {"name": f"c{n}", "context": {"cluster": f"k{n}", "user": f"u{n}"}} for n in range(len(servers))
        ],
    }


@pytest.fixture
def connect(monkeypatch):
    """Give Airflow a connection of the provider's type: ``connect("team", namespace="ml")``."""

    def connection(conn_id, **extra):
        text = json.dumps({"conn_type": "kubernetes", "extra": extra})
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", text)

    return connection


def way(backend):
    """Return server and token that *backend* uses for its calls."""
    cluster = backend.cluster
    return cluster.host, cluster._credentials()["authorization"]


def test_a_connection_gives_client_namespace_and_settings(connect, monkeypatch):
    """The deployment's setting first, then what the connection says."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", '{"sidecar_image": "a:1", "queue": "slow"}')
    config = json.dumps(kubeconfig("https://one:6443"))
    connect("team", kube_config=config, namespace="ml", envscaler='{"queue": "fast"}')

    backend = open_backend("kubernetes:team")

    assert isinstance(backend, KubernetesBackend)
    assert (backend.namespace, backend.settings.sidecar_image, backend.settings.queue) == (
        "ml",
        "a:1",
        "fast",
    )
    assert way(backend) == ("https://one:6443", "Bearer token-0")


def test_two_connections_of_one_process_are_two_clusters(connect):
    """Opening the second one changes neither the first one nor the package's default."""
    default = Configuration.get_default_copy().host
    connect("one", kube_config=kubeconfig("https://one:6443"))
    connect("other", kube_config=kubeconfig("https://other:6443"), disable_verify_ssl=True)

    one, other = open_backend("kubernetes:one"), open_backend("kubernetes:other")

    assert way(other) == ("https://other:6443", "Bearer token-0")
    assert way(one) == ("https://one:6443", "Bearer token-0")
    assert one.cluster._api.configuration.verify_ssl is True
    assert other.cluster._api.configuration.verify_ssl is False
    assert Configuration.get_default_copy().host == default


def test_a_connection_names_a_file_and_a_context(connect, tmp_path):
    """Instead of the kubeconfig itself."""
    path = tmp_path / "config"
    path.write_text(json.dumps(kubeconfig("https://one:6443", "https://two:6443")))
    connect("team", kube_config_path=str(path), cluster_context="c1")

    assert way(open_backend("kubernetes:team")) == ("https://two:6443", "Bearer token-1")


def test_a_connection_uses_the_identity_of_the_pod(connect, monkeypatch, tmp_path):
    """Inside the cluster: the account's token, and the cluster's own certificate."""
    for name in ("TOKEN", "CERT"):
        (tmp_path / name).write_text(f"pod-{name}")
        monkeypatch.setattr(incluster_config, f"SERVICE_{name}_FILENAME", str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    connect("team", in_cluster=True)

    assert way(open_backend("kubernetes:team")) == ("https://10.0.0.1:443", "bearer pod-TOKEN")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kube_config_path": "/nowhere/config"}, "No configuration found"),
        ({"in_cluster": True, "kube_config_path": "/nowhere/config"}, "mutually exclusive"),
        ({"envscaler": "[]"}, "is not an object"),
        ({"envscaler": ["ml"]}, "is not an object"),
        ({"envscaler": 5}, "is not an object"),
    ],
)
def test_a_connection_that_leads_nowhere_is_named(connect, extra, words):
    """By its id, with the provider's own message."""
    connect("team", **extra)

    with pytest.raises(SpecError, match=rf"team.*{words}"):
        open_backend("kubernetes:team")


def test_without_a_connection_the_settings_count(monkeypatch):
    """The kubeconfig is read only when a call is made."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", '{"namespace": "batch"}')

    assert open_backend("kubernetes").namespace == "batch"


@pytest.mark.parametrize("text", ["[]", "namespace: x", '{"color": 1}'])
def test_settings_that_cannot_be_used_are_named(monkeypatch, text):
    """Invalid JSON, JSON that is not an object, or an unknown field."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", text)

    with pytest.raises(SpecError, match="kubernetes"):
        open_backend("kubernetes")


@pytest.mark.parametrize("text", ['{"namespace": "ml"}', '{"root": 5}', '{"prices": [1]}'])
def test_settings_that_this_machine_does_not_have_are_named(monkeypatch, text):
    """As every backend does it: a SpecError, which no retry repeats."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__LOCAL", text)
    with pytest.raises(SpecError, match=r"local: (namespace|root|prices): got"):
        open_backend("local")


def test_a_connection_without_the_provider_says_what_to_install(monkeypatch):
    """This package does not require the provider."""
    monkeypatch.setitem(sys.modules, HOOK, None)

    with pytest.raises(SpecError, match="apache-airflow-providers-cncf-kubernetes"):
        open_backend("kubernetes:team")


def test_the_operator_hands_backend_and_connection_on():
    """As one text, which triggers carry."""
    one = EnvStageOperator(task_id="a", spec="s.yaml", compute="kubernetes", conn_id="team")
    other = EnvStageOperator(task_id="b", spec="s.yaml")

    assert (one.compute_place, other.compute_place) == ("kubernetes:team", "local")
    assert compute_place("kubernetes", None) == "kubernetes"


def test_default_args_name_the_cluster_of_all_stages():
    """As for KubernetesPodOperator; a stage on this machine stays unchanged."""
    with DAG("d", schedule=None, default_args={"conn_id": "team"}):
        one = EnvStageOperator(task_id="a", spec="s.yaml", compute="kubernetes")
        own = EnvStageOperator(task_id="b", spec="s.yaml", compute="kubernetes", conn_id="mine")
        other = EnvStageOperator(task_id="c", spec="s.yaml")

    assert (one.compute_place, own.compute_place) == ("kubernetes:team", "kubernetes:mine")
    assert other.compute_place == "local"


def test_mapped_stages_take_the_connection_too():
    """Airflow checks the arguments of ``partial`` by name."""
    with DAG("d", schedule=None):
        mapped = EnvStageOperator.partial(
            task_id="a", spec="s.yaml", compute="kubernetes", conn_id="team"
        ).expand(parameters=[{"rate": 1}, {"rate": 2}])

    assert mapped.partial_kwargs["conn_id"] == "team"
    assert (mapped.retries, mapped.retry_delay) == (3, timedelta(minutes=1))


def test_a_secret_of_the_cluster_is_left_to_the_pod(monkeypatch):
    """Its value never passes through Airflow; other kinds do."""
    monkeypatch.setenv("UNIT_SECRET", "env-12345")

    resolve = backend_type("kubernetes").resolver(resolve_secret)

    assert resolve("secret:wandb/api-key") == ""
    assert resolve("env:UNIT_SECRET") == "env-12345"
