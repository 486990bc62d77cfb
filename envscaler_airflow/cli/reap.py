"""``reap``: end and remove what no live run owns."""

from __future__ import annotations

import json

import click

from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.cli.cluster import cluster_options
from envscaler_airflow.cli.common import NOT_NEGATIVE, output_option, store_option
from envscaler_airflow.controller.reap import reap as reap_jobs
from envscaler_airflow.store.base import Store


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--grace",
    "grace_s",
    type=NOT_NEGATIVE,
    default=30.0,
    show_default=True,
    help="Seconds that a pod may take.",
)
@cluster_options
@output_option
@store_option
def reap(*, store: Store, backend: KubernetesBackend, dry_run: bool, grace_s: float, as_json: bool) -> None:
    """End and remove Jobs of a namespace that no live run of the store owns.

    A Job is left alone for its first 15 minutes, and when it belongs to another store.
    """
    found = []
    for orphan in reap_jobs(store, backend, grace_s=grace_s, dry_run=dry_run):
        found.append({"name": orphan.handle.name, "reason": orphan.reason})
        if not as_json:
            click.echo(f"{orphan.handle.name}: {orphan.reason}")
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, "orphans": found}))
        return
    click.echo(f"{len(found)} {'would go' if dry_run else 'gone'}")
