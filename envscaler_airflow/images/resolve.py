"""Find conflicts before the build: resolve packages for the stage's Python and platform, install none.

pip and uv use uv's resolver, conda uses a conda program's dry run. The known packages of the base take part
as packages that exist in only that version, because an index may not have them.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.programs import Output, find_program, run_program, uv_program
from envscaler_airflow.images.requirement_files import MAIN, Requirements
from envscaler_airflow.images.venv import python_version, render_conda

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
    platform: str = "linux", env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S,
) -> Resolution:  # fmt: skip
    """Resolve exact versions of the stage's Python packages.

    Args:
        spec: The stage.
        requirements: Its packages.
        hashes: True to lock every file by its sha256.
        with_base: False for a separate environment, which does not see the base's packages.
        platform: uv's name of the platform that the stage runs on.
        env: Added to the resolver's environment, such as NETRC for private indexes.
        timeout_s: Time limit.

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
        done = run_program(words, cwd=folder, env=env, timeout_s=timeout_s)
    if done.code != 0:
        raise _failure(done, held, spec)
    return Resolution(done.out)


def find_conflicts(
    spec: EnvSpec, requirements: Requirements, *, with_base: bool = True, env: Mapping[str, str] | None = None
) -> list[Finding]:
    """Report everything that prevents installing the packages together, for conda and pip."""
    findings: list[Finding] = []
    runtime = requirements.runtime
    if runtime is not None and runtime.package_manager == "conda":
        findings += _conda_conflicts(spec, requirements)
        only_files = runtime.model_copy(update={"packages": (), "channels": (), "package_manager": "pip"})
        requirements = Requirements(only_files, requirements.files, requirements.main, requirements.locked)
    try:
        resolve(spec, requirements, with_base=with_base, env=env)
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
        path = folder / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(item.text, encoding="utf-8")
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
    note = f"\n({', '.join(of_base)} is what the base {facts(spec.base).image} holds)" if of_base else ""
    return SpecError(f"runtimes: the packages cannot be installed together:\n{text}{note}")


def _conda_conflicts(spec: EnvSpec, requirements: Requirements) -> list[Finding]:
    program = find_program("micromamba", "mamba", "conda")
    if program is None:
        return [Finding("unchecked", "conda packages: none of micromamba, mamba and conda is installed here")]
    without_pip = Requirements(requirements.runtime)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "environment.yml")
        path.write_text(render_conda(spec, without_pip)[0].text, encoding="utf-8")
        words = [
            program,
            "create",
            "--dry-run",
            "--json",
            "--yes",
            "--name",
            "envscaler-dry-run",
            "--file",
            str(path),
        ]
        if Path(program).name == "conda":
            words = [
                program,
                "env",
                "create",
                "--dry-run",
                "--json",
                "--name",
                "envscaler-dry-run",
                "--file",
                str(path),
            ]
        try:
            done = run_program(words, timeout_s=TIMEOUT_S)
        except BackendError as err:
            return [Finding("unchecked", f"conda packages: {err}")]
    if done.code == 0:
        return []
    text = _conda_message(done)
    kind: Literal["conflict", "unchecked"] = "unchecked" if _UNREACHABLE.search(text) else "conflict"
    return [Finding(kind, f"conda packages: {text}")]


def _conda_message(done: Output) -> str:
    try:
        body = json.loads(done.out)
    except ValueError:
        body = {}
    if isinstance(body, dict):
        told = [str(body[key]) for key in ("message", "error", "solver_problems") if body.get(key)]
        if told:
            return "\n".join(told)
    return (done.err or done.out).strip() or f"exit code {done.code}"
