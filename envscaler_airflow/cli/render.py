"""``render``: the artefacts of a spec, without touching anything."""

from __future__ import annotations

from pathlib import Path

import click

from envscaler_airflow.build.artefacts import Artefact
from envscaler_airflow.build.render import RENDERINGS, VARIANTS, render_spec
from envscaler_airflow.build.render import render as render_target
from envscaler_airflow.build.requirements import read_requirements
from envscaler_airflow.cli.specs import spec_options, spec_registry, write_artefact
from envscaler_airflow.spec.loading import load_with_sources


@click.command()
@spec_options
@click.option(
    "--target", required=True, type=click.Choice([*RENDERINGS, "docker", "local"]), help="Which artefact."
)
@click.option("--variant", help="Target overlay of the spec to apply; the artefact's own without it.")
@click.option("--image", help="Name of the stage's image, for kubernetes and vm.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder to write to; else standard output."
)
def render(
    path: str,
    parameters: dict[str, str],
    inputs: dict[str, str] | None,
    target: str,
    variant: str | None,
    image: str | None,
    output: Path | None,
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
        found = render_target(kind, loaded.spec, read_requirements(loaded.spec), image=image)
    _give(found, output)


def _give(found: list[Artefact], output: Path | None) -> None:
    for item in found:
        if output is not None:
            click.echo(str(write_artefact(output, item.name, item.text, is_executable=item.is_executable)))
            continue
        if len(found) > 1:
            click.echo(f"# ---- {item.name}")
        click.echo(item.text, nl=False)
