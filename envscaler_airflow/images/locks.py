"""Resolve packages before the build, and lock the exact environment of a run: ``lock.json``.

To find conflicts, packages are resolved for the stage's Python and platform, and none is installed: pip and
uv use uv's resolver, conda uses a conda program's dry run. The known packages of the base take part as
packages that exist in only that version, because an index may not have them.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name

from envscaler_agent.messages import SCHEMA, check_schema, object_or_empty
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import BackendError, ProtocolError, SpecError
from envscaler_airflow.images.bases import Family, facts
from envscaler_airflow.images.builders import Builder, Container
from envscaler_airflow.images.programs import Output, find_program, run_program, uv_program
from envscaler_airflow.images.requirement_files import MAIN, Requirements
from envscaler_airflow.images.venv import python_version, render_conda
from envscaler_airflow.local_files import read_plain
from envscaler_airflow.planning.record import Record
from envscaler_airflow.store.run import Run

TIMEOUT_S = 120.0
"""Longest resolution, seconds. Chosen: a cold cache on a slow line; a warm one takes one or two."""
_UNREACHABLE = re.compile(
    r"failed to fetch|error sending request|dns error|connection|timed? ?out|could not connect|offline",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        kind: ``conflict`` stops a build; ``unchecked`` names what could not be checked and why.
        text: Message, with the chain of requirements if there is one.
    """

    kind: Literal["conflict", "unchecked"]
    text: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """Exact versions.

    Attributes:
        text: A requirements file with versions, and with hashes if requested, without the base's packages.
    """

    text: str

    @property
    def versions(self) -> dict[str, str]:
        """Canonical name to version."""
        found = re.findall(
            r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", self.text, re.MULTILINE
        )
        return {canonicalize_name(name): version for name, version in found}


def resolve(
    spec: EnvSpec, requirements: Requirements, *, hashes: bool = False, with_base: bool = True,
    platform: str = "linux", env: Mapping[str, str] | None = None,
) -> Resolution:  # fmt: skip
    """Resolve exact versions of the stage's Python packages.

    Args:
        spec: The stage.
        requirements: Its packages.
        hashes: True to lock every file by its sha256.
        with_base: False for a separate environment, which does not see the base's packages.
        platform: uv's name of the platform that the stage runs on.
        env: Added to the resolver's environment, such as NETRC for private indexes.

    Raises:
        SpecError: The packages conflict (the message is the chain of requirements), or they are conda's.
        BackendError: The index cannot be reached.
    """
    if requirements.is_empty:
        return Resolution("")
    if requirements.locked is not None:
        return Resolution(requirements.locked)
    if requirements.has_conda_packages:  # pip's index has other packages under the same names
        raise SpecError(
            "runtimes: package_manager: conda's packages cannot be locked; "
            "leave --lock out, or write pip or uv"
        )
    held = _held(spec, requirements) if with_base else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _lay_out(folder, requirements, held)
        words = [
            uv_program(), "pip", "compile", MAIN, "--quiet", "--no-header", "--no-annotate", "--color=never",
            "--no-python-downloads",
            f"--python-version={python_version(spec)}", f"--python-platform={platform}",
            *(["--generate-hashes"] if hashes else []), *_held_options(held),
            *strategy(requirements),
        ]  # fmt: skip
        done = run_program(words, cwd=folder, env=env, timeout_s=TIMEOUT_S)
    if done.code != 0:
        raise _failure(done, held, spec)
    return Resolution(done.out)


def find_conflicts(
    spec: EnvSpec, requirements: Requirements, *, env: Mapping[str, str] | None = None
) -> list[Finding]:
    """Report everything that prevents installing the packages together, for conda and pip."""
    findings: list[Finding] = []
    runtime = requirements.runtime
    if runtime is not None and runtime.package_manager == "conda":
        findings += _conda_conflicts(spec, requirements)
        only_files = runtime.model_copy(update={"packages": (), "channels": (), "package_manager": "pip"})
        requirements = Requirements(only_files, requirements.files, requirements.main, requirements.locked)
    try:
        resolve(spec, requirements, env=env)
    except SpecError as err:
        findings.append(Finding("conflict", str(err)))
    except BackendError as err:
        findings.append(Finding("unchecked", f"packages: {err}"))
    return findings


def _held(spec: EnvSpec, requirements: Requirements) -> dict[str, str]:
    """Python packages of the base, if the stage uses the base's Python."""
    known = facts(spec.base)
    version = None if requirements.runtime is None else requirements.runtime.version
    return known.packages if known.has_python(version) else {}


def _lay_out(folder: Path, requirements: Requirements, held: Mapping[str, str]) -> None:
    for item in requirements.artefacts():
        item.write(folder)
    if held:
        wheels = folder / "held"
        wheels.mkdir()
        for name, version in held.items():
            _write_wheel(wheels, name, version)
        text = "".join(f"{name}=={version}\n" for name, version in held.items())
        (folder / "base.txt").write_text(text, encoding="utf-8")


def _write_wheel(folder: Path, name: str, version: str) -> None:
    """Write an empty wheel, from which the resolver learns the version that the base contains."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def _held_options(held: Mapping[str, str]) -> list[str]:
    if not held:
        return []
    left_out = [f"--no-emit-package={name}" for name in held]
    pre = ["--prerelease=if-necessary-or-explicit"]
    return ["--constraint=base.txt", "--find-links=held", *left_out, *pre]


def strategy(requirements: Requirements) -> list[str]:
    """Options to search all indexes as pip does; by default uv stops at the first index with a package."""
    is_pip = requirements.runtime is None or requirements.runtime.package_manager == "pip"
    return ["--index-strategy=unsafe-best-match"] if is_pip else []


def _failure(done: Output, held: Mapping[str, str], spec: EnvSpec) -> SpecError | BackendError:
    text = "\n".join(line.rstrip() for line in (done.err or done.out).strip().splitlines())
    if "No solution found" not in text:
        if _UNREACHABLE.search(text):
            return BackendError(
                f"the index cannot be reached, so that nothing is known:\n{text}", transient=True
            )
        return SpecError(f"runtimes: packages cannot be resolved:\n{text}")
    of_base = [f"{name}=={version}" for name, version in held.items() if name in canonicalize_name(text)]
    note = f"\n({', '.join(of_base)} is what the base {facts(spec.base).image} contains)" if of_base else ""
    return SpecError(f"runtimes: the packages cannot be installed together:\n{text}{note}")


def _conda_conflicts(spec: EnvSpec, requirements: Requirements) -> list[Finding]:
    program = find_program("micromamba", "mamba", "conda")
    if program is None:
        return [Finding("unchecked", "conda packages: none of micromamba, mamba and conda is installed here")]
    without_pip = Requirements(requirements.runtime)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "environment.yml")
        path.write_text(render_conda(spec, without_pip)[0].text, encoding="utf-8")
        command = ["env", "create"] if Path(program).name == "conda" else ["create", "--yes"]
        options = ["--dry-run", "--json", "--name", "envscaler-dry-run", "--file", str(path)]
        try:
            done = run_program([program, *command, *options], timeout_s=TIMEOUT_S)
        except BackendError as err:
            return [Finding("unchecked", f"conda packages: {err}")]
    if done.code == 0:
        return []
    text = _conda_message(done)
    kind: Literal["conflict", "unchecked"] = "unchecked" if _UNREACHABLE.search(text) else "conflict"
    return [Finding(kind, f"conda packages: {text}")]


def _conda_message(done: Output) -> str:
    body = object_or_empty(done.out)
    told = [str(body[key]) for key in ("message", "error", "solver_problems") if body.get(key)]
    if told:
        return "\n".join(told)
    return (done.err or done.out).strip() or f"exit code {done.code}"


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
class Lock(Record):
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
        body: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__slots__}}
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
            return cls.from_dict(body)
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            fault = str(err) if isinstance(err, ValueError) else repr(err)
            raise ProtocolError(f"{where} is not the lock of an environment: {fault}") from err


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
    found = _lock_of(run)
    if found is None:
        raise SpecError(
            f"--locked {text}: the run {run.prefix} has no {LOCK}: it ran in no environment of its own"
        )
    return found


def _lock_of(run: Run) -> Lock | None:
    data = run.read(LOCK, max_bytes=MAX_BYTES)
    return None if data is None else Lock.from_text(data, run.uri(LOCK))


def container_image(run: Run) -> str | None:
    """Image of a run in a container of this machine, which stores a lock and no events; None for others.

    Raises:
        StoreError: The store cannot be read.
        ProtocolError: The lock cannot be read.
    """
    found = _lock_of(run)
    return None if found is None else found.image


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
        raise SpecError("--locked: the lock has no Python packages, which were not resolved when it was made")
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
