"""Events of a run with fields of odd types, and the shell's answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.store.keys import RunKey

RECORDED = Path(__file__).parents[2] / "compat" / "schema-2" / "run"
KEY = RunKey.from_dict(json.loads((RECORDED / "run.json").read_text())["key"])
EVENTS = sorted(path.name for path in (RECORDED / "events").iterdir())
ODD = [None, True, -1, 2**70, 1e308, "", "x" * 5000, [[]], {"a": {"b": None}}]
COMMANDS = ["status", "report"]


def paths_of(body, path=()):
    """Every field of *body*, also the nested ones."""
    for name, value in body.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from paths_of(value, (*path, name))


def changed(body, path, value):
    """*body* with *value* at *path*."""
    name, *rest = path
    return {**body, name: changed(body[name], rest, value) if rest else value}


def answer(folder, command):
    """The shell's output about the run; never a traceback."""
    got = CliRunner().invoke(main, [command, KEY.run_id, "--json", "--store", f"file://{folder}"])
    assert got.exception is None or isinstance(got.exception, SystemExit), got.exception
    return got


@pytest.fixture
def run(tmp_path):
    """A copy of a recorded run."""
    shutil.copytree(RECORDED, tmp_path / KEY.prefix)
    return tmp_path / KEY.prefix


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recorded_run_is_answered(run, tmp_path, command):
    """Unchanged, so that the test below changes what is read."""
    got = answer(tmp_path, command)

    assert got.exit_code == 0, got.output
    assert json.loads(got.stdout)


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("name", EVENTS)
def test_an_event_of_odd_types_is_an_answer_or_an_error_of_ours(run, tmp_path, name, shift):
    """Exit code 0 with JSON, or 2 with a line that names the event, for every field (A8)."""
    body = json.loads((run / "events" / name).read_text())

    for index, path in enumerate(paths_of(body)):
        odd = ODD[(index + shift) % len(ODD)]
        (run / "events" / name).write_text(json.dumps(changed(body, path, odd)))
        got = answer(tmp_path, COMMANDS[(index + shift) % 2])
        assert got.exit_code in (0, 2), (path, odd, got.output)
        if got.exit_code == 0:
            assert json.loads(got.stdout)
        else:
            assert f"events/{name}: " in got.stderr or f"event {int(name[:6])} " in got.stderr, (path, odd)
            assert "Error(" not in got.stderr, (path, odd)
