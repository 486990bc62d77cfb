"""``registry`` and ``init``: shared specs and modules, and a first spec."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from envscaler_airflow.cli.common import Group, default_store_url, output_option
from envscaler_airflow.cli.specs import pairs
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.first_spec import template_names, write_template
from envscaler_airflow.images.registry import SpecRegistry, check_document, split_reference
from envscaler_airflow.store.base import open_store


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
    click.echo(json.dumps(body) if as_json else f"{name} (sha256 {entry.sha256[:12]})")


@registry.command("list")
@click.argument("name", required=False)
@output_option
@click.pass_obj
def list_(found: SpecRegistry, name: str | None, *, as_json: bool) -> None:
    """List names with their versions, oldest first."""
    names = [split_reference(name)[0]] if name else found.names()
    versions = {item: [str(version) for version in found.versions(item)] for item in names}
    if as_json:
        click.echo(json.dumps(versions))
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
    if as_json:
        name = f"registry://{entry.name}@{entry.version}"
        by = {"by": entry.by, "sha256": entry.sha256}
        click.echo(json.dumps({"reference": name, **by, "text": entry.text}))
        return
    click.echo(f"# {entry.name}@{entry.version} by {entry.by}{entry.published}, sha256 {entry.sha256}")
    click.echo(entry.text, nl=False)


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
    click.echo(json.dumps({"file": str(file or path)}) if as_json else str(file or path))


@click.command()
@click.option("--template", "name", default="python", type=click.Choice(template_names()), show_default=True)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@output_option
def init(name: str, folder: Path, *, force: bool, as_json: bool) -> None:
    """Write a first spec and its code to FOLDER."""
    paths = [str(path) for path in write_template(name, folder, overwrite=force)]
    if as_json:
        click.echo(json.dumps({"files": paths}))
        return
    for path in paths:
        click.echo(path)
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}, then "
    click.echo(f"next: {enter}envscaler validate, then envscaler run")
