"""The reference and the shipped schema are what the models say now."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

from envscaler_airflow.build.reference import SCHEMA_FILE, reference_text, schema_text
from envscaler_airflow.cli import main
from envscaler_airflow.spec.models import EnvSpec
from envscaler_airflow.spec.resources import Requests

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "envspec.md"


def test_the_reference_is_current():
    """Else run: envscaler schema --markdown > docs/reference/envspec.md ."""
    assert REFERENCE.read_text() == reference_text()


def test_the_shipped_schema_is_current():
    """Else run: envscaler schema > envscaler_airflow/build/envspec.schema.json ."""
    shipped = resources.files("envscaler_airflow.build").joinpath(SCHEMA_FILE).read_text()

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


@pytest.mark.parametrize("name", ["memory", "cpu", "gpu"])
def test_what_is_written_about_a_field_is_what_the_model_takes(name):
    """The reference's examples of requests load."""
    row = next(line for line in reference_text().splitlines() if line.startswith(f"| `{name}` |"))

    assert name in Requests.model_fields
    assert row.split("|")[2].strip() in ("quantity", "[Gpu](#gpu)")


def test_every_part_of_the_document_is_described():
    """A table for each model that the document reaches."""
    text = reference_text()

    assert EnvSpec.__doc__ is not None
    for part in ("Base", "Runtime", "Resources", "Volume", "EnvVar", "Distributed", "Checkpoint", "Scaling"):
        assert f"\n## {part}\n" in text
