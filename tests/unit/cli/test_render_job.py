"""The Job that ``render --target kubernetes`` shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from kubernetes_validate.utils import all_versions

from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.cli.run_commands import render_attempt
from envscaler_airflow.envspec import EnvSpec, load_spec
from envscaler_airflow.errors import SpecError

HERE = Path(__file__).parents[1]
SPECS = {path.stem: path for folder in ("golden/specs", "data") for path in (HERE / folder).glob("*.yaml")}
VERSIONS = list(dict.fromkeys(all_versions()))[-3:]
SETTINGS = KubernetesBackend(image="train:1")


def shown(spec: EnvSpec, settings: KubernetesBackend = SETTINGS) -> dict[str, dict]:
    """The documents of *spec* by kind."""
    [found] = render_attempt(spec, settings)
    return {document["kind"]: document for document in yaml.safe_load_all(found.text)}


def stage(**body) -> EnvSpec:
    """A stage with *body*."""
    return EnvSpec.from_dict({"version": "v1", "name": "s", "entrypoint": ["train"], **body})


def pod_of(documents: dict[str, dict]) -> dict:
    """The pod of the Job."""
    return documents["Job"]["spec"]["template"]["spec"]


def test_a_store_that_no_pod_reaches_is_named(monkeypatch):
    """A folder of this machine, unless the settings mount the volume that has it (F6)."""
    words = "# Pods cannot reach the run store file:///srv/runs: it is a folder of this machine."
    mounted = KubernetesBackend(image="train:1", store_volume="runs", store_mount="/srv")
    found = {}
    for url in ("file:///srv/runs", "s3://bucket/runs"):
        monkeypatch.setenv("ENVSCALER_STORE_URL", url)
        found[url] = [words in render_attempt(stage(), one)[0].text for one in (SETTINGS, mounted)]

    assert found == {"file:///srv/runs": [True, False], "s3://bucket/runs": [False, False]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["short", "long", "hostile", "wide"])
def test_manifests_are_valid_and_have_no_unknown_field(name, version, monkeypatch):
    """The strict schemas, which refuse misspelt fields."""
    monkeypatch.setenv("XDG_DATA_HOME", "/nowhere")
    spec = load_spec(SPECS[name], target="kubernetes").model_copy(update={"workdir": None})

    for document in shown(spec).values():
        validate(document, version, strict=True)


def test_the_schemas_do_refuse_what_is_wrong():
    """A misspelt field is found, so that a success of the test above means something."""
    job = shown(stage())["Job"]
    job["spec"]["paralellism"] = 1

    with pytest.raises(ValidationError):
        validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("gpu", "resource"),
    [
        ({"type": "T4"}, "nvidia.com/gpu"),
        ({"type": "MI300X"}, "amd.com/gpu"),
        ({"vendor": "amd"}, "amd.com/gpu"),
        ({"vendor": "intel"}, "gpu.intel.com/i915"),
        ({}, "nvidia.com/gpu"),
    ],
)
def test_a_job_requests_the_resource_of_its_gpus_vendor(gpu, resource):
    """Also where only the type determines the vendor (D13)."""
    pod = pod_of(shown(stage(resources={"requests": {"gpu": gpu}})))

    assert pod["containers"][0]["resources"]["limits"][resource] == "1"


def test_a_private_base_and_its_pull_secret_go_together():
    """The cluster's own secret; a reference of another kind needs the deployment's pull secrets."""

    def secrets(credentials: str):
        base = {"image": "r.example.com/base:1", "credentials": credentials}
        return pod_of(shown(stage(base=base), KubernetesBackend(pull_secrets=("mirror",))))[
            "imagePullSecrets"
        ]

    assert secrets("secret:pull/key") == [{"name": "mirror"}, {"name": "pull"}]
    assert secrets("env:REGISTRY") == [{"name": "mirror"}]


def test_several_nodes_meet_and_share_the_global_batch():
    """Two nodes of one process: 64 samples are 32 each, and torchrun meets at node 0 (A6, A11)."""
    pod = pod_of(shown(stage(num_nodes=2, distributed={"global_batch": 64})))

    [main] = pod["containers"]
    endpoint = "$$ENVSCALER_RENDEZVOUS_HOST:$$ENVSCALER_RENDEZVOUS_PORT"
    assert f"--rdzv_endpoint={endpoint}" in main["args"]
    env = {item["name"]: item.get("value") for item in main["env"]}
    assert (env["ENVSCALER_NODES"], env["ENVSCALER_MICRO_BATCH"]) == ("2", "32")


def test_claims_and_secrets_are_what_the_run_makes():
    """A claim with a size comes first; a Secret is named without its values."""
    volume = {"name": "d", "source": "pvc://d", "mount_path": "/d", "size": "1Gi"}
    env = [{"name": "TOKEN", "value_from": "env:TOKEN"}]

    [found] = render_attempt(stage(volumes=[volume], env=env), SETTINGS)

    kinds = [document["kind"] for document in yaml.safe_load_all(found.text)]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "Job"]
    assert "creates the Secret" in found.text
    assert found.text.split("---")[0].count("TOKEN") == 1


def test_what_submit_refuses_is_refused():
    """A stage that runs nothing, and one whose image is not known."""
    with pytest.raises(SpecError, match="entrypoint: is empty"):
        shown(stage(entrypoint=[]))
    with pytest.raises(SpecError, match="needs an image"):
        shown(stage(runtimes=[{"type": "python", "packages": ["attrs"]}]), KubernetesBackend())
