"""``run --target docker``: a stage in a container of its image on this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import click

from envscaler_agent.process import ADDRESS, expand
from envscaler_airflow.cli.environment import Resolve, lock_of, without_gpus
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import Resources
from envscaler_airflow.errors import NoOfferError, SpecError
from envscaler_airflow.images.access import index_access
from envscaler_airflow.images.build import BuildOptions, build_image
from envscaler_airflow.images.builders import Builder, Container, find_builder
from envscaler_airflow.images.dry_run import best_fit, lacking_volumes, lacks
from envscaler_airflow.images.locks import LOCK, Lock, apply_lock, resolve
from envscaler_airflow.images.needs import Here, look_here
from envscaler_airflow.images.requirement_files import read_requirements
from envscaler_airflow.launch import PORT, Launch, Paths, launch_of
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.inputs import copy_in
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Mount, Spool
from envscaler_airflow.sidecar.writeback import WriteBack
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.keys import RunKey

SCRATCH = Path("/var/tmp")  # noqa: S108 (a new folder below it, of this user alone)
"""Where volumes are copied to for as long as the container runs: survives, and is seldom in memory."""
OUTPUTS = "envscaler-outputs"
"""Folder of the working directory that keeps what runs in containers made."""


def run_docker(
    spec: EnvSpec,
    store: Store,
    key: RunKey,
    lock: Lock | None,
    *,
    command: tuple[str, ...],
    resolve_secret: Resolve,
    as_json: bool = False,
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
    image, seen = _bring_image(spec, lock, builder, resolve_secret)
    seen = replace(seen, driver=here.driver, gpus=tuple(gpu.name for gpu in here.gpus))
    store.write(f"{key.prefix}/{LOCK}", seen.to_text().encode())
    folder = outputs_folder(key)
    launch = launch_of(stage, 1)
    words = command or _alone(launch)
    with container_of(launch, need, folder, store, resolve_secret=resolve_secret) as (container, bring_back):
        code = builder.run(image, words, container, lambda line: click.echo(line, err=as_json))
        if code == 0:
            bring_back()
    if folder.is_dir():
        _say(f"outputs: {folder}")
    if as_json:
        outputs = str(folder) if folder.is_dir() else None
        click.echo(json.dumps({"run": key.prefix, "exit_code": code, "outputs": outputs}))
    if code != 0:
        raise SystemExit(code)


def _alone(launch: Launch) -> tuple[str, ...]:
    """The command, which no wrapper completes here: this is the only node, also of an elastic launch."""
    return tuple(expand(launch.command, {ADDRESS: f"127.0.0.1:{PORT}", "ENVSCALER_NODE": "0"}))


def outputs_folder(key: RunKey) -> Path:
    """Folder of a run's outputs: a single folder below the working directory, for any run name."""
    return Path(OUTPUTS, key.prefix.split("/")[2]).resolve()


def _bring_image(
    spec: EnvSpec, lock: Lock | None, builder: Builder, resolve_secret: Resolve
) -> tuple[str, Lock]:
    """Name of the image of *spec*, which is here afterwards, and what it is, exactly."""
    requirements, options = read_requirements(spec), BuildOptions()
    if lock is not None:
        spec, requirements = apply_lock(spec, requirements, lock)
        options = replace(options, base_digest=lock.base_digest)
    elif not requirements.is_empty and not requirements.has_conda_packages:
        with index_access(requirements, resolve_secret=resolve_secret) as env:
            requirements = requirements.with_lock(resolve(spec, requirements, hashes=True, env=env).text)
    made = build_image(spec, requirements, builder, options, say=_say, resolve_secret=resolve_secret)
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
    if faults:
        raise SpecError("\n".join(faults), faults=faults)


@contextmanager
def container_of(
    launch: Launch, need: Resources, folder: Path, store: Store, *, resolve_secret: Resolve
) -> Iterator[tuple[Container, Callable[[], None]]]:
    """A container for *launch*: its volumes, variables, and the limits of *need*; and what brings back.

    What is written below the folders of outputs and checkpoints stays in *folder*. What is copied in goes;
    the call brings back first what the stage wrote to volumes of object stores that it may write.

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
    mounted = {volume.mount_path for volume in paths.volumes}
    found = []
    for path in dict.fromkeys(str(PurePosixPath(path).parent) for path in paths.uploaded):
        if path == "/" or any(PurePosixPath(path).is_relative_to(mount) for mount in mounted):
            continue
        place = folder / path.strip("/").replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)  # the image's user is another than ours
        found.append((str(place), path, False))
    return found
