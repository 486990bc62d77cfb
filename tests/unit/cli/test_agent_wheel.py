"""``agent-wheel``: the wheel that the provider's carries."""

import json
from pathlib import Path

from click.testing import CliRunner

import envscaler_agent
from envscaler_airflow import agent_files
from envscaler_airflow.cli import main

NAME = "envscaler_agent-0.1.0-py3-none-any.whl"


def test_a_clone_says_what_to_write_instead(tmp_path, monkeypatch):
    """An editable install has no wheel inside."""
    monkeypatch.setattr(agent_files, "__file__", str(tmp_path / "agent_files.py"))

    done = CliRunner().invoke(main, ["agent-wheel", "--out", str(tmp_path)])

    root = Path(envscaler_agent.__file__).parents[1]
    assert done.exit_code == 2
    assert f"uv build --wheel {root}, or: pip wheel --no-deps {root}" in done.output


def test_the_wheel_is_written_under_its_own_name(tmp_path, monkeypatch):
    """Into a folder that is made."""
    monkeypatch.setattr(agent_files, "__file__", str(tmp_path / "agent_files.py"))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / NAME).write_bytes(b"wheel")

    done = CliRunner().invoke(main, ["agent-wheel", "--out", str(tmp_path / "out"), "--json"])

    written = tmp_path / "out" / NAME
    assert json.loads(done.stdout) == {"wheel": str(written)}
    assert written.read_bytes() == b"wheel"
