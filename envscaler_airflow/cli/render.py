"""``render``: the artefacts of a spec. Nothing is started, and no cluster is asked."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes.manifests import render_parts
from envscaler_airflow.backends.kubernetes.scheduling import any_node
from envscaler_airflow.backends.kubernetes.settings import Settings
from envscaler_airflow.cli.cluster import settings_of
from envscaler_airflow.cli.common import default_store_url, output_option
from envscaler_airflow.cli.specs import environment_secret, spec_options, spec_registry, write_artefact
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.loading import load_with_sources
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.access import index_access
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.locks import resolve
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.stage_image import with_image
from envscaler_airflow.images.targets import RENDERINGS, VARIANTS, render_spec
from envscaler_airflow.images.targets import render as render_target
from envscaler_airflow.owner import freeze, limits
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import AttemptState
from envscaler_airflow.store.base import open_store
from envscaler_airflow.store.keys import SHELL_DAG, RunKey
from envscaler_airflow.store.run import Run

SAMPLE = "sample"
"""Name of the run whose Job is shown; the names and labels of a Job contain a hash of its run."""
TARGETS = ("spec", *RENDERINGS, "kubernetes", "docker", "local")


@click.command()
@spec_options
@click.option("--target", required=True, type=click.Choice(TARGETS), help="Artefact to render.")
@click.option("--variant", help="Target overlay of the spec to apply; the default is the artefact's own.")
@click.option("--image", help="Name of the stage's image, for kubernetes and vm.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Settings of the cluster, as submit takes them."
)
@click.option("--lock", "is_locked", is_flag=True, help="Write exact versions with hashes: venv, dockerfile.")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Folder to write to instead of standard output."
)
@output_option
def render(
    path: str,
    parameters: dict[str, str],
    inputs: dict[str, str] | None,
    target: str,
    variant: str | None,
    image: str | None,
    config: Path | None,
    *,
    is_locked: bool,
    **given: Any,
) -> None:
    """Show what a spec becomes: the composed spec, an environment, a Dockerfile, a Job, user-data."""
    kind = {"docker": "dockerfile", "local": "venv"}.get(target, target)
    overlay = variant or VARIANTS.get(kind)
    loaded = load_with_sources(
        path, parameters=parameters, target=overlay, inputs=inputs, registry=spec_registry()
    )
    if kind == "spec":
        found = render_spec(loaded)
    elif kind == "kubernetes":
        found = render_job(loaded.spec, Settings.read(settings_of(config, {"image": image})))
    else:
        requirements = read_requirements(loaded.spec)
        if is_locked:
            requirements = _locked(kind, loaded.spec, requirements)
        options = ImageOptions(has_workdir=loaded.spec.workdir is not None)
        found = render_target(kind, loaded.spec, requirements, image=image, options=options)
    _give(found, given["folder"], as_json=given["as_json"])


def render_job(spec: EnvSpec, settings: Settings) -> list[Artefact]:
    """``job.yaml``: what ``submit`` sends for the first attempt of a run named :data:`SAMPLE`.

    The nodes are any that have what the spec requests, and the cluster has no CSI driver for buckets: both
    are known only when it is asked.

    Raises:
        SpecError: ``submit`` would refuse the spec.
    """
    spec = with_image(spec, image=settings.image, repository=settings.image_repository)
    is_spot = spec.capacity == "spot"
    request = sample_request(spec, any_node(spec.resources.alternatives[0], settings, is_spot=is_spot))
    (part,) = render_parts(request, settings)
    keys = ", ".join(part["secret_keys"])
    notes = [
        f"What `envscaler submit` sends for {spec.name}, for the first attempt of a run named {SAMPLE}.",
        "submit also chooses the nodes, and makes the Job the owner of the other objects.",
        *([f"submit also creates the Secret {part['name']} with {keys}."] if keys else []),
    ]
    documents = [*part.get("claims", ()), part["config_map"], part["job"]]
    return [Artefact("job.yaml", comment(notes) + yaml_text(*documents))]


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
        paths = [
            str(write_artefact(folder, item.name, item.text, is_executable=item.is_executable))
            for item in found
        ]
        click.echo(json.dumps({"files": paths}) if as_json else "\n".join(paths))
        return
    if as_json:
        click.echo(json.dumps([{"name": item.name, "text": item.text} for item in found]))
        return
    for item in found:
        if len(found) > 1:
            click.echo(f"# ---- {item.name}")
        click.echo(item.text, nl=False)
