"""What ``run`` runs in: a virtual environment on this machine, or a container of the stage's image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import click

from envscaler_airflow.build import venvs
from envscaler_airflow.build.access import index_access
from envscaler_airflow.build.bases import facts
from envscaler_airflow.build.builders import Builder, Container, find_builder
from envscaler_airflow.build.cuda import broken_software, software
from envscaler_airflow.build.images import BuildOptions, Built, build_image
from envscaler_airflow.build.locks import LOCK, Lock, apply_lock, read_lock, system_versions
from envscaler_airflow.build.machine import Here, look_here
from envscaler_airflow.build.programs import stream_program
from envscaler_airflow.build.requirements import Requirements, read_requirements
from envscaler_airflow.build.resolve import resolve
from envscaler_airflow.build.venv import install_command, python_version
from envscaler_airflow.cli.common import find_run
from envscaler_airflow.errors import SpecError
from envscaler_airflow.spec.models import EnvSpec
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.keys import RunKey

Say = Callable[[str], None]
Resolve = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class LocalEnvironment:
    """Where a stage runs on this machine.

    Attributes:
        spec: The stage as it runs here.
        lock: What the environment is, exactly.
        python: Interpreter of its virtual environment; None for that of this process.
    """

    spec: EnvSpec
    lock: Lock
    python: Path | None = None


def local_environment(
    spec: EnvSpec,
    *,
    lock: Lock | None,
    install_system: bool,
    say: Say,
    resolve_secret: Resolve,
    cache: Path | None = None,
) -> LocalEnvironment:
    """Where *spec* runs here: its virtual environment is made, or used again.

    A stage without runtimes runs in this interpreter's environment.

    Raises:
        SpecError: The packages cannot be had, or the lock is of another environment.
    """
    here = look_here()
    requirements = read_requirements(spec)
    if lock is not None:
        spec, requirements = apply_lock(spec, requirements, lock)
    bring_packages(spec, here, install_system=install_system, say=say)
    spec = without_gpus(spec, here, say)
    for link in _broken(spec, requirements, here):
        say(f"warning: {link}")
    gpus = tuple(gpu.name for gpu in here.gpus)
    known = Lock(name=spec.name, python=python_version(spec), driver=here.driver, gpus=gpus)
    if requirements.runtime is None:
        return LocalEnvironment(spec, known)
    with index_access(requirements, resolve_secret=resolve_secret) as env:
        python = venvs.ensure(spec, cache, requirements=requirements, env=env, say=say)
    text = venvs.locked_requirements(python)
    exact = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("--"))
    return LocalEnvironment(spec, replace(known, requirements=exact), python)


def without_gpus(spec: EnvSpec, here: Here, say: Say) -> EnvSpec:
    """*spec* on CPUs, when it says that it may and there is no GPU; else as it is."""
    need = spec.resources
    if here.gpus or not need.cpu_fallback or need.requests.gpu is None:
        return spec
    say("no GPU here: runs on CPUs, as resources.cpu_fallback allows")
    requests = need.requests.model_copy(update={"gpu": None})
    limits = need.limits.model_copy(update={"gpu": None})
    return spec.model_copy(
        update={"resources": need.model_copy(update={"requests": requests, "limits": limits})}
    )


def bring_packages(spec: EnvSpec, here: Here, *, install_system: bool, say: Say) -> None:
    """Name system packages that are not installed with the command; run it only when asked to.

    Raises:
        SpecError: It was asked for and failed.
    """
    absent = here.absent_packages(spec.system_packages) if spec.system_packages else []
    if absent is None:
        say(f"system packages cannot be looked up here: {', '.join(spec.system_packages)}")
        return
    if not absent:
        return
    command = install_command(facts(spec.base).family, tuple(absent))
    if not install_system:
        say(f"missing system packages: {', '.join(absent)}; run `{command}`, or --install-system")
        return
    say(command)
    if stream_program(command.split(), say, env={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        raise SpecError(f"--install-system: `{command}` failed; its output stands above")


def _broken(spec: EnvSpec, requirements: Requirements, here: Here) -> list[str]:
    if not here.gpus:
        return []
    return broken_software(software(spec, requirements).on(here.gpus[0].name, driver=here.driver))


def find_lock(text: str, store: Store) -> Lock:
    """The lock of the file *text*, or of the run of that name in *store*.

    Raises:
        SpecError: There is none.
    """
    return read_lock(text) if Path(text).is_file() else read_lock(text, store, find_run(store, text))


def run_docker(
    spec: EnvSpec,
    store: Store,
    key: RunKey,
    lock: Lock | None,
    *,
    command: tuple[str, ...],
    resolve_secret: Resolve,
) -> None:
    """Run *spec*, or *command* in its place, in a container; its exit code ends this process.

    The image is built when its content is new.

    Raises:
        SpecError: The image cannot be built, or the stage cannot run in a container here.
    """
    requirements, options = read_requirements(spec), BuildOptions()
    if lock is not None:
        spec, requirements = apply_lock(spec, requirements, lock)
        options = replace(options, base_digest=lock.base_digest)
    elif not requirements.is_empty:
        with index_access(requirements, resolve_secret=resolve_secret) as env:
            requirements = requirements.with_lock(resolve(spec, requirements, hashes=True, env=env).text)
    builder, say = find_builder(None), functools.partial(click.echo, err=True)
    made = build_image(spec, requirements, builder, options, say=say, resolve_secret=resolve_secret)
    here = look_here()
    seen = lock_of(spec, requirements, builder, made)
    seen = replace(seen, driver=here.driver, gpus=tuple(gpu.name for gpu in here.gpus))
    store.write(f"{key.prefix}/{LOCK}", seen.to_text().encode())
    folder = Path("envscaler-outputs", key.run_id).resolve()
    spec = without_gpus(spec, here, say)
    spec = spec.model_copy(update={"entrypoint": command or spec.entrypoint})
    code = run_container(spec, builder, made.name, folder, say=click.echo, resolve_secret=resolve_secret)
    if folder.is_dir():
        say(f"outputs: {folder}")
    if code != 0:
        raise SystemExit(code)


def lock_of(spec: EnvSpec, requirements: Requirements, builder: Builder, made: Built) -> Lock:
    """What the image *made* is, exactly."""
    return Lock(
        name=spec.name,
        python=python_version(spec),
        requirements=requirements.locked,
        base=made.base,
        base_digest=made.base_digest,
        system_packages=system_versions(spec, builder, made.name),
        image=made.name,
        image_digest=made.digest,
    )


def run_container(
    spec: EnvSpec, builder: Builder, image: str, folder: Path, *, say: Say, resolve_secret: Resolve
) -> int:
    """Run the entrypoint of *spec* in *image*, with its volumes, variables and limits; the exit code.

    What it writes below the folders of its outputs and checkpoints stays in *folder*.

    Raises:
        SpecError: A volume that only a courier brings, or a secret that cannot be resolved here.
    """
    copied = [volume.name for volume in spec.volumes if volume.is_copied]
    if copied:
        raise SpecError(
            f"volumes: {', '.join(copied)}: are copied in by --target local; "
            "for docker write hostPath: sources under targets.docker"
        )
    env = {item.name: item.value for item in spec.env if item.value is not None}
    env |= {item.name: resolve_secret(item.value_from) for item in spec.env if item.value_from is not None}
    need = spec.resources.alternatives[0]
    container = Container(
        env=env,
        mounts=(*_volume_mounts(spec), *_kept_folders(spec, folder)),
        cpus=need.limits.cpu_cores,
        memory_bytes=need.limits.memory_bytes,
        shm_bytes=need.shm_bytes,
        gpus=need.requests.gpu_count,
    )
    return builder.run(image, spec.entrypoint, container, say)


def _volume_mounts(spec: EnvSpec) -> list[tuple[str, str, bool]]:
    found = []
    for volume in spec.volumes:
        if volume.kind != "hostPath":
            where = f"volumes: {volume.name}: {volume.source}"
            raise SpecError(f"{where} cannot be mounted here; write another source under targets.docker")
        found.append((volume.location, volume.mount_path, volume.is_read_only))
    return found


def _kept_folders(spec: EnvSpec, folder: Path) -> list[tuple[str, str, bool]]:
    """A folder here for each folder that outputs or checkpoints are written to."""
    mounted = {volume.mount_path for volume in spec.volumes}
    paths = [str(PurePosixPath(path).parent) for path in spec.outputs.values()]
    if spec.checkpoint is not None and spec.checkpoint.path is not None:
        paths.append(str(PurePosixPath(spec.checkpoint.path).parent))
    found = []
    for path in dict.fromkeys(paths):
        if path == "/" or any(PurePosixPath(path).is_relative_to(mount) for mount in mounted):
            continue
        place = folder / path.strip("/").replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)  # the image's user is another than ours
        found.append((str(place), path, False))
    return found
