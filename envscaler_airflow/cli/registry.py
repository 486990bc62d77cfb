"""``registry`` and ``init``: shared specs and modules, and a first spec."""

from __future__ import annotations

from pathlib import Path

import click

from envscaler_airflow.build.publish import check_document
from envscaler_airflow.build.registry import SpecRegistry, split_reference
from envscaler_airflow.build.templating import template_names, write_template
from envscaler_airflow.cli.common import Group, default_store_url
from envscaler_airflow.cli.specs import pairs
from envscaler_airflow.errors import SpecError
from envscaler_airflow.store.base import open_store


@click.group(cls=Group)
@click.option(
    "--store",
    "store_url",
    default=default_store_url,
    show_default="the run store",
    help="Where the registry is.",
)
@click.pass_context
def registry(context: click.Context, store_url: str) -> None:
    """Share specs and modules: versioned, never changed once published."""
    context.obj = SpecRegistry(lambda: open_store(store_url))


@registry.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("reference", metavar="NAME@VERSION")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A required parameter, for the check."
)
@click.pass_obj
def publish(found: SpecRegistry, path: Path, reference: str, settings: tuple[str, ...]) -> None:
    """Publish a spec or module under a semantic version."""
    name, version = split_reference(reference)
    if version is None:
        raise SpecError(f"{reference}: has no version; write {name}@1.0.0")
    text = check_document(path, parameters=pairs(settings, "--set"), registry=found)
    entry = found.publish(name, version, text)
    click.echo(f"registry://{entry.name}@{entry.version} (sha256 {entry.sha256[:12]})")


@registry.command("list")
@click.argument("name", required=False)
@click.pass_obj
def list_(found: SpecRegistry, name: str | None) -> None:
    """List names with their versions, oldest first."""
    for item in [split_reference(name)[0]] if name else found.names():
        click.echo(f"{item}: {', '.join(str(version) for version in found.versions(item)) or 'none'}")


@registry.command()
@click.argument("reference")
@click.pass_obj
def show(found: SpecRegistry, reference: str) -> None:
    """Print the document that a reference names, and who published it."""
    entry = found.find(reference)
    click.echo(f"# {entry.name}@{entry.version} by {entry.by}{entry.published}, sha256 {entry.sha256}")
    click.echo(entry.text, nl=False)


@registry.command()
@click.argument("reference")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File to write; else the cached copy is named."
)
@click.pass_obj
def pull(found: SpecRegistry, reference: str, output: Path | None) -> None:
    """Bring a document into the local cache, so that it works offline."""
    path = found.pull(reference)
    if output is not None:
        output.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    click.echo(str(output or path))


@click.command()
@click.option("--template", "name", default="python", type=click.Choice(template_names()), show_default=True)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
def init(name: str, folder: Path, *, force: bool) -> None:
    """Write a first spec with its code into FOLDER."""
    for path in write_template(name, folder, overwrite=force):
        click.echo(str(path))
    click.echo("next: envscaler validate, then envscaler run")
