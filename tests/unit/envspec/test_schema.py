"""The JSON schema and the reference agree with the models and the loader."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.envspec.models import RESOLVED_FIELDS, EnvSpec
from envscaler_airflow.envspec.schema import SCHEMA_FILE, json_schema, reference_text, schema_text

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


VOLUME = {"name": "v", "source": "pvc://claim", "mount_path": "/v"}
RULE = {"metric": "gpu_utilization", "above": 80}
SPEEDUP = {"offer": "local/cpu-2", "relative_to": "local/cpu-1", "mean": 1.7, "stdev": 0.2, "source": "x"}
PLACES: dict[str, tuple[tuple[str | int, ...], dict]] = {
    "EnvSpec": ((), {}),
    "Base": (("base",), {"image": "b"}),
    "Runtime": (("runtimes", 0), {"type": "python"}),
    "Resources": (("resources",), {}),
    "NodeRange": (("num_nodes",), {"max": 4}),
    "Volume": (("volumes", 0), VOLUME),
    "EnvVar": (("env", 0), {"name": "A"}),
    "Distributed": (("distributed",), {}),
    "Checkpoint": (("checkpoint",), {}),
    "Scaling": (("scaling",), {}),
    "Metrics": (("metrics",), {}),
    "Stall": (("stall",), {}),
    "Failure": (("failure",), {}),
    "Requests": (("resources", "requests"), {}),
    "Limits": (("resources", "limits"), {}),
    "Every": (("checkpoint", "every"), {}),
    "MetricRule": (("scaling", "rules", 0), RULE),
    "Speedup": (("scaling", "speedup", 0), SPEEDUP),
    "PhaseResources": (("scaling", "phases", "train"), {}),
    "Gpu": (("resources", "requests", "gpu"), {}),
    "GpuLimit": (("resources", "limits", "gpu"), {}),
    "Hold": (("scaling", "rules", 0, "for"), {}),
    "PhaseGpu": (("scaling", "phases", "train", "gpu"), {}),
}
"""The place of a part in a document, and the parts that it requires."""
BESIDE: dict[str, dict] = {
    "Volume.storage_class": {**VOLUME, "size": "10Gi"},
    "Volume.retain": {**VOLUME, "size": "10Gi"},
    "Runtime.channels": {"package_manager": "conda"},
    "EnvVar.name": {"value": "1"},
    "Scaling.min_nodes": {"max_nodes": 4},
    "MetricRule.below": {"metric": "gpu_utilization"},
}
"""The same, for fields that require or exclude something else."""

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "envspec.md"


def test_the_reference_is_current():
    """If it fails, run: envscaler schema --markdown > docs/reference/envspec.md ."""
    assert REFERENCE.read_text() == reference_text()


def test_the_shipped_schema_is_current():
    """If it fails, run: envscaler schema > envscaler_airflow/envspec/envspec.schema.json ."""
    shipped = resources.files("envscaler_airflow.envspec").joinpath(SCHEMA_FILE).read_text()

    assert shipped == schema_text()
    assert CliRunner().invoke(main, ["schema"]).stdout == shipped
    assert json.loads(shipped)["title"] == "Environment spec of envscaler-airflow"


def test_every_field_has_a_type_a_default_and_an_example():
    """Five cells in every row, and only the unit may be empty."""
    rows = [
        line for line in reference_text().split("## Composition")[0].splitlines() if line.startswith("| `")
    ]
    parts = reference_text().split("## Base")[1]
    rows += [line for line in parts.splitlines() if line.startswith("| `")]

    for row in rows:
        cells = [cell.strip() for cell in row.replace("\\|", "").strip("|").split("|")]
        assert len(cells) == 5, row
        assert all((cells[0], cells[1], cells[3], cells[4])), row


def examples() -> list[tuple[str, str, str]]:
    """Part, field and example of every row."""
    found, part = [], ""
    for line in reference_text().splitlines():
        part = line.removeprefix("## ") if line.startswith("## ") else part
        if line.startswith("| `") and part != "Composition":
            cells = [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
            found.append(("EnvSpec" if part == "The document" else part, cells[0], cells[-1]))
    return found


@pytest.mark.parametrize(("part", "field", "example"), examples())
def test_every_example_is_one_that_a_spec_takes(part, field, example, tmp_path):
    """Written at its place in a document it loads, beside the parts that it requires."""
    (tmp_path / "requirements.txt").write_text("attrs\n")
    path, beside = PLACES[part]
    value = yaml.safe_load(example)
    if field == "requirements":
        value = str(value)
    body: dict = {"version": "v1", "name": "s", "base": {"image": "b"}, "entrypoint": ["true"]}
    if part == "Scaling":
        body["num_nodes"] = "1..4"
    wrapped: object = {**BESIDE.get(f"{part}.{field}", beside), field: value}
    for step in reversed(path):
        if part == "Hold" and step == 0:
            wrapped = {**RULE, **wrapped}
        wrapped = [wrapped] if step == 0 else {step: wrapped}
    (tmp_path / "e.yaml").write_text(json.dumps({**body, **wrapped}))

    assert load_spec(tmp_path / "e.yaml").version == "v1"


def test_every_part_of_the_document_is_described():
    """A table for each model that the document reaches."""
    text = reference_text()

    assert EnvSpec.__doc__ is not None
    for part in ("Base", "Runtime", "Resources", "Volume", "EnvVar", "Distributed", "Checkpoint", "Scaling"):
        assert f"\n## {part}\n" in text
