"""``build``: the image of a spec. ``images``: the sidecar image. ``agent-wheel``: the wheel of the agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from envscaler_airflow.agent_files import agent_wheel
from envscaler_airflow.backends.base import SIDECAR_IMAGE
from envscaler_airflow.cli.common import default_store_url, echo_result, not_empty, output_option
from envscaler_airflow.cli.environment import find_lock, lock_of
from envscaler_airflow.cli.follow import bar
from envscaler_airflow.cli.specs import SpecSource, environment_secret, pairs, spec_options
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError, refuse
from envscaler_airflow.images.build import (
    SEVERITIES,
    BuildOptions,
    Built,
    build_image,
    build_sidecar_image,
    check_options,
    configured_bases,
    find_scanner,
    mirrors,
    push_image,
    scan_image,
    sidecar_image_name,
)
from envscaler_airflow.images.builders import Access, Builder, Container, find_builder
from envscaler_airflow.images.cuda import broken_for, software
from envscaler_airflow.images.locks import apply_lock, find_conflicts, resolve
from envscaler_airflow.images.programs import index_access
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.targets import image_name
from envscaler_airflow.store.run_store import open_store

_builder_option = click.option(
    "--builder",
    envvar="ENVSCALER_BUILDER",
    type=click.Choice(["docker", "buildah"]),
    help="The default is docker if its daemon answers, otherwise buildah.",
)
_insecure_option = click.option(
    "--insecure", envvar="ENVSCALER_INSECURE", is_flag=True, help="The registry has no TLS."
)


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
@_builder_option
@_insecure_option
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
    _tell(name, digest, as_json=as_json)


def _tell(image: str, digest: str | None, *, as_json: bool) -> None:
    name = image if digest is None else f"{image}@{digest}"
    echo_result({"image": image, "digest": digest, "name": name}, name, as_json=as_json)


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
    """Write the wheel of envscaler-agent that belongs to this package into this folder, for training images.

    Install it into an image whose own code imports envscaler_agent; stages need no installation.
    """
    wheel = agent_wheel()
    out.mkdir(parents=True, exist_ok=True)
    path = shutil.copyfile(wheel, out / wheel.name)
    echo_result({"wheel": str(path)}, str(path), as_json=as_json)


@click.command()
@spec_options
@click.option(
    "-t",
    "--tag",
    "name",
    help="Image name; the default tag is a hash of the content, the default name ENVSCALER_IMAGE_REPOSITORY.",
)
@click.option("--target", default="docker", show_default=True, help="Variant of the spec, such as serving.")
@_builder_option
@click.option("--push", is_flag=True, help="Push the image to its registry.")
@click.option("--pull", is_flag=True, help="Check for a newer base even if one is present.")
@click.option("--cache", help="Repository to read cached layers from and write them to.")
@click.option("--ca-file", type=click.Path(path_type=Path), help="Certificates to trust, such as a proxy's.")
@_insecure_option
@click.option("--build-arg", "args", multiple=True, metavar="NAME=VALUE", help="UV_IMAGE=mirror/uv:1, ...")
@click.option("--allow-base", "bases", multiple=True, metavar="GLOB", help="Allow only these bases; repeat.")
@click.option("--scan", is_flag=True, help="Scan the image with trivy or grype.")
@click.option("--scan-severity", default="high", type=click.Choice(SEVERITIES), show_default=True)
@click.option("--lock", "lock_path", type=click.Path(path_type=Path), help="File to write the lock to.")
@click.option("--locked", callback=not_empty, help="Build exactly this environment: a run, or a lock.json.")
@click.option("--no-resolve", is_flag=True, help="Do not check for conflicts first.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@output_option
def build(
    source: SpecSource,
    command: tuple[str, ...],
    target: str,
    *,
    as_json: bool,
    **given: Any,
) -> None:
    """Build the image of a spec; unchanged inputs build nothing.

    A COMMAND after -- runs in the image before it is pushed, such as `-- pytest`.
    """
    spec = source.load(target).spec
    requirements, options = read_requirements(spec), _options(given)
    if options.name is None and (repository := os.environ.get("ENVSCALER_IMAGE_REPOSITORY")):
        options = replace(options, name=image_name(spec, requirements, repository))
    check_options(spec, options)
    _check_file(given["lock_path"])
    if given["scan"]:
        find_scanner()
    builder = find_builder(given["builder"])
    lock = find_lock(given["locked"], open_store(default_store_url())) if given["locked"] else None
    if lock is not None:
        spec, requirements = apply_lock(spec, requirements, lock)
        options = replace(options, base_digest=lock.base_digest)
    access = index_access(requirements, ca_file=options.ca_file, resolve_secret=environment_secret)
    with access as env:
        if lock is None and not given["no_resolve"]:
            check_environment(spec, requirements, env=env)
        if given["lock_path"] and requirements.locked is None and not requirements.is_empty:
            requirements = requirements.with_lock(resolve(spec, requirements, hashes=True, env=env).text)
    with bar("building") as shown:
        made = build_image(
            spec, requirements, builder, options, say=shown.say, resolve_secret=environment_secret
        )
    _try(builder, made, command, is_quiet=as_json)
    if given["scan"]:
        click.echo(scan_image(builder, made.name, severity=given["scan_severity"]), err=True)
    if given["push"]:
        click.echo(f"pushing {made.name}", err=True)
        with bar("pushing"):
            made = push_image(builder, made, options)
    if given["lock_path"]:
        text = lock_of(spec, requirements, builder, made).to_text()
        given["lock_path"].write_text(text, encoding="utf-8")
    _tell(made.name, made.digest, as_json=as_json)


def _check_file(path: Path | None) -> None:
    """Refuse a place for the lock that cannot be written, before an hour's work is done for it.

    Raises:
        SpecError: Its folder is not there or cannot be written, or it is a folder.
    """
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise SpecError(f"--lock {path}: cannot be written; name a file in a folder that is there")


def _options(given: dict[str, Any]) -> BuildOptions:
    return BuildOptions(
        name=given["name"],
        is_shared=given["push"],
        pull=given["pull"],
        cache=given["cache"],
        ca_file=given["ca_file"],
        tls_verify=not given["insecure"],
        args={**mirrors(), **pairs(given["args"], "--build-arg")},
        allowed_bases=(*given["bases"], *configured_bases()),
    )


def check_environment(
    spec: EnvSpec, requirements: Requirements, *, env: Mapping[str, str] | None = None
) -> None:
    """Print what could not be checked, and refuse conflicts and broken chains.

    Raises:
        SpecError: Conflicts of packages, or a chain from wheel to GPU that breaks on every GPU allowed.
    """
    findings = find_conflicts(spec, requirements, env=env)
    for finding in findings:
        if finding.kind == "unchecked":
            click.echo(f"not checked: {finding.text}", err=True)
    faults = [finding.text for finding in findings if finding.kind == "conflict"]
    faults += broken_for(spec, software(spec, requirements))
    refuse(faults)


def _try(builder: Builder, made: Built, command: tuple[str, ...], *, is_quiet: bool) -> None:
    """Run *command* in the image; what fails there is not pushed."""
    if not command:
        return
    code = builder.run(made.name, command, Container(), lambda line: click.echo(line, err=is_quiet))
    if code != 0:
        raise SpecError(f"{' '.join(command)}: ended with exit code {code} in {made.name}")
