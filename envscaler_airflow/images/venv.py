"""The environment of a stage without an image: a script for venv, ``environment.yml`` for conda. Pure."""

from __future__ import annotations

import shlex
from typing import Any

from envscaler_airflow.envspec.models import EnvSpec, EnvVar
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.bases import Family, facts
from envscaler_airflow.images.requirement_files import MAIN, Requirements

DEFAULT_PYTHON = "3.11"
"""Python of a stage that names none. Chosen: the oldest that the provider itself supports."""

_SCRIPT = """\
#!/bin/sh
{head}set -eu
cd "$(dirname "$0")"
venv="${{1:-.venv}}"
python={python}
if command -v uv >/dev/null 2>&1; then
  uv venv --quiet --allow-existing --python "$python" "$venv"
{uv}else
  "python$python" -m venv "$venv"
{pip}fi
"""


def render_venv(spec: EnvSpec, requirements: Requirements) -> list[Artefact]:
    """``venv.sh`` creates the environment in its own folder, ``env.sh`` sets its variables."""
    version = python_version(spec)
    hashes = " --require-hashes" if requirements.locked is not None else ""
    has_packages = not requirements.is_empty
    script = _SCRIPT.format(
        head=comment([f"Makes a virtual environment for {spec.name}.", *_needs(spec)]),
        python=shlex.quote(version),
        uv=f'  uv pip install --quiet --python "$venv/bin/python"{hashes} --requirement {MAIN}\n'
        if has_packages
        else "",
        pip=f'  "$venv/bin/python" -m pip install --quiet{hashes} --requirement {MAIN}\n'
        if has_packages
        else "",
    )
    return [
        Artefact("venv.sh", script, is_executable=True),
        *requirements.artefacts(),
        Artefact("env.sh", env_script(spec)),
    ]


def python_version(spec: EnvSpec) -> str:
    """Python of the stage: from the spec, or the base's, or the default."""
    written = next((runtime.version for runtime in spec.runtimes if runtime.version), None)
    of_base = facts(spec.base).python or ""
    return written or (of_base if "." in of_base else DEFAULT_PYTHON)


def env_script(spec: EnvSpec) -> str:
    """Plain variables as exports; a reference is listed by name and never resolved here."""
    lines = [
        f"export {item.name}={shlex.quote(item.value)}\n"
        if item.value is not None
        else comment([_reference(item)])
        for item in spec.env
    ]
    return "".join(lines)


def _reference(item: EnvVar) -> str:
    return f"{item.name} is taken from {item.value_from}: set it before the start"


def _needs(spec: EnvSpec) -> list[str]:
    if not spec.system_packages:
        return []
    return [f"Needs system packages: {install_command(facts(spec.base).family, spec.system_packages)}"]


def install_command(family: Family, packages: tuple[str, ...]) -> str:
    """The command that installs *packages* on a machine of this family."""
    names = shlex.join(name.replace("=", "-", 1) if family == "dnf" else name for name in packages)
    if family == "apt":
        return f"apt-get install --yes --no-install-recommends {names}"
    if family == "dnf":
        return f"dnf install --assumeyes --setopt=install_weak_deps=False {names}"
    return f"apk add --update-cache {names}"


DEFAULT_CHANNELS = ("conda-forge",)
"""Channels of a runtime that names none. Chosen: free for any use."""


def render_conda(spec: EnvSpec, requirements: Requirements) -> list[Artefact]:
    """``environment.yml`` with conda's packages, and pip's packages below ``pip``.

    With ``package_manager: conda``, ``packages`` are conda's; a requirements file is always pip's.
    """
    runtime = requirements.runtime
    is_conda = runtime is not None and runtime.package_manager == "conda"
    channels = (runtime.channels if runtime is not None else ()) or DEFAULT_CHANNELS
    dependencies: list[Any] = [f"python={python_version(spec)}"]
    if is_conda and runtime is not None:
        dependencies += runtime.packages
    has_pip = requirements.main is not None or (not is_conda and not requirements.is_empty)
    files = _pip_files(requirements, is_conda=is_conda) if has_pip else []
    if has_pip:
        dependencies += ["pip", {"pip": [f"-r {MAIN}"]}]
    document: dict[str, Any] = {
        "name": spec.name,
        "channels": [*channels, "nodefaults"],
        "dependencies": dependencies,
    }
    variables = {item.name: item.value for item in spec.env if item.value is not None}
    if variables:
        document["variables"] = variables
    return [Artefact("environment.yml", comment(_notes(spec)) + yaml_text(document)), *files]


def _pip_files(requirements: Requirements, *, is_conda: bool) -> list[Artefact]:
    if not is_conda or requirements.runtime is None:
        return requirements.artefacts()
    only_pip = requirements.runtime.model_copy(update={"packages": ()})
    return Requirements(only_pip, requirements.files, requirements.main, requirements.locked).artefacts()


def _notes(spec: EnvSpec) -> list[str]:
    notes = [_reference(item) for item in spec.env if item.value_from is not None]
    return [*notes, *_needs(spec)]
