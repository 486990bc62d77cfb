"""Which cluster a stage runs on, by settings and connections. No network."""

import sys
import types

import pytest

from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.compute import compute_place, open_backend
from envscaler_airflow.hooks.secrets import resolve_unmounted
from envscaler_airflow.operators.stage import EnvStageOperator

HOOK = "airflow.providers.cncf.kubernetes.hooks.kubernetes"


@pytest.fixture
def provider(monkeypatch):
    """Stands in for the provider's hook; what its connection holds can be changed."""

    class Hook:
        extras = types.MappingProxyType({})

        def __init__(self, conn_id):
            self.conn_id = conn_id

        @property
        def conn_extras(self):
            return self.extras

        def get_namespace(self):
            return self.extras.get("namespace")

        def get_conn(self):
            return f"client of {self.conn_id}"

    module = types.ModuleType(HOOK)
    module.KubernetesHook = Hook
    monkeypatch.setitem(sys.modules, HOOK, module)
    return Hook


def test_a_connection_gives_client_namespace_and_settings(provider, monkeypatch):
    """The deployment's setting first, then what the connection says."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", '{"agent_image": "a:1", "queue": "slow"}')
    provider.extras = {"namespace": "ml", "envscaler": '{"queue": "fast"}'}

    backend = open_backend("kubernetes:team")

    assert isinstance(backend, KubernetesBackend)
    assert (backend.namespace, backend.settings.agent_image, backend.settings.queue) == ("ml", "a:1", "fast")
    assert backend._api == "client of team"


def test_without_a_connection_the_settings_count(monkeypatch):
    """The kubeconfig is looked for only when a call is made."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", '{"namespace": "batch"}')

    assert open_backend("kubernetes").namespace == "batch"


@pytest.mark.parametrize("text", ["[]", "namespace: x", '{"color": 1}'])
def test_settings_that_cannot_be_used_are_named(monkeypatch, text):
    """No JSON, no object, no such field."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__KUBERNETES", text)

    with pytest.raises(SpecError, match="kubernetes"):
        open_backend("kubernetes")


def test_a_connection_without_the_provider_says_what_to_install(monkeypatch):
    """The provider is not ours to require."""
    monkeypatch.setitem(sys.modules, HOOK, None)

    with pytest.raises(SpecError, match="apache-airflow-providers-cncf-kubernetes"):
        open_backend("kubernetes:team")


def test_the_operator_hands_backend_and_connection_on():
    """In one text, which triggers carry."""
    one = EnvStageOperator(task_id="a", spec="s.yaml", compute="kubernetes", kubernetes_conn_id="team")
    other = EnvStageOperator(task_id="b", spec="s.yaml")

    assert (one.compute_place, other.compute_place) == ("kubernetes:team", "local")
    assert compute_place("kubernetes", None) == "kubernetes"


def test_a_secret_of_the_cluster_is_left_to_the_pod(monkeypatch):
    """Its value never passes through Airflow; other kinds do."""
    monkeypatch.setenv("UNIT_SECRET", "env-12345")

    assert resolve_unmounted("secret:wandb/api-key") == ""
    assert resolve_unmounted("env:UNIT_SECRET") == "env-12345"
