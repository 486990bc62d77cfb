"""Virtual environments of the local target: created once for each content, then reused."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.dry_run import INSTALL_UV, has_uv, python_of
from envscaler_airflow.images.locks import resolve, strategy
from envscaler_airflow.images.programs import run_program, uv_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import python_version
from envscaler_airflow.local_files import cache_folder

LOCK = "envscaler/requirements.lock"
"""File in an environment: the exact versions with hashes from which it was created."""
READY = ".envscaler-ready"
"""File in a finished environment; an environment without it was interrupted and is recreated."""
TIMEOUT_S = 3600.0
"""Longest installation, seconds. Chosen: several gigabytes of wheels on a slow line."""


def default_cache() -> Path:
    """``~/.cache/envscaler/venvs``, or below XDG_CACHE_HOME."""
    return cache_folder() / "venvs"


def ensure(
    spec: EnvSpec,
    cache: Path | None = None,
    *,
    requirements: Requirements | None = None,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Path of the Python of *spec*'s environment, which is created if its content is new.

    The content is the Python version, the machine's architecture, and the text of every requirements file.

    Args:
        spec: The stage.
        cache: Folder of all environments; None for the user's default.
        requirements: Its packages; None reads them from the folder of the spec.
        env: Added to the installer's environment, such as NETRC.
        say: Called with one line for each step.

    Raises:
        SpecError: The packages cannot be installed; the message has the installer's output.
        BackendError: The installer cannot be started or does not end in time.
    """
    wanted = read_requirements(spec) if requirements is None else requirements
    if wanted.runtime is not None and wanted.runtime.package_manager == "conda":
        raise SpecError("runtimes: package_manager: conda is for images; write pip or uv under targets.local")
    folder = (cache or default_cache()) / environment_key(spec, wanted)
    python = folder / "bin" / "python"
    if _is_ready(folder):
        return python
    with _locked(folder.with_suffix(".lock")):
        if _is_ready(folder):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        named = f"Python {python_version(spec)}, {_count(wanted)} packages named"
        (say or _quiet)(f"environment {folder.name[:12]}: {named}")
        _make(spec, wanted, folder, env or {})
    return python


def _is_ready(folder: Path) -> bool:
    """False also if the Python that created it is gone from this machine."""
    return (folder / READY).is_file() and (folder / "bin" / "python").exists()


def environment_key(spec: EnvSpec, requirements: Requirements) -> str:
    """24 hex digits over the content of an environment."""
    files = [(item.name, item.text) for item in requirements.artefacts()]
    body = json.dumps([python_version(spec), files, os.uname().machine], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()[:24]


def _make(spec: EnvSpec, requirements: Requirements, folder: Path, env: Mapping[str, str]) -> None:
    if not requirements.needs_installer and not has_uv():
        _make_bare(spec, requirements, folder)
        return
    # Resolve first: it can fail without leaving files behind.
    locked = resolve(spec, requirements, hashes=True, with_base=False, platform=_platform(), env=env).text
    uv = uv_program()
    words = [uv, "venv", "--quiet", "--no-project", "--python", python_version(spec), str(folder)]
    made = run_program(words, env=env, timeout_s=TIMEOUT_S)
    if made.code != 0:
        raise SpecError(f"runtimes: Python {python_version(spec)}: {made.err.strip()}")
    path = _write_lock(folder, requirements.with_lock(locked))
    if locked.strip():
        install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
        options = ["--require-hashes", *strategy(requirements), "--requirement", str(path)]
        done = run_program([*install, *options], env=env, timeout_s=TIMEOUT_S)
        if done.code != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise SpecError(f"runtimes: the packages cannot be installed:\n{done.err.strip()}")
    (folder / READY).write_text("", encoding="utf-8")


def _make_bare(spec: EnvSpec, requirements: Requirements, folder: Path) -> None:
    """Create an environment without packages with Python's own ``venv``, so without uv."""
    version = python_version(spec)
    python = python_of(version)
    if python is None:
        raise SpecError(f"runtimes: Python {version} is not here; {INSTALL_UV}, which brings it")
    made = run_program([python, "-m", "venv", "--without-pip", str(folder)], timeout_s=TIMEOUT_S)
    if made.code != 0:
        raise SpecError(f"runtimes: Python {version}: {(made.err or made.out).strip()}")
    _write_lock(folder, requirements.with_lock(""))
    (folder / READY).write_text("", encoding="utf-8")


def _write_lock(folder: Path, requirements: Requirements) -> Path:
    path = folder / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(requirements.text(), encoding="utf-8")
    return path


def locked_requirements(python: Path) -> str:
    """Exact versions with hashes from which the environment of *python* was created."""
    return (python.parent.parent / LOCK).read_text(encoding="utf-8")


def _platform() -> str:
    machine = os.uname().machine
    return f"{'aarch64' if machine in ('arm64', 'aarch64') else 'x86_64'}-unknown-linux-gnu"


def _count(requirements: Requirements) -> int:
    return len(requirements.runtime.packages if requirements.runtime else ()) + sum(
        1
        for text in requirements.files.values()
        for line in text.splitlines()
        if line.strip() and line.strip()[0] not in "#-"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out concurrent creators. The kernel owns the lock, so a killed process leaves none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _quiet(_line: str) -> None:
    """Discard a line."""
