"""``render``: the artefacts of a spec. Nothing is started, and no cluster is asked."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from envscaler_airflow.backends import backend_names
from envscaler_airflow.backends.base import AttemptRequest, Backend, PreparesSpecs, ShowsAttempts
from envscaler_airflow.cli.backends import shell_backend
from envscaler_airflow.cli.common import default_store_url, echo_json, echo_result, output_option
from envscaler_airflow.cli.specs import SpecSource, environment_secret, spec_options
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.access import index_access
from envscaler_airflow.images.artefacts import Artefact, yaml_text
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.locks import resolve
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.targets import RENDERINGS, VARIANTS, render_spec
from envscaler_airflow.images.targets import render as render_target
from envscaler_airflow.owner import freeze, limits
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import AttemptState
from envscaler_airflow.store.keys import SHELL_DAG, RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store

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
