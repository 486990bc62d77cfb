"""Airflow finds the provider, its connection form and its settings."""

from __future__ import annotations

import importlib
import json
import tomllib
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

import envscaler_agent
import envscaler_airflow

ROOT = Path(__file__).parents[3]


def classes_of(info):
    """Return every class path that the provider info names."""
    return [
        *(item["hook-class-name"] for item in info["connection-types"]),
        *info["extra-links"],
    ]


def test_is_what_airflow_accepts():
    """Airflow's own schema of provider info."""
    schema = json.loads(files("airflow").joinpath("provider_info.schema.json").read_text())

    jsonschema.validate(envscaler_airflow.get_provider_info(), schema)


def test_names_only_what_exists():
    """Each class and module can be imported."""
    info = envscaler_airflow.get_provider_info()

    for path in classes_of(info):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    for kind in ("operators", "sensors", "triggers", "hooks"):
        for module in (m for item in info[kind] for m in item["python-modules"]):
            importlib.import_module(module)


def test_every_public_name_can_be_had():
    """The lazy names resolve, and an unknown one raises an error that names it."""
    for name in envscaler_airflow.__all__:
        assert getattr(envscaler_airflow, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = envscaler_airflow.nothing


@pytest.mark.parametrize("folder", [".", "agent"])
def test_both_packages_read_their_version_from_one_place(folder):
    """The provider and the agent that it carries always fit."""
    root = ROOT / folder
    found = tomllib.loads((root / "pyproject.toml").read_text())

    assert found["project"]["dynamic"] == ["version"]
    path = (root / found["tool"]["hatch"]["version"]["path"]).resolve()
    assert path == Path(envscaler_agent.__file__).resolve()
    assert envscaler_airflow.__version__ == envscaler_agent.__version__


def test_the_connection_form_hides_nothing_that_is_used():
    """The hook reads host, login, password and the two fields; the form shows all of them."""
    form = envscaler_airflow.get_provider_info()["connection-types"][0]

    assert set(form["conn-fields"]) == {"region_name", "endpoint_url"}
    assert not {"host", "login", "password"} & set(form["ui-field-behaviour"]["hidden-fields"])
