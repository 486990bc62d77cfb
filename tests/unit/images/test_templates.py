"""``envscaler init``: each template is a spec that validates, renders, and whose CPU code runs."""

from __future__ import annotations

import ast
import csv
import subprocess
import sys

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.cli.specs import template_names


def call(*words: str):
    """One command of the shell."""
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


@pytest.mark.parametrize("name", template_names())
def test_a_template_validates_and_renders_to_every_target(name, tmp_path, monkeypatch):
    """As created, for each variant; its code is Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert call("init", "--template", name).exit_code == 0
    assert call("validate").exit_code == 0
    for target in ("spec", "conda", "venv", "dockerfile", "kubernetes", "vm"):
        assert call("render", "--target", target, "--image", "team/x:1").exit_code == 0, target
    for path in tmp_path.glob("*.py"):
        ast.parse(path.read_text())


def test_the_cpu_template_does_what_its_spec_says(tmp_path):
    """Its program writes the table that the spec names as output."""
    call("init", "--template", "python", str(tmp_path))

    subprocess.run(
        [sys.executable, "main.py", "--rows", "3", "--output", "out/t.csv"], cwd=tmp_path, check=True
    )

    with (tmp_path / "out" / "t.csv").open() as file:
        assert list(csv.reader(file)) == [["number", "square"], ["0", "0"], ["1", "1"], ["2", "4"]]


def test_nothing_is_overwritten_unasked(tmp_path):
    """One existing file stops them all; --force overwrites."""
    (tmp_path / "envscaler.yaml").write_text("mine")

    got = call("init", str(tmp_path))

    assert got.exit_code == 2
    assert "exists" in got.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["envscaler.yaml"]
    assert (tmp_path / "envscaler.yaml").read_text() == "mine"
    assert call("init", "--force", str(tmp_path)).exit_code == 0
