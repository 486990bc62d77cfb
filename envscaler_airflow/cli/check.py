"""``dry-run``: what a target lacks, before anything starts."""

from __future__ import annotations

import json

import click

from envscaler_airflow.build.check import TARGETS, missing_on
from envscaler_airflow.cli.common import default_store_url, output_option
from envscaler_airflow.cli.specs import spec_options, spec_registry
from envscaler_airflow.spec import EnvSpec, load_spec


@click.command("dry-run")
@spec_options
@click.option(
    "--target", default="local", type=click.Choice(TARGETS), show_default=True, help="Where it would run."
)
@output_option
def dry_run(
    path: str, parameters: dict[str, str], inputs: dict[str, str] | None, target: str, *, as_json: bool
) -> None:
    """Say what this machine, or the cluster of kubectl's context, lacks for a stage. Exit 0 or 1."""
    spec = load_spec(path, parameters=parameters, target=target, inputs=inputs, registry=spec_registry())
    tell_missing(spec, target, as_json=as_json)


def tell_missing(spec: EnvSpec, target: str, *, as_json: bool) -> None:
    """Print what *target* lacks for *spec*; the command ends with 1 when it lacks anything."""
    missing = missing_on(target, spec, store_url=None if target == "kubernetes" else default_store_url())
    if as_json:
        click.echo(json.dumps({"name": spec.name, "target": target, "missing": missing}, indent=2))
    else:
        for text in missing:
            click.echo(text)
        click.echo(f"{spec.name}: {len(missing) or 'nothing'} missing on {target}", err=True)
    if missing:
        click.get_current_context().exit(1)
