"""``registry`` and ``init``: shared specs and modules, and a first spec."""

from __future__ import annotations

import shlex
import sys
from importlib import resources
from pathlib import Path

import click

from envscaler_airflow.cli.common import Group, default_store_url, echo_json, echo_result, output_option
from envscaler_airflow.cli.specs import pairs
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.spec_registry import (
    SpecRegistry,
    check_document,
    split_reference,
)
from envscaler_airflow.store.run_store import open_store


@click.group(cls=Group)
@click.option(
    "--store",
    "store_url",
    default=default_store_url,
    show_default="the run store",
    help="Store of the registry.",
)
@click.pass_context
def registry(context: click.Context, store_url: str) -> None:
    """Share specs and modules by version; a published version never changes."""
    context.obj = SpecRegistry(lambda: open_store(store_url))


@registry.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("reference", metavar="NAME@VERSION")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A required parameter, for the check."
)
@output_option
@click.pass_obj
def publish(
    found: SpecRegistry, path: Path, reference: str, settings: tuple[str, ...], *, as_json: bool
) -> None:
    """Publish a spec or module under a semantic version."""
    name, version = split_reference(reference)
    if version is None:
        raise SpecError(f"{reference}: has no version; write {name}@1.0.0")
    text = check_document(path, parameters=pairs(settings, "--set"), registry=found)
    entry = found.publish(name, version, text)
    name = f"registry://{entry.name}@{entry.version}"
    body = {"reference": name, "sha256": entry.sha256}
    echo_result(body, f"{name} (sha256 {entry.sha256[:12]})", as_json=as_json)


@registry.command("list")
@click.argument("name", required=False)
@output_option
@click.pass_obj
def list_(found: SpecRegistry, name: str | None, *, as_json: bool) -> None:
    """List names with their versions, oldest first."""
    names = [split_reference(name)[0]] if name else found.names()
    versions = {item: [str(version) for version in found.versions(item)] for item in names}
    if as_json:
        echo_json(versions)
        return
    for item, its_own in versions.items():
        click.echo(f"{item}: {', '.join(its_own) or 'none'}")


@registry.command()
@click.argument("reference")
@output_option
@click.pass_obj
def show(found: SpecRegistry, reference: str, *, as_json: bool) -> None:
    """Print the document of a reference, and who published it."""
    entry = found.find(reference)
    name, by = f"{entry.name}@{entry.version}", {"by": entry.by, "sha256": entry.sha256}
    head = f"# {name} by {entry.by}{entry.published}, sha256 {entry.sha256}"
    body = {"reference": f"registry://{name}", **by, "text": entry.text}
    echo_result(body, f"{head}\n{entry.text}", as_json=as_json)


@registry.command()
@click.argument("reference")
@click.option(
    "--to", "file", type=click.Path(path_type=Path), help="File to write; default: the cached copy."
)
@output_option
@click.pass_obj
def pull(found: SpecRegistry, reference: str, file: Path | None, *, as_json: bool) -> None:
    """Copy a document to the local cache, so that it works offline."""
    path = found.pull(reference)
    if file is not None:
        file.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    name = str(file or path)
    echo_result({"file": name}, name, as_json=as_json)


SUFFIX = ".template"
"""Suffix of every file of a template, so that no tool treats it as a module of the package."""

PYTHON = "@PYTHON@"
"""Placeholder in a template for this machine's Python version, which needs no download."""


def _python() -> str:
    """Version of this Python, limited to those that the module ``envscaler/python`` supports."""
    return f"3.{min(max(sys.version_info.minor, 10), 13)}"


def template_names() -> list[str]:
    """Names of the templates that come with the package."""
    folder = resources.files("envscaler_airflow.images").joinpath("templates")
    return sorted(item.name for item in folder.iterdir() if item.is_dir() and item.name[0] != "_")


def write_template(name: str, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the files of template *name* into *folder*; write nothing if one of them exists.

    Raises:
        SpecError: The template does not exist, or a file exists.
    """
    if name not in template_names():
        raise SpecError(f"template {name!r:.60} is not known; write one of {', '.join(template_names())}")
    source = resources.files("envscaler_airflow.images").joinpath("templates", name)
    files = {
        folder / item.name.removesuffix(SUFFIX): item.read_text(encoding="utf-8").replace(PYTHON, _python())
        for item in source.iterdir()
        if item.name.endswith(SUFFIX)
    }
    existing = [str(path) for path in files if path.exists()]
    if existing and not overwrite:
        raise SpecError(f"{', '.join(sorted(existing))}: exists; use another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return sorted(files)


@click.command()
@click.option("--template", "name", default="python", type=click.Choice(template_names()), show_default=True)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@output_option
def init(name: str, folder: Path, *, force: bool, as_json: bool) -> None:
    """Write a first spec and its code to FOLDER."""
    paths = [str(path) for path in write_template(name, folder, overwrite=force)]
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}, then "
    text = "\n".join([*paths, f"next: {enter}envscaler validate, then envscaler run"])
    echo_result({"files": paths}, text, as_json=as_json)
