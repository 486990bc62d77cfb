"""``images`` and ``agent-wheel``: what clusters and training images get of this package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from envscaler_airflow.agent_files import agent_wheel
from envscaler_airflow.backends.kubernetes.settings import SIDECAR_IMAGE
from envscaler_airflow.cli.common import not_empty, output_option
from envscaler_airflow.cli.progress import bar
from envscaler_airflow.cli.specs import pairs
from envscaler_airflow.images.builders import Access, find_builder
from envscaler_airflow.images.sidecar_image import build_sidecar_image, sidecar_image_name


@click.group()
def images() -> None:
    """Build images that this package needs."""


@images.command("build-sidecar")
@click.option(
    "--push",
    "repository",
    metavar="REPO",
    callback=not_empty,
    help="Send the image to this repository; without a tag, this package's version is the tag.",
)
@click.option(
    "--builder",
    envvar="ENVSCALER_BUILDER",
    type=click.Choice(["docker", "buildah"]),
    help="The default is docker, without its daemon buildah.",
)
@click.option("--insecure", envvar="ENVSCALER_INSECURE", is_flag=True, help="The registry has no TLS.")
@click.option(
    "--build-arg", "args", multiple=True, metavar="NAME=VALUE", help="BASE, EXTRA_REQUIREMENTS=gcsfs, ..."
)
@output_option
def build_sidecar(
    *, repository: str | None, builder: str | None, insecure: bool, args: tuple[str, ...], as_json: bool
) -> None:
    """Build the sidecar image from this installed package.

    Each pod of a stage on Kubernetes runs it; the setting sidecar_image names it.
    """
    name = SIDECAR_IMAGE if repository is None else sidecar_image_name(repository)
    arguments = pairs(args, "--build-arg")
    program = find_builder(builder)
    with bar("building") as shown:
        build_sidecar_image(program, name, args=arguments, say=shown.say)
    digest = None
    if repository is not None:
        click.echo(f"pushing {name}", err=True)
        with bar("pushing"):
            digest = program.push(name, Access(tls_verify=not insecure))
    whole = name if digest is None else f"{name}@{digest}"
    click.echo(json.dumps({"image": name, "digest": digest, "name": whole}) if as_json else whole)


@click.command("agent-wheel")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Folder to write it to.",
)
@output_option
def agent_wheel_command(*, out: Path, as_json: bool) -> None:
    """Write the wheel of envscaler-agent that belongs to this package, for training images.

    Install it into an image whose own code imports envscaler_agent; stages need no installation.
    """
    wheel = agent_wheel()
    out.mkdir(parents=True, exist_ok=True)
    path = shutil.copyfile(wheel, out / wheel.name)
    click.echo(json.dumps({"wheel": str(path)}) if as_json else path)
