"""The exact environment of a run, so that it can be recreated: ``lock.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from envscaler_agent.protocol import SCHEMA, check_schema
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import ProtocolError, SpecError
from envscaler_airflow.images.bases import Family, facts
from envscaler_airflow.images.builders import Builder, Container
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.resolve import Resolution
from envscaler_airflow.images.venv import python_version
from envscaler_airflow.local_files import read_plain
from envscaler_airflow.store.run import Run

LOCK = "lock.json"
"""Name in a run's folder."""
MAX_BYTES = 1 << 22
"""Largest lock, bytes. Chosen: four times the largest requirements file."""

_VERSIONS: dict[Family, tuple[str, ...]] = {
    "apt": ("dpkg-query", "--show", "--showformat", "${Package}=${Version}\\n"),
    "dnf": ("rpm", "--query", "--queryformat", "%{NAME}=%{VERSION}-%{RELEASE}\\n"),
    "apk": ("sh", "-c", 'for name; do apk info --installed --verbose "$name"; done', "sh"),
}


@dataclass(frozen=True, slots=True)
class Lock:
    """An exact environment. None is unknown.

    Attributes:
        name: Name of the stage.
        python: Python version.
        requirements: Versions with hashes of every Python package; None if they were not resolved.
        base: Name of the base; None for the machine itself.
        base_digest: Digest of the base; None if it was never in a registry.
        system_packages: Name to version; None if they were not queried.
        image: Name of the image; None for a virtual environment.
        image_digest: Digest of the image in its registry.
        driver: Version of the GPU driver.
        gpus: Names of the GPUs.
    """

    name: str
    python: str
    requirements: str | None = None
    base: str | None = None
    base_digest: str | None = None
    system_packages: Mapping[str, str] | None = None
    image: str | None = None
    image_digest: str | None = None
    driver: str | None = None
    gpus: tuple[str, ...] = ()

    def to_text(self) -> str:
        """JSON, with readable package versions next to the hashed text."""
        body: dict[str, Any] = {"schema": SCHEMA}
        body |= {name: getattr(self, name) for name in self.__slots__}
        body["gpus"] = list(self.gpus)
        body["packages"] = Resolution(self.requirements).versions if self.requirements is not None else None
        return json.dumps(body, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes, where: str) -> Lock:
        """Read what :meth:`to_text` wrote; unknown fields are ignored.

        Raises:
            ProtocolError: *text* is not a lock, or is of another version.
        """
        try:
            body = json.loads(text)
            check_schema(body["schema"], where=where)
            kept = {name: body[name] for name in cls.__slots__ if body.get(name) is not None}
            return TypeAdapter(cls).validate_python(kept)
        except ValidationError as err:
            fault = err.errors()[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise ProtocolError(f"{where} is no lock of an environment: {field}: {fault['msg']}") from err
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise ProtocolError(f"{where} is no lock of an environment: {err!r}") from err


def read_lock(text: str, run: Run | None = None) -> Lock:
    """Read the lock in the file *text*, or of *run*.

    Raises:
        SpecError: There is no lock.
        ProtocolError: The lock cannot be read.
    """
    if run is None:
        try:
            return Lock.from_text(read_plain(Path(text), MAX_BYTES), text)
        except (OSError, UnicodeDecodeError) as err:
            raise SpecError(f"--locked {text}: cannot be read ({err}); name a run, or a lock.json") from err
    data = run.read(LOCK, max_bytes=MAX_BYTES)
    if data is None:
        raise SpecError(
            f"--locked {text}: the run {run.prefix} has no {LOCK}: it ran in no environment of its own"
        )
    return Lock.from_text(data, run.uri(LOCK))


def container_image(run: Run) -> str | None:
    """Image of a run in a container of this machine, which stores a lock and no events; None for others.

    Raises:
        StoreError: The store cannot be read.
        ProtocolError: The lock cannot be read.
    """
    data = run.read(LOCK, max_bytes=MAX_BYTES)
    return None if data is None else Lock.from_text(data, run.uri(LOCK)).image


def apply_lock(spec: EnvSpec, requirements: Requirements, lock: Lock) -> tuple[EnvSpec, Requirements]:
    """Pin *spec* and its packages to *lock*.

    Raises:
        SpecError: The lock is of another environment: the Python version differs, or it lacks packages.
    """
    if python_version(spec) != lock.python:
        raise SpecError(
            f"--locked: Python is {python_version(spec)} in the spec and {lock.python} in the lock"
        )
    if not requirements.is_empty and lock.requirements is None:
        raise SpecError(
            "--locked: the lock holds no Python packages, which were not resolved when it was made"
        )
    known = lock.system_packages
    names = [text.partition("=")[0] for text in spec.system_packages]
    absent = [name for name in names if known is not None and name not in known]
    if absent and lock.image is not None:
        raise SpecError(f"--locked: the lock has no version of {', '.join(absent)}; run without it")
    if known is not None:
        # A run on a machine records in its lock only packages that were installed there.
        exact = tuple(f"{name}={known[name]}" if name in known else name for name in names)
        spec = spec.model_copy(update={"system_packages": exact})
    if lock.requirements is not None and not requirements.is_empty:
        held = {**Resolution(lock.requirements).versions, **facts(spec.base).packages}
        if absent := [name for name in requirements.names if name not in held]:
            raise SpecError(f"--locked: the lock does not hold {', '.join(absent)}; run without it")
        requirements = requirements.with_lock(lock.requirements)
    return spec, requirements


def system_versions(spec: EnvSpec, builder: Builder, image: str) -> dict[str, str] | None:
    """Versions of the stage's system packages in *image*; None if the image cannot report them."""
    names = [text.partition("=")[0] for text in spec.system_packages]
    if not names:
        return {}
    lines: list[str] = []
    family = facts(spec.base).family
    if builder.run(image, [*_VERSIONS[family], *names], Container(), lines.append) != 0:
        return None
    return parse_versions(lines, names)


def parse_versions(lines: list[str], names: list[str]) -> dict[str, str]:
    """Parse ``name=version`` (dpkg, rpm) or ``name-version`` (apk) lines."""
    found = {}
    for line in lines:
        name, equals, version = line.strip().partition("=")
        if equals and name in names:
            found[name] = version
        for known in names if not equals else ():
            if line.startswith(f"{known}-") and line[len(known) + 1 :][:1].isdigit():
                found[known] = line.strip()[len(known) + 1 :]
    return found
