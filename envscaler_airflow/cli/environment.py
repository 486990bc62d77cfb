"""What ``run`` runs in: a virtual environment on this machine, or a container of the stage's image."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import click

from envscaler_agent.process import ADDRESS, expand
from envscaler_airflow.cli.common import echo_json, find_run
from envscaler_airflow.cli.specs import environment_secret
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import Resources
from envscaler_airflow.errors import NoOfferError, SpecError, refuse
from envscaler_airflow.images import venv_cache
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.build import BuildOptions, Built, build_image
from envscaler_airflow.images.builders import Builder, Container, find_builder
from envscaler_airflow.images.cuda import broken_software, software
from envscaler_airflow.images.dry_run import Here, best_fit, lacking_volumes, lacks, look_here
from envscaler_airflow.images.locks import LOCK, Lock, apply_lock, read_lock, resolve, system_versions
from envscaler_airflow.images.programs import index_access, stream_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import install_command, python_version
from envscaler_airflow.launch import PORT, Launch, Paths, launch_of
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.setup import copy_in
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Mount, Spool
from envscaler_airflow.sidecar.uploads import WriteBack
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run_store import Store

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
    spec: EnvSpec, *, lock: Lock | None, install_system: bool, say: Say
) -> LocalEnvironment:
    """Where *spec* runs here: its virtual environment is made, or used again.

    A stage without runtimes runs in this interpreter's environment.

    Raises:
        SpecError: The packages are not available, or the lock is of another environment.
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
    known = Lock(
        name=spec.name, python=python_version(spec), driver=here.driver, gpus=gpus,
        system_packages=here.installed_versions([text.partition("=")[0] for text in spec.system_packages]),
    )  # fmt: skip
    if requirements.runtime is None:
        return LocalEnvironment(spec, known)
    with index_access(requirements, resolve_secret=environment_secret) as env:
        python = venv_cache.ensure(spec, None, requirements=requirements, env=env, say=say)
    text = venv_cache.locked_requirements(python)
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
        SpecError: The installation was requested and failed.
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
        raise SpecError(f"--install-system: `{command}` failed; see its output above")


def _broken(spec: EnvSpec, requirements: Requirements, here: Here) -> list[str]:
    if not here.gpus:
        return []
    return broken_software(software(spec, requirements).on(here.gpus[0].name, driver=here.driver))


def find_lock(text: str, store: Store) -> Lock:
    """The lock of the file *text*, or of the run of that name in *store*.

    Raises:
        SpecError: There is none.
    """
    if text.endswith(".json") and not Path(text).is_file():
        raise SpecError(f"--locked {text}: no such file; `envscaler build --lock {text}` writes it")
    return read_lock(text) if Path(text).is_file() else read_lock(text, find_run(store, text))


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


SCRATCH = Path("/var/tmp")  # noqa: S108  # a new folder below it, of this user alone
"""Where volumes are copied to for as long as the container runs: survives, and is seldom in memory."""
OUTPUTS = "envscaler-outputs"
"""Folder of the working directory that keeps what runs in containers made."""


def run_docker(
    spec: EnvSpec, store: Store, key: RunKey, lock: Lock | None, *, command: tuple[str, ...], as_json: bool
) -> None:
    """Run *spec*, or *command* in its place, in a container; its exit code ends this process.

    The image is built when its content is new. With *as_json* what it prints goes to standard error, and how
    it ended to standard output.

    Raises:
        SpecError: The image cannot be built, or the stage cannot run in a container here.
        NoOfferError: The machine does not have what it asks for.
    """
    builder = find_builder(None)
    here = look_here()
    stage = without_gpus(spec, here, _say)
    need = best_fit(stage, here)
    if missing := lacks(need, here):
        raise NoOfferError(f"{spec.name}: {'; '.join(missing)}")
    check_stage(spec, here)
    image, seen = _bring_image(spec, lock, builder)
    seen = replace(seen, driver=here.driver, gpus=tuple(gpu.name for gpu in here.gpus))
    store.write(f"{key.prefix}/{LOCK}", seen.to_text().encode())
    folder = outputs_folder(key)
    launch = launch_of(stage, 1)
    words = command or _alone(launch)
    opened = container_of(launch, need, folder, store, resolve_secret=environment_secret)
    with opened as (container, bring_back):
        code = builder.run(image, words, container, lambda line: click.echo(line, err=as_json))
        if code == 0:
            bring_back()
    if folder.is_dir():
        _say(f"outputs: {folder}")
    if as_json:
        outputs = str(folder) if folder.is_dir() else None
        echo_json({"run": key.prefix, "exit_code": code, "outputs": outputs})
    if code != 0:
        raise SystemExit(code)


def _alone(launch: Launch) -> tuple[str, ...]:
    """The command, which no wrapper completes here: this is the only node, also of an elastic launch."""
    return tuple(expand(launch.command, {ADDRESS: f"127.0.0.1:{PORT}", "ENVSCALER_NODE": "0"}))


def outputs_folder(key: RunKey) -> Path:
    """Folder of a run's outputs: a single folder below the working directory, for any run name."""
    return Path(OUTPUTS, key.prefix.split("/")[2]).resolve()


def _bring_image(spec: EnvSpec, lock: Lock | None, builder: Builder) -> tuple[str, Lock]:
    """Name of the image of *spec*, which is here afterwards, and what it is, exactly."""
    requirements, options = read_requirements(spec), BuildOptions()
    if lock is not None:
        spec, requirements = apply_lock(spec, requirements, lock)
        options = replace(options, base_digest=lock.base_digest)
    elif not requirements.is_empty and not requirements.has_conda_packages:
        with index_access(requirements, resolve_secret=environment_secret) as env:
            requirements = requirements.with_lock(resolve(spec, requirements, hashes=True, env=env).text)
    made = build_image(spec, requirements, builder, options, say=_say, resolve_secret=environment_secret)
    return made.name, lock_of(spec, requirements, builder, made)


def _say(line: str) -> None:
    click.echo(line, err=True)


def check_stage(spec: EnvSpec, here: Here) -> None:
    """Refuse what no container of this machine can have, every fault at once.

    Raises:
        SpecError: A claim of Kubernetes, an export that is not mounted, a folder that is not there, nodes.
    """
    faults = lacking_volumes(spec, here)
    if spec.num_nodes.min > 1:
        faults.append(f"num_nodes: {spec.num_nodes.min}: one container is one node; use --target local")
    refuse(faults)


@contextmanager
def container_of(
    launch: Launch, need: Resources, folder: Path, store: Store, *, resolve_secret: Resolve
) -> Iterator[tuple[Container, Callable[[], None]]]:
    """A container for *launch* with the limits of *need*, and a call that copies results back.

    What is written below the folders of outputs and checkpoints stays in *folder*. Other copies are
    deleted; the call first copies back what the stage wrote to writable volumes of object stores.

    Raises:
        SpecError: A source that does not exist, or a secret that cannot be resolved here.
    """
    secrets = {name: resolve_secret(str(reference)) for name, reference in launch.secrets.items()}
    # Files of the image's user may be none of ours to remove.
    with tempfile.TemporaryDirectory(
        prefix="envscaler-volumes-", dir=SCRATCH, ignore_cleanup_errors=True
    ) as name:
        context = _lay_out(launch.paths, Path(name), store)
        container = Container(
            env={**launch.env, **secrets},
            mounts=(*_volume_mounts(launch.paths, context), *_kept_folders(launch.paths, folder)),
            cpus=need.limits.cpu_cores,
            memory_bytes=need.limits.memory_bytes,
            shm_bytes=need.shm_bytes,
            gpus=need.requests.gpu_count,
        )
        volumes = WriteBack(context)
        yield container, lambda: context.patiently(volumes.flush, what="volumes")


def _lay_out(paths: Paths, scratch: Path, store: Store) -> SidecarContext:
    """The sidecar's own surroundings, with what is copied in."""
    mounts = tuple(
        Mount(
            name=volume.name,
            source=volume.source,
            path=str(scratch / volume.name / PurePosixPath(volume.mount_path).name),
            read_only=volume.is_read_only,
        )
        for volume in paths.volumes
        if volume.is_copied
    )
    spool = Spool(scratch / ".spool")
    context = SidecarContext(spool, store, AttemptNode(1, 1, 0, 1), Layout(mounts=mounts), Memory(spool))
    for mount in mounts:
        copy_in(context, mount)
        for item in (Path(mount.path), *Path(mount.path).rglob("*")):  # the image's user is another than ours
            if not item.is_symlink():
                rights = 0o555 if item.is_dir() else 0o444
                item.chmod(item.stat().st_mode | (rights if mount.read_only else rights | 0o222))
    WriteBack(context).mark()
    return context


def _volume_mounts(paths: Paths, context: SidecarContext) -> list[tuple[str, str, bool]]:
    copies = {mount.name: mount.path for mount in context.layout.mounts}
    found = []
    for volume in paths.volumes:
        source = volume.mount_path if volume.kind == "nfs" else volume.location
        found.append((copies.get(volume.name, source), volume.mount_path, volume.is_read_only))
    return found


def _kept_folders(paths: Paths, folder: Path) -> list[tuple[str, str, bool]]:
    """A folder here for each folder that outputs or checkpoints are written to."""
    found = []
    for path in paths.written:
        place = folder / path.strip("/").replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)  # the image's user is another than ours
        found.append((str(place), path, False))
    return found
