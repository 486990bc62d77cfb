"""Every rendered manifest is valid for the last three versions of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from kubernetes_validate.utils import all_versions

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.images.plain_job import kubernetes_documents, resource_name

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = list(dict.fromkeys(all_versions()))[-3:]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["short", "long", "hostile", "wide"])
def test_manifests_are_valid_and_have_no_unknown_field(name, version):
    """The strict schemas, which refuse misspelt fields."""
    for document in yaml.safe_load_all((GOLDEN / name / "kubernetes" / "job.yaml").read_text()):
        validate(document, version, strict=True)


def test_the_schemas_do_refuse_what_is_wrong():
    """A misspelt field is found, so that a success of the test above means something."""
    document = next(iter(yaml.safe_load_all((GOLDEN / "short" / "kubernetes" / "job.yaml").read_text())))
    document["spec"]["paralellism"] = 1

    with pytest.raises(ValidationError):
        validate(document, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("train", "train"), ("Train_BERT.v2", "train-bert-v2-"), ("x" * 90, "x" * 43 + "-"), ("...", "stage-")],
)
def test_a_name_becomes_a_label_that_no_other_name_becomes(name, expected):
    """A changed name has a hash of the original; a pod's number still fits behind it."""
    got = resource_name(name)

    assert got.startswith(expected)
    assert len(got) <= 52
    assert (got == name) == (name == "train")


@pytest.mark.parametrize(
    ("gpu", "resource"),
    [
        ({"type": "T4"}, "nvidia.com/gpu"),
        ({"type": "MI300X"}, "amd.com/gpu"),
        ({"vendor": "amd"}, "amd.com/gpu"),
        ({"vendor": "intel"}, "gpu.intel.com/i915"),
    ],
)
def test_a_job_requests_the_resource_of_its_gpus_vendor(gpu, resource):
    """Also where only the type determines the vendor (D13)."""
    spec = EnvSpec.from_dict({"version": "v1", "name": "s", "resources": {"requests": {"gpu": gpu}}})

    pod = kubernetes_documents(spec, "r.example.com/base:1", is_built=False)[0]["spec"]["template"]["spec"]

    assert pod["containers"][0]["resources"]["limits"] == {resource: "1"}


def test_a_private_base_and_its_pull_secret_go_together():
    """The reference's own secret on Kubernetes, one to be made for other kinds of reference."""

    def secrets(credentials: str):
        base = {"image": "r.example.com/base:1", "credentials": credentials}
        spec = EnvSpec.from_dict({"version": "v1", "name": "s", "base": base})
        return kubernetes_documents(spec, "r.example.com/base:1", is_built=False)[0]["spec"]["template"][
            "spec"
        ]

    assert secrets("secret:pull/key")["imagePullSecrets"] == [{"name": "pull"}]
    assert secrets("env:REGISTRY")["imagePullSecrets"] == [{"name": "s-registry"}]
    assert "securityContext" not in secrets("env:REGISTRY")
