"""The documentation is correct: its specs load, its Python compiles, its links resolve."""

import ast
import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import envscaler_airflow
from envscaler_agent.output import METRICS_CHUNK_S
from envscaler_airflow import cli
from envscaler_airflow.cli import main
from envscaler_airflow.cli.common import LazyGroup
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.sidecar.loop import STATUS_S
from envscaler_airflow.sidecar.owner_watch import CONTROL_S, LEASE_S, SUPERSEDED_S
from envscaler_airflow.store.lease import RENEW_EVERY_S
from envscaler_airflow.triggers.scaling_trigger import CHECK_S
from envscaler_airflow.triggers.stage_trigger import POLL_S

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *TOP])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAVIGATION = re.compile(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", re.MULTILINE)
REFERENCE = re.compile(r"^::: (\S+)", re.MULTILINE)
COLOURED = re.compile(r"^ +(\.?\w+) \{[^}]*(?:fill|stroke): #", re.MULTILINE)
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
    """Each YAML block is a complete spec, with inputs not known yet."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)

    assert load_spec(spec, target="local").version == "v1"


@pytest.mark.parametrize("text", _blocks("python"))
def test_every_piece_of_python_compiles(text):
    """Excerpts too."""
    ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page):
    """A link to a heading leads to an existing heading."""
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
    """``envscaler NAME --option`` exists in the shell."""
    for name, rest in COMMAND.findall(page.read_text()):
        command = main.get_command(click.Context(main), name)
        assert command is not None, name
        below = rest.split()[:1]
        if isinstance(command, click.Group) and below and below[0] in command.commands:
            command = command.commands[below[0]]
        known = {option for param in command.params for option in param.opts} | {"--help"}
        used = {word.partition("=")[0] for word in rest.split() if word.startswith("-") and word != "--"}
        assert used <= known, (name, used - known)


def test_every_command_is_documented():
    """The reference lists the commands of the shell."""
    page = (ROOT / "docs/reference/cli.md").read_text()

    assert [name for name in main.list_commands(click.Context(main)) if f"envscaler {name}" not in page] == []


def test_the_site_shows_every_page():
    """The strict build would fail on a page that the navigation lacks."""
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}

    assert set(NAVIGATION.findall((ROOT / "mkdocs.yml").read_text())) == pages


def test_every_public_name_is_in_the_python_reference():
    """What a DAG file imports, and Session; the site fills each in from its docstring."""
    shown = REFERENCE.findall((ROOT / "docs/reference/python.md").read_text())

    names = set(envscaler_airflow.__all__) - {"__version__", "get_provider_info"}
    assert {name.rpartition(".")[2] for name in shown} == names | {"Session"}


def test_the_site_contains_the_files_that_pages_link_to(site):
    """A link out of ``docs/`` leads to a copy."""
    (site / "example.py").write_text("pass")

    _build(site, "[code](../../example.py)")

    assert 'href="../repository/example.py.txt"' in (site / "site/how-to/page.html").read_text()
    assert (site / "site/repository/example.py.txt").read_text() == "pass"


def test_the_site_shows_the_options_of_every_command(monkeypatch):
    """The shell has stand-ins without options for commands that were not called; the site imports all."""
    group = LazyGroup("envscaler", places={"logs": "inspect:logs"})
    monkeypatch.setattr(cli, "main", group)

    runpy.run_path(str(ROOT / "docs/_site/hooks.py"))["on_startup"]()

    assert "--follow" in [option for param in group.commands["logs"].params for option in param.opts]


@pytest.mark.parametrize("target", ["../../absent.py", "absent.md", "page.md#absent"])
def test_the_site_is_not_built_with_a_broken_link(site, target):
    """To a file of the repository, to a page, to a heading."""
    with pytest.raises(Abort):
        _build(site, f"[link]({target})")


def test_the_requests_to_the_store_are_those_of_the_constants():
    """Reads per hour for one node, as the page on the store's cost sums them up."""
    page = (ROOT / "docs/explanation/store-cost.md").read_text()

    trigger = 3600 / POLL_S * 8 + 2 * 3600 / RENEW_EVERY_S
    sidecar = 3600 / CONTROL_S + 3600 / LEASE_S + 2 * 3600 / SUPERSEDED_S
    sensor = 3600 / CHECK_S * 4

    parts = {"`StageTrigger`": trigger, "sidecar: control": sidecar, "`ScalingSensor`": sensor}
    for part, reads in parts.items():
        assert re.search(rf"^\| {part}.*\| {reads:,.0f} \|", page, re.MULTILINE), (part, reads)
    assert f"| **{trigger + sidecar + sensor:,.0f}** | **" in page
    assert 3600 / STATUS_S + 3600 / METRICS_CHUNK_S == 252


def test_the_picture_is_readable_in_light_and_dark():
    """Each class with a fill or a stroke of its own has one for dark mode too, and the file parses."""
    text = (ROOT / "docs/images/parts.svg").read_text()
    ET.fromstring(text)

    light, dark = text.split("@media (prefers-color-scheme: dark)")

    assert set(COLOURED.findall(light)) == set(COLOURED.findall(dark.partition("</style>")[0]))


@pytest.fixture
def site(tmp_path):
    """A repository with the settings and the hook of this one, and no pages yet."""
    (tmp_path / "docs/how-to").mkdir(parents=True)
    return tmp_path


def _build(site, text):
    (site / "docs/how-to/page.md").write_text(text)
    ours = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    hooks = [str(ROOT / hook) for hook in ours["hooks"]]
    theirs = {"nav": None, "plugins": [], "theme": "mkdocs", "site_dir": "site", "hooks": hooks}
    (site / "mkdocs.yml").write_text(json.dumps(ours | theirs))
    build(load_config(str(site / "mkdocs.yml")))


def _anchor(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
