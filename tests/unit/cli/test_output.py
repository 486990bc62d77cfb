"""``--output json`` on every verb, and progress without a terminal."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager

import click
import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import follow, main
from envscaler_airflow.cli.common import is_unread, outlive_readers
from envscaler_airflow.cli.follow import Bar, bar
from envscaler_airflow.store.run_store import check_store, open_store


def leaves(command, path=()):
    """Every verb with its arguments."""
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return [leaf for name, one in found.items() for leaf in leaves(one, (*path, name))]


VERBS = leaves(main)


@pytest.mark.parametrize(("words", "verb"), VERBS, ids=[" ".join(words) for words, _ in VERBS])
def test_every_verb_has_json_output(words, verb):
    """With the same option everywhere (F6)."""
    options = {item.name: item for item in verb.params}

    assert options["output_form"].opts == ["--output"]
    assert list(options["output_form"].type.choices) == ["text", "json"]
    assert options["is_json"].opts == ["--json"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A verb's JSON output, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    check_store(open_store(f"file://{tmp_path}/store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def invoke(*words):
        got = CliRunner().invoke(main, [*words, "--output", "json"])
        assert got.exit_code == 0, got.output
        return json.loads(got.stdout)

    return invoke


def test_json_holds_what_the_text_says(call):
    """Standard output has nothing else, so that a tool can read it (F6)."""
    assert call("init") == {"files": ["envscaler.yaml", "main.py", "requirements.txt"]}
    assert call("registry", "list", "envscaler/python") == {"envscaler/python": ["1.0.0"]}
    assert call("registry", "show", "envscaler/python@1")["text"].startswith("# Plain Python")
    assert call("registry", "pull", "envscaler/python@1", "--to", "copy.yaml") == {"file": "copy.yaml"}
    assert call("render", "--target", "venv")[0]["name"] == "venv.sh"
    assert call("render", "--target", "venv", "--to", "out")["files"][0] == "out/venv.sh"
    assert call("schema")["title"]
    assert call("schema", "--markdown")["markdown"].startswith("#")
    assert call("kubernetes", "rbac")["kind"] == "List"
    assert call("status") == []
    assert call("catalog", "show") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("registry", "pull", "envscaler/python@1", "--to", "copy.yaml"), "copy.yaml\n"),
        (("render", "--target", "venv", "--to", "out"), "out/venv.sh\n"),
    ],
    ids=["pull", "render"],
)
def test_a_verb_that_writes_files_names_them(call, words, said):
    """Also without ``--output json``."""
    call("init")

    got = CliRunner().invoke(main, words)

    assert (got.exit_code, got.stdout.splitlines(keepends=True)[:1]) == (0, [said])


@contextmanager
def unread():
    """Standard output is a pipe that nothing reads; lines on standard error are in the list afterwards."""
    said, streams = [], []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            reads, writes = os.pipe()
            streams.append(os.fdopen(writes, "w"))
            patch.setattr(sys, name, streams[-1])
            patch.setattr(sys, f"__{name}__", streams[-1])
            if name == "stdout":
                os.close(reads)
        yield said
    for stream in streams:
        stream.close()
    with os.fdopen(reads) as errors:
        said += errors.read().splitlines()


@pytest.mark.parametrize(
    ("words", "code"), [(["schema"], 0), (["catalog", "show"], 0), (["validate", "-f", "none.yaml"], 2)]
)
def test_a_reader_that_goes_away_changes_nothing(tmp_path, monkeypatch, words, code):
    """``| head -1``: no traceback, and the exit code is the command's own (F5)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))

    with unread() as said, pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == code
    assert len(said) == (code == 2)


def test_what_only_prints_notices_that_its_reader_has_gone():
    """``logs -f`` ends then; lines on standard error still come (F5)."""
    with unread() as said, outlive_readers():
        before = is_unread()
        click.echo("one")
        click.echo("two", err=True)
        sys.stdout.flush()
        after = is_unread()

    assert said == ["two"]
    assert (before, after) == (False, True)


class TestBars:
    """Without a terminal, progress is an occasional line with a percentage (F6)."""

    def test_a_line_every_few_seconds(self, capsys):
        """Work that ends before the first line prints none."""
        now = [0.0]
        shown = Bar("simulating deadline", 200, monotonic=lambda: now[0])

        for _ in range(200):
            now[0] += 0.06
            shown.advance()

        assert capsys.readouterr().err.splitlines() == [
            "-- simulating deadline: 42 %",
            "-- simulating deadline: 84 %",
        ]

    def test_steps_of_a_builder_have_a_percentage(self, capsys):
        """Of three steps the second starts at 33 %."""
        with bar("building") as shown:
            shown.say("[2/3] RUN apt-get install git")
            shown.say("unchanged, nothing to build")

        assert capsys.readouterr().err.splitlines() == [
            "[2/3] 33 % RUN apt-get install git",
            "unchanged, nothing to build",
        ]

    def test_on_a_terminal_it_is_a_bar(self, monkeypatch):
        """Rich draws it, and steps advance it."""
        monkeypatch.setattr(follow.sys.stderr, "isatty", lambda: True, raising=False)

        with bar("building") as shown:
            shown.say("[3/4] RUN make")
            task = shown.on_terminal.tasks[0]

        assert (task.completed, task.total, task.description) == (2, 4, "RUN make")
