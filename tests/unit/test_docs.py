"""The documentation says what is: its specs load, its Python compiles, its links lead somewhere."""

import ast
import re
from pathlib import Path

import click
import pytest

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *TOP])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"envscaler ([a-z-]+)((?: [^\s`#|]+)*)")


def _blocks(kind):
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()))
        if found == kind
    ]


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_every_spec_loads(text, tmp_path):
    """Each YAML block is a whole spec, with inputs not known yet."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)

    assert load_spec(spec, target="local").version == "v1"


@pytest.mark.parametrize("text", _blocks("python"))
def test_every_piece_of_python_compiles(text):
    """Excerpts too."""
    ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page):
    """And, where it names a heading, to that heading."""
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [_anchor(title) for title in titles], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_exists(page):
    """``envscaler NAME --option`` as the shell knows it."""
    for name, rest in COMMAND.findall(page.read_text()):
        command = main.commands.get(name)
        assert command is not None, name
        below = rest.split()[:1]
        if isinstance(command, click.Group) and below and below[0] in command.commands:
            command = command.commands[below[0]]
        known = {option for param in command.params for option in param.opts} | {"--help"}
        used = {word.partition("=")[0] for word in rest.split() if word.startswith("-") and word != "--"}
        assert used <= known, (name, used - known)


def test_every_command_is_documented():
    """The reference lists what the shell has."""
    page = (ROOT / "docs/reference/cli.md").read_text()

    assert [name for name in main.list_commands(click.Context(main)) if f"envscaler {name}" not in page] == []


def _anchor(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
