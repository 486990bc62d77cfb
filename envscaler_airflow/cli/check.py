"""``dry-run``: what a target lacks, before anything starts."""

from __future__ import annotations

import json

import click

from envscaler_airflow.build.check import TARGETS, cluster_offers, missing_on
from envscaler_airflow.cli.common import default_store_url, output_option, shell_backend
from envscaler_airflow.cli.specs import spec_options, spec_to_run
from envscaler_airflow.scaling.from_spec import speedup_warning
from envscaler_airflow.spec import EnvSpec


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
    spec = spec_to_run(path, parameters=parameters, target=target, inputs=inputs)
    tell_missing(spec, target, as_json=as_json)


def tell_missing(spec: EnvSpec, target: str, *, as_json: bool) -> None:
    """Print what *target* lacks for *spec*; the command ends with 1 when it lacks anything."""
    missing = missing_on(target, spec, store_url=None if target == "kubernetes" else default_store_url())
    warnings = [*spec.warnings, *speedup_warnings(spec, target)]
    if as_json:
        body = {"name": spec.name, "target": target, "missing": missing}
        click.echo(json.dumps(body | {"warnings": warnings}, indent=2))
    else:
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        for text in missing:
            click.echo(text)
        click.echo(f"{spec.name}: {len(missing) or 'nothing'} missing on {target}", err=True)
    if missing:
        click.get_current_context().exit(1)


def speedup_warnings(spec: EnvSpec, target: str) -> list[str]:
    """Of names in ``scaling.speedup`` that match no offer of *target*; [] where its offers are not known.

    Raises:
        BackendError: The cluster cannot be asked.
    """
    if spec.scaling is None or not spec.scaling.speedup or target not in ("local", "kubernetes"):
        return []
    offers = shell_backend().offers() if target == "local" else cluster_offers()
    warning = speedup_warning(spec, offers)
    return [] if warning is None else [warning]
