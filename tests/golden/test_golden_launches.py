"""Ten specs as frozen: each to a Job, a local attempt and ``start.json``."""

import json

import pytest
from golden.files import DATA, REVIEW, stored
from golden.launches import CASES, golden_files
from kubernetes_validate import validate
from kubernetes_validate.utils import latest_version


@pytest.mark.parametrize("name", CASES)
def test_a_spec_is_launched_as_it_was_frozen(name, tmp_path):
    """Frozen spec, what each backend starts, and what the training reads: equal, and no file more."""
    found = golden_files(name, tmp_path / "case")

    frozen = {f"launches/{name}/{path.name}" for path in (DATA / "launches" / name).glob("*")}
    assert found.keys() == frozen, REVIEW
    for path, text in found.items():
        assert text == stored(path), f"{path}: {REVIEW}"


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_job_is_valid_to_kubernetes(name):
    """Jobs, ConfigMaps and claims have no field that the newest strict schema does not know."""
    launched = json.loads(stored(f"launches/{name}/kubernetes.json"))

    for part in launched.get("parts", [launched]):
        config = part["config_map"]
        config["data"] = {key: json.dumps(body) for key, body in config["data"].items()}
        for document in (part["job"], config, *part.get("claims", ())):
            validate(document, latest_version(), strict=True)


def test_no_secret_is_in_what_is_launched(tmp_path):
    """Values come in with the request, and only their names are rendered."""
    texts = golden_files("torchrun", tmp_path / "case").values()

    assert not [text for text in texts if "value of" in text]
