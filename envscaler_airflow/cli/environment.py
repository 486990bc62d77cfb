"""What ``run`` runs in: a virtual environment on this machine, or a container of the stage's image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from envscaler_airflow.cli.common import find_run
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images import venv_cache
from envscaler_airflow.images.access import index_access
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.build import Built
from envscaler_airflow.images.builders import Builder
from envscaler_airflow.images.cuda import broken_software, software
from envscaler_airflow.images.locks import Lock, apply_lock, read_lock, system_versions
from envscaler_airflow.images.needs import Here, look_here
from envscaler_airflow.images.programs import stream_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import install_command, python_version
from envscaler_airflow.store.base import Store

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
    with index_access(requirements, resolve_secret=resolve_secret) as env:
        python = venv_cache.ensure(spec, cache, requirements=requirements, env=env, say=say)
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
