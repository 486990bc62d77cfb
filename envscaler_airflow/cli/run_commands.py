"""``run`` and ``submit``: own a stage from a shell until it ends, here or on another backend."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from envscaler_airflow.backends import backend_names, backend_type
from envscaler_airflow.backends.base import Backend, PreparesSpecs, SharesWatch
from envscaler_airflow.cli.backends import backend_options, shell_backend
from envscaler_airflow.cli.common import (
    NOT_NEGATIVE,
    not_empty,
    output_option,
    shell_key,
    store_option,
    without_deadline,
)
from envscaler_airflow.cli.environment import find_lock, local_environment, run_docker
from envscaler_airflow.cli.follow import Voice
from envscaler_airflow.cli.shell_owner import Foreground, own_and_tell, shell_actor
from envscaler_airflow.cli.specs import SpecSource, environment_secret, refuse_own_secrets, spec_options
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import EnvScalerError, SpecError, refuse
from envscaler_airflow.images.dry_run import lacking_code
from envscaler_airflow.images.locks import LOCK
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.manifests import newest_manifest
from envscaler_airflow.store.outputs import open_folder
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store, check_store

_OF_OWNED = ("strategy", "value_of_hour", "budget_usd", "restore_from", "install_system")
"""Options without effect in a container, which is started and has no owner."""


class _Target(click.Choice[str]):
    """Where a shell runs a stage itself; for a backend elsewhere there is another command."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read it."""
        if value not in self.choices and value in backend_names():
            self.fail(f"run is for this machine; write `envscaler submit --backend {value}`", param, ctx)
        return super().convert(value, param, ctx)


_name_option = click.option(
    "--name",
    callback=not_empty,
    help="Name of the run; the same name continues it, and delivers it again once it has succeeded.",
)
_strategy_option = click.option(
    "--strategy",
    default="balanced",
    callback=without_deadline,
    type=click.Choice(["cost", "balanced", "performance", "deadline"]),
)
_budget_option = click.option(
    "--budget", "budget_usd", type=NOT_NEGATIVE, help="Maximum cost of the run, USD."
)
_restart_option = click.option(
    "--restart",
    type=click.Choice(["resume", "fresh"]),
    default="resume",
    show_default=True,
    help="fresh: train from the start, as a new generation, also if the run has succeeded.",
)


@click.command()
@spec_options
@_name_option
@_strategy_option
@click.option("--value-of-hour", type=NOT_NEGATIVE, help="Value of an hour of waiting, USD.")
@_budget_option
@click.option("--restore-from", callback=not_empty, help="URI of another run's checkpoint to start from.")
@_restart_option
@click.option("--target", default="local", type=_Target(["local", "docker"]), show_default=True)
@click.option("--locked", callback=not_empty, help="Run in exactly this environment: a run, or a lock.json.")
@click.option("--install-system", is_flag=True, help="Install missing system packages on this machine.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@output_option
@store_option
def run(
    *,
    source: SpecSource,
    store: Store,
    command: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Run the stage of a spec on this machine, and wait; Ctrl-C, TERM and HUP save and stop it.

    The exit code is the training's own; 87 after `cancel`, 130 after Ctrl-C, 2 for an error of the command.

    A COMMAND after -- replaces the entrypoint. With --target local it must still produce every output in the
    spec, or the run fails.
    """
    target = options["target"]
    if target == "docker":
        _check_container_options()
    check_store(store)
    spec = replace(source, inputs=source.inputs or {}).to_run(target)
    refuse_own_secrets(spec)
    key = _key(store, spec, options["name"])
    # Read before anything is written: it refuses a folder of another major version.
    status = "none" if options["restart"] == "fresh" else Run(store, key).events.load().status
    if options["restore_from"]:
        _check_origin(options["restore_from"], key, begins=status == "none")
    lock = find_lock(options["locked"], store) if options["locked"] else None
    if target == "docker":
        run_docker(spec, store, key, lock, command=command, as_json=as_json)
        return
    spec = spec.model_copy(update={"entrypoint": command or spec.entrypoint})
    refuse(lacking_code(spec))
    made = local_environment(spec, lock=lock, install_system=options["install_system"], say=_say)
    if status != "succeeded":
        store.write(f"{key.prefix}/{LOCK}", made.lock.to_text().encode())
    stage = replace(
        _stage(made.spec, source, options),
        value_of_hour=options["value_of_hour"],
        restore_from=options["restore_from"],
        python=None if made.python is None else str(made.python),
    )
    _own(store, key, stage, shell_backend("local"), as_json=as_json)


def _check_container_options() -> None:
    """Refuse options that have no effect in a container.

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


def _check_origin(uri: str, key: RunKey, *, begins: bool) -> None:
    """Look at the checkpoint to begin from: an attempt would wait for it for a quarter of an hour.

    Raises:
        SpecError: It is not valid, or cannot be read from here.
    """
    if not begins:
        _say(f"--restore-from has no effect: {key.run_id} exists; --restart fresh begins from it")
        return
    try:
        origin, prefix = open_folder(uri)
        kind = newest_manifest(origin, prefix).kind
    except EnvScalerError as err:
        raise SpecError(f"--restore-from {uri}: {err}") from err
    if kind != "checkpoint":
        raise SpecError(f"--restore-from {uri}: it is a {kind}, not a checkpoint")


def _key(store: Store, spec: EnvSpec, name: str | None) -> RunKey:
    return shell_key(store, name or f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}", spec.name)


def _stage(spec: EnvSpec, source: SpecSource, options: dict[str, Any]) -> Stage:
    """The stage by the options that ``run`` and ``submit`` share."""
    return Stage(
        spec=spec,
        spec_source=source.path,
        parameters=source.parameters,
        inputs=source.inputs or {},
        strategy=options["strategy"],
        budget_usd=options["budget_usd"],
        restart=options["restart"],
        resolve_secret=environment_secret,
    )


def _own(store: Store, key: RunKey, stage: Stage, backend: Backend, *, as_json: bool) -> None:
    if not as_json:
        click.echo(f"run: {key.prefix}")
    run, voice = Run(store, key, snapshots=True), Voice(to_stderr=as_json)
    own_and_tell(Foreground(run, stage, backend, voice, shell_actor(run)), as_json=as_json)


def _say(line: str) -> None:
    click.echo(f"-- {line}", err=True)


@click.command()
@spec_options
@_name_option
@_strategy_option
@_budget_option
@_restart_option
@backend_options
@output_option
@store_option
def submit(
    *,
    source: SpecSource,
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
    spec = source.to_run(backend.name)
    refuse_own_secrets(spec)
    if isinstance(backend, PreparesSpecs):
        spec = backend.prepare(spec)
    resolver = backend_type(backend.name).resolver(environment_secret)
    stage = replace(_stage(spec, source, options), resolve_secret=resolver)
    if isinstance(backend, SharesWatch):
        backend.share_watch()  # one watch instead of a question each second
    _own(store, _key(store, spec, options["name"]), stage, backend, as_json=as_json)
