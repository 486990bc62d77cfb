"""``render``: the artefacts of a spec, without touching anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from envscaler_airflow.cli.common import output_option
from envscaler_airflow.cli.specs import environment_secret, spec_options, spec_registry, write_artefact
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.loading import load_with_sources
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.access import index_access
from envscaler_airflow.images.artefacts import Artefact
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.resolve import resolve
from envscaler_airflow.images.targets import RENDERINGS, VARIANTS, render_spec
from envscaler_airflow.images.targets import render as render_target


@click.command()
@spec_options
@click.option(
    "--target", required=True, type=click.Choice([*RENDERINGS, "docker", "local"]), help="Artefact to render."
)
@click.option("--variant", help="Target overlay of the spec to apply; the default is the artefact's own.")
@click.option("--image", help="Name of the stage's image, for kubernetes and vm.")
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
    else:
        requirements = read_requirements(loaded.spec)
        if is_locked:
            requirements = _locked(kind, loaded.spec, requirements)
        options = ImageOptions(has_workdir=loaded.spec.workdir is not None)
        found = render_target(kind, loaded.spec, requirements, image=image, options=options)
    _give(found, given["folder"], as_json=given["as_json"])


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
