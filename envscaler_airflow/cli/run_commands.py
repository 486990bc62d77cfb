"""``run`` and ``submit`` own a stage from a shell until it ends; ``render`` prints what they would start."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from envscaler_airflow.backends import backend_names, backend_type
from envscaler_airflow.backends.base import AttemptRequest, Backend, PreparesSpecs, SharesWatch, ShowsAttempts
from envscaler_airflow.cli.backends import backend_options, shell_backend
from envscaler_airflow.cli.common import (
    NOT_NEGATIVE,
    default_store_url,
    echo_json,
    echo_result,
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
from envscaler_airflow.images.artefacts import Artefact, yaml_text
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.dry_run import lacking_code
from envscaler_airflow.images.locks import LOCK, resolve
from envscaler_airflow.images.programs import index_access
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.targets import RENDERINGS, VARIANTS, render_spec
from envscaler_airflow.images.targets import render as render_target
from envscaler_airflow.owner import freeze, limits
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import AttemptState
from envscaler_airflow.store.keys import SHELL_DAG, RunKey
from envscaler_airflow.store.manifests import newest_manifest
from envscaler_airflow.store.outputs import open_folder
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store, check_store, open_store

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


SAMPLE = "sample"
"""Name of the run whose Job is shown; the names and labels of a Job contain a hash of its run."""
OTHER_NAMES = {"docker": "dockerfile", "local": "venv"}
"""Artefacts by the name of what they are for."""


@click.command()
@spec_options
@click.option(
    "--target", required=True, help=f"Artefact to render: spec, {', '.join(RENDERINGS)}, or for a backend."
)
@click.option("--variant", help="Target overlay of the spec to apply; the default is the artefact's own.")
@click.option("--image", help="Name of the stage's image, for vm and backends with images.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Settings of the backend, as submit takes them."
)
@click.option("--lock", "is_locked", is_flag=True, help="Write exact versions with hashes: venv, dockerfile.")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Folder to write to instead of standard output."
)
@output_option
def render(
    source: SpecSource,
    target: str,
    variant: str | None,
    image: str | None,
    config: Path | None,
    *,
    is_locked: bool,
    **given: Any,
) -> None:
    """Show what a spec becomes: the composed spec, an environment, a Dockerfile, a Job, user-data."""
    kind = OTHER_NAMES.get(target, target)
    is_backend = kind in backend_names()
    if not is_backend and kind not in ("spec", *RENDERINGS):
        known = sorted({"spec", *RENDERINGS, *OTHER_NAMES, *backend_names()})
        raise SpecError(f"--target {target!r:.60}: write one of {', '.join(known)}")
    overlay = variant or VARIANTS.get(kind, kind if is_backend else None)
    loaded = source.load(overlay)
    if kind == "spec":
        found = render_spec(loaded)
    elif is_backend:
        given_image = {"image": image} if image is not None else None
        found = render_attempt(loaded.spec, shell_backend(kind, config, given_image))
    else:
        requirements = read_requirements(loaded.spec)
        if is_locked:
            requirements = _locked(kind, loaded.spec, requirements)
        options = ImageOptions(has_workdir=loaded.spec.workdir is not None)
        found = render_target(kind, loaded.spec, requirements, image=image, options=options)
    _give(found, given["folder"], as_json=given["as_json"])


def render_attempt(spec: EnvSpec, backend: Backend) -> list[Artefact]:
    """What ``submit`` sends for the first attempt of a run named :data:`SAMPLE`.

    Its machines are any that have what the spec requests: the available ones are known only when the backend
    is asked.

    Raises:
        SpecError: ``submit`` would refuse the spec.
    """
    if isinstance(backend, PreparesSpecs):
        spec = backend.prepare(spec)
    if isinstance(backend, ShowsAttempts):
        return backend.artefacts(sample_request(spec, backend.sample_offer(spec)))
    request = sample_request(spec, next(iter(backend.offers())))
    return [Artefact("attempt.yaml", yaml_text(backend.render(request)))]


def sample_request(spec: EnvSpec, offer: Offer) -> AttemptRequest:
    """The request that the owner of the run makes, from a frozen spec in a temporary store.

    Raises:
        SpecError: The spec cannot be frozen.
    """
    deployment = os.environ.get("AIRFLOW__ENVSCALER__DEPLOYMENT") or "shell"
    key = RunKey(deployment, SHELL_DAG, SAMPLE, spec.name)
    live = AttemptState(1, 1, Allocation(offer, spec.num_nodes.min))
    stage = Stage(spec=spec, spec_source="", resolve_secret=lambda _: "")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(open_store(f"file://{folder}"), key)
        frozen = freeze.freeze(spec, run.store)
        try:
            freeze.write(run, frozen)
        finally:
            frozen.discard()
        request = freeze.attempt_request(
            run, stage, spec, live,
            spec_hash=frozen.spec_hash, grace_s=limits.GRACE_S, deadline_s=limits.MACHINE_S,
        )  # fmt: skip
    return replace(request, store_url=default_store_url())


def _locked(kind: str, spec: EnvSpec, requirements: Requirements) -> Requirements:
    """*requirements* with current versions; a virtual environment does not see the base."""
    is_conda = requirements.runtime is not None and requirements.runtime.package_manager == "conda"
    if kind not in ("venv", "dockerfile") or is_conda:
        raise SpecError("--lock: is for --target venv and dockerfile, and for packages of pip and uv")
    with index_access(requirements, resolve_secret=environment_secret) as env:
        found = resolve(spec, requirements, hashes=True, with_base=kind == "dockerfile", env=env)
    return requirements.with_lock(found.text)


def _give(found: list[Artefact], folder: Path | None, *, as_json: bool) -> None:
    if folder is not None:
        paths = [str(item.write(folder)) for item in found]
        echo_result({"files": paths}, "\n".join(paths), as_json=as_json)
        return
    if as_json:
        echo_json([{"name": item.name, "text": item.text} for item in found])
        return
    for item in found:
        if len(found) > 1:
            click.echo(f"# ---- {item.name}")
        click.echo(item.text, nl=False)
