"""``reap``: end and remove what no live run owns."""

from __future__ import annotations

import click

from envscaler_airflow.backends.kubernetes import KubernetesBackend, paths
from envscaler_airflow.backends.kubernetes.reap import Orphan, orphans
from envscaler_airflow.cli.cluster import cluster_options
from envscaler_airflow.cli.common import load_state, run_prefixes, store_option
from envscaler_airflow.errors import BackendError
from envscaler_airflow.lifecycle import RunState
from envscaler_airflow.store.base import Store


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--grace", "grace_s", default=30.0, show_default=True, help="Seconds that a pod may take.")
@cluster_options
@store_option
def reap(*, store: Store, backend: KubernetesBackend, dry_run: bool, grace_s: float) -> None:
    """End and remove Jobs of a namespace that no live run of the store owns.

    A Job is left alone for its first 15 minutes, and when it belongs to another store.
    """
    answer = backend.cluster.list(paths.jobs(backend.namespace), {"limit": 1})
    if answer.server_time is None:
        raise BackendError("the API server does not tell the time: ages cannot be known")
    known = frozenset(run_prefixes(store))

    def state_of(prefix: str) -> RunState | None:
        return load_state(store, prefix) if prefix in known else None

    count = 0
    for orphan in orphans(backend, store.url, state_of, server_time=answer.server_time):
        count += 1
        click.echo(f"{orphan.handle.name}: {orphan.reason}")
        if not dry_run:
            _end(backend, orphan, grace_s)
    click.echo(f"{count} {'would go' if dry_run else 'gone'}")


def _end(backend: KubernetesBackend, orphan: Orphan, grace_s: float) -> None:
    if orphan.runs:
        backend.stop(orphan.handle, grace_s=grace_s)
    uid = str(orphan.handle.details["uid"])
    backend.cluster.delete(paths.jobs(backend.namespace, orphan.handle.name), uid=uid)
