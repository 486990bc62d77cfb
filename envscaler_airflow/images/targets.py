"""One spec, every artefact: picks the rendering of a target. Pure."""

from __future__ import annotations

from envscaler_airflow.envspec import Loaded
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.dockerfile import ImageOptions, render_dockerfile
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.userdata import render_vm
from envscaler_airflow.images.venv import render_conda, render_venv
from envscaler_airflow.launch import batches

RENDERINGS = ("conda", "venv", "dockerfile", "vm")
"""Targets that :func:`render` takes."""
VARIANTS = {"dockerfile": "docker", "vm": "vm", "venv": "local", "conda": "local"}
"""The spec's target overlay that a rendering uses."""


def render(
    target: str,
    spec: EnvSpec,
    requirements: Requirements,
    *,
    image: str | None = None,
    options: ImageOptions | None = None,
) -> list[Artefact]:
    """The artefacts of *target*, one of :data:`RENDERINGS`.

    Args:
        target: Name of the rendering.
        spec: The resolved stage.
        requirements: Its Python packages, as read or locked.
        image: Name of the stage's image for ``vm``; None for the base.
        options: Known facts of the image's base and context.

    Raises:
        SpecError: The target cannot express the spec, or the global batch is not divisible.
    """
    batches(spec)
    if target == "conda":
        return render_conda(spec, requirements)
    if target == "venv":
        return render_venv(spec, requirements)
    if target == "dockerfile":
        return render_dockerfile(spec, requirements, options)
    if target == "vm":
        return render_vm(spec, requirements, image)
    raise SpecError(f"--target {target!r:.60}: write one of {', '.join(RENDERINGS)}")


def render_spec(loaded: Loaded) -> list[Artefact]:
    """The composed spec without defaults; comments give the file and line of each value."""
    body = loaded.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    resolved = ("base_dirs", "warnings", "input_names")
    shown = {key: value for key, value in body.items() if key not in resolved}
    sources = [f"{path}: {where}" for path, where in loaded.sources.items()]
    return [
        Artefact("spec.yaml", yaml_text(shown) + "\n" + comment(["Where each value came from:", *sources]))
    ]
