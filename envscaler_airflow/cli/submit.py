"""``submit``: own a stage on a backend from a shell until it ends."""

from __future__ import annotations

import time
import uuid
from typing import Any

import click

from envscaler_airflow.backends import backend_type
from envscaler_airflow.backends.base import Backend, PreparesSpecs, SharesWatch
from envscaler_airflow.cli.backends import backend_options
from envscaler_airflow.cli.common import (
    NOT_NEGATIVE,
    not_empty,
    output_option,
    shell_key,
    store_option,
    without_deadline,
)
from envscaler_airflow.cli.follow import Voice
from envscaler_airflow.cli.foreground import Foreground, own_and_tell, shell_actor
from envscaler_airflow.cli.specs import environment_secret, refuse_own_secrets, spec_options, spec_to_run
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.store.base import Store, check_store
from envscaler_airflow.store.run import Run


@click.command()
@spec_options
@click.option("--name", callback=not_empty, help="Name of the run; the same name continues the run.")
@click.option(
    "--strategy",
    default="balanced",
    callback=without_deadline,
    type=click.Choice(["cost", "balanced", "performance", "deadline"]),
)
@click.option("--budget", "budget_usd", type=NOT_NEGATIVE, help="Maximum cost of the run, USD.")
@click.option("--fresh", is_flag=True, help="Start from the beginning even if the run exists.")
@backend_options
@output_option
@store_option
def submit(
    *,
    path: str,
    parameters: dict[str, str],
    inputs: dict[str, str] | None,
    store: Store,
    backend: Backend,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a stage on a backend, and wait; Ctrl-C, TERM and HUP save and stop it.

    The exit code is the training's own; 87 after `cancel`, 130 after Ctrl-C, 2 for an error of the command.

    The same name continues that run; another process that owns the run then ends.

    status, logs, cancel and report take the run's name on any machine that can reach the store.
    """
    check_store(store)
    spec = spec_to_run(path, parameters=parameters, inputs=inputs, target=backend.name)
    refuse_own_secrets(spec)
    if isinstance(backend, PreparesSpecs):
        spec = backend.prepare(spec)
    name = str(options["name"] or f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}")
    key = shell_key(store, name, spec.name)
    stage = Stage(
        spec=spec,
        spec_source=path,
        parameters=parameters,
        inputs=inputs or {},
        strategy=options["strategy"],
        budget_usd=options["budget_usd"],
        restart="fresh" if options["fresh"] else "resume",
        resolve_secret=backend_type(backend.name).resolver(environment_secret),
    )
    if not as_json:
        click.echo(f"run: {key.prefix}")
    if isinstance(backend, SharesWatch):
        backend.share_watch()  # one watch instead of a question each second
    run = Run(store, key, snapshots=True)
    voice = Voice(to_stderr=as_json)
    own_and_tell(Foreground(run, stage, backend, voice, shell_actor(run)), as_json=as_json)
