"""``environment.yml`` of a stage. Pure."""

from __future__ import annotations

from typing import Any

from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.requirements import MAIN, Requirements
from envscaler_airflow.images.venv import install_command, python_version

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
    notes = [
        f"{item.name} is taken from {item.value_from}: set it before the start"
        for item in spec.env
        if item.value_from is not None
    ]
    if spec.system_packages:
        command = install_command(facts(spec.base).family, spec.system_packages)
        notes.append(f"Needs system packages: {command}")
    return notes
