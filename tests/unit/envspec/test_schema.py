"""The JSON schema for editors agrees with the loader."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from envscaler_airflow.envspec import EnvSpec, json_schema
from envscaler_airflow.envspec.models import RESOLVED_FIELDS

DATA = Path(__file__).parents[1] / "data"


def test_the_schema_is_one():
    """Draft 2020-12, with every documented field."""
    schema = json_schema()

    jsonschema.Draft202012Validator.check_schema(schema)
    written = set(EnvSpec.model_fields) - set(RESOLVED_FIELDS)
    assert written | {"extends", "modules", "parameters", "inputs", "targets"} == set(schema["properties"])


@pytest.mark.parametrize("name", ["short.yaml", "long.yaml", "design.yaml"])
def test_good_specs_pass(name):
    """Short forms, templates and ranges included."""
    jsonschema.validate(yaml.safe_load((DATA / name).read_text()), json_schema())


@pytest.mark.parametrize(
    "body",
    [
        {"num_nodes": "1..4"},
        {"resources": {"accelerators": "A100:8", "cpus": "4+", "any_of": [{"use_spot": True}]}},
        {"checkpoint": {"every": "10m"}},
        {"scaling": {"rules": [{"metric": "m", "above": 80, "for": "3 samples"}]}},
        {"env": {"A": 1}},
        {"entrypoint": "python train.py"},
        {"stall": {"factor": "{{ parameters.x }}"}},
    ],
)
def test_short_forms_pass(body):
    """An editor does not underline what the loader accepts."""
    jsonschema.validate({"version": "v1", "name": "s", **body}, json_schema())


@pytest.mark.parametrize("body", [{"resorces": {}}, {"capacity": "cheap"}, {"checkpoint": {"keep": "three"}}])
def test_mistakes_are_underlined(body):
    """Unknown fields, unknown choices, wrong types."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": "v1", "name": "s", **body}, json_schema())
