"""``run``: own a stage from a shell until it ends."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from envscaler_airflow.backends import create_backend
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.build.locks import LOCK
from envscaler_airflow.cli.common import (
    NOT_NEGATIVE,
    load_state,
    not_empty,
    shell_key,
    store_option,
    without_deadline,
)
from envscaler_airflow.cli.containers import run_docker
from envscaler_airflow.cli.environment import LocalEnvironment, find_lock, local_environment
from envscaler_airflow.cli.specs import environment_secret, spec_options, spec_registry
from envscaler_airflow.cli.tables import print_report
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.hold import Holder
from envscaler_airflow.controller.request import request_stop
from envscaler_airflow.controller.stage import Delivered, Stage, Waiting
from envscaler_airflow.controller.watch import Watch
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.lifecycle import Actor
from envscaler_airflow.spec import load_spec
from envscaler_airflow.store.base import Store, check_store
from envscaler_airflow.store.folders import read_manifest
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.outputs import open_folder

_OF_OWNED = ("strategy", "value_of_hour", "budget_usd", "restore_from", "install_system")
"""Options that a container would not heed: it is started, and nobody owns it."""


@click.command()
@spec_options
@click.option("--name", callback=not_empty, help="Name of the run; the same name again goes on with it.")
@click.option(
    "--strategy",
    default="balanced",
    callback=without_deadline,
    type=click.Choice(["cost", "balanced", "performance", "deadline"]),
)
@click.option("--value-of-hour", type=NOT_NEGATIVE, help="USD that an hour is worth.")
@click.option("--budget", "budget_usd", type=NOT_NEGATIVE, help="Most that the run may cost, USD.")
@click.option("--restore-from", callback=not_empty, help="URI of a checkpoint of another run to begin from.")
@click.option("--fresh", is_flag=True, help="Begin anew even if the run exists.")
@click.option("--target", default="local", type=click.Choice(["local", "docker"]), show_default=True)
@click.option("--locked", callback=not_empty, help="A run, or a lock.json: run in exactly that environment.")
@click.option("--install-system", is_flag=True, help="Install missing system packages on this machine.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@store_option
def run(
    path: str,
    *,
    parameters: dict[str, str],
    inputs: dict[str, str] | None,
    store: Store,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Run the stage of a spec on this machine and wait for it; Ctrl-C checkpoints and stops it.

    A COMMAND after -- runs in the same environment in place of the entrypoint. On --target local it is the
    stage: what it does not write of the spec's outputs fails it.
    """
    given, target = inputs or {}, options["target"]
    if target == "docker":
        _check_container_options()
    check_store(store)
    spec = load_spec(path, parameters=parameters, inputs=given, target=target, registry=spec_registry())
    name = options["name"] or f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}"
    key = shell_key(store, name, spec.name)
    if options["restore_from"] and (options["fresh"] or _begins(store, key)):
        _check_origin(options["restore_from"])
    lock = find_lock(options["locked"], store) if options["locked"] else None
    if target == "docker":
        run_docker(spec, store, key, lock, command=command, resolve_secret=environment_secret)
        return
    spec = spec.model_copy(update={"entrypoint": command or spec.entrypoint})
    made = local_environment(
        spec, lock=lock, install_system=options["install_system"], say=_say, resolve_secret=environment_secret
    )
    store.write(f"{key.prefix}/{LOCK}", made.lock.to_text().encode())
    result = _hold(store, key, _stage(made, path, parameters, given, options))
    for output, uri in result.outputs.items():
        click.echo(f"output {output}: {uri}")
    print_report(result.report)


def _check_container_options() -> None:
    """Refuse what a container would not heed.

    Raises:
        SpecError: Such an option was given.
    """
    context = click.get_current_context()
    of_owned = [item for item in context.command.params if item.name in _OF_OWNED]
    ignored = [
        item.opts[0]
        for item in of_owned
        if context.get_parameter_source(str(item.name)) is ParameterSource.COMMANDLINE
    ]
    if ignored:
        raise SpecError(
            f"{', '.join(ignored)}: a container is only started and waited for; leave it out, "
            "or write --target local"
        )


def _begins(store: Store, key: RunKey) -> bool:
    """True when the run has nothing of its own to go on from."""
    return load_state(store, key.prefix).status in ("none", "succeeded")


def _check_origin(uri: str) -> None:
    """Look at the checkpoint to begin from: an attempt would wait for it for a quarter of an hour.

    Raises:
        SpecError: It is none, or cannot be read from here.
    """
    try:
        origin, prefix = open_folder(uri)
        kind = read_manifest(origin, prefix).kind
    except EnvScalerError as err:
        raise SpecError(f"--restore-from {uri}: {err}") from err
    if kind != "checkpoint":
        raise SpecError(f"--restore-from {uri}: it is a {kind}, not a checkpoint")


def _stage(
    made: LocalEnvironment,
    path: str,
    parameters: dict[str, str],
    inputs: dict[str, str],
    options: dict[str, Any],
) -> Stage:
    return Stage(
        spec=made.spec,
        spec_source=path,
        parameters=parameters,
        inputs=inputs,
        strategy=options["strategy"],
        value_of_hour=options["value_of_hour"],
        budget_usd=options["budget_usd"],
        restart="fresh" if options["fresh"] else "resume",
        restore_from=options["restore_from"],
        resolve_secret=environment_secret,
        python=None if made.python is None else str(made.python),
    )


def _say(line: str) -> None:
    click.echo(f"-- {line}", err=True)


def _hold(store: Store, key: RunKey, stage: Stage) -> Delivered:
    backend, prefix = shell_backend(), key.prefix
    click.echo(f"run: {prefix}")
    # Each start from a shell counts as a clear: what had ended is taken up again.
    actor = Actor(ti_id=str(uuid.uuid4()), try_number=time.time_ns(), max_tries=time.time_ns())
    controller = Controller(store=store, key=key, backend=backend, actor=actor, stage=stage)
    cursors: dict[tuple[int, int, int], tuple[int, int]] = {}
    current: list[Waiting] = []

    def on_wait(waiting: Waiting) -> None:
        current[:] = [waiting]
        click.echo(f"-- {waiting.reason}", err=True)

    def on_look(_watch: Watch) -> None:
        _print_new_logs(store, prefix, current[0], cursors)

    holder = Holder(controller, store, prefix, backend, actor, on_wait=on_wait, on_look=on_look)
    try:
        return holder.hold()
    except KeyboardInterrupt:
        if not holder.is_ours():
            raise  # nothing was begun, and another owner is not to be stopped
        click.echo("-- asked to checkpoint and stop; Ctrl-C again leaves it to its lease", err=True)
        request_stop(store, prefix, reason="Ctrl-C", by="shell")
        return holder.go_on()


def shell_backend() -> Backend:
    """The local backend, with attempts below ``ENVSCALER_LOCAL_ROOT`` where that is set."""
    root = os.environ.get("ENVSCALER_LOCAL_ROOT") or os.environ.get("AIRFLOW__ENVSCALER__LOCAL_ROOT")
    return create_backend("local", {"root": Path(root)} if root else {})


def _print_new_logs(
    store: Store, prefix: str, waiting: Waiting, cursors: dict[tuple[int, int, int], tuple[int, int]]
) -> None:
    watching = waiting.watching
    for node in range(watching.nodes if watching.attempt else 0):
        key = (watching.generation, watching.attempt, node)
        data, cursors[key] = read_logs(
            store, prefix, attempt=key[:2], node=node, cursor=cursors.get(key, (1, 0))
        )
        if data:
            click.echo(data.decode("utf-8", errors="replace"), nl=False)
