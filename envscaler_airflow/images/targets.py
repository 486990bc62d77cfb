"""One spec, every artefact: picks the rendering of a target, and names the image that is built of it."""

from __future__ import annotations

import hashlib
import re

from envscaler_airflow.envspec import Loaded
from envscaler_airflow.envspec.models import Base, EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.dockerfile import ImageOptions, render_dockerfile
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
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


TAG_DIGITS = 16
"""Hex digits of a tag. Chosen: as many as content tags have."""


def image_name(spec: EnvSpec, requirements: Requirements, repository: str) -> str:
    """``REPOSITORY/NAME:env-HASH`` of the image that `envscaler build` builds from *spec*.

    The hash covers the Dockerfile: the base and the installed packages. It needs no builder, and is the same
    for every version of the code, which each run ships separately.

    Raises:
        SpecError: The spec cannot be built as an image.
    """
    digest = hashlib.sha256()
    for item in render("dockerfile", spec, requirements):
        digest.update(f"{item.name}\0{item.text}\0".encode())
    return f"{repository.rstrip('/')}/{slug(spec.name)}:env-{digest.hexdigest()[:TAG_DIGITS]}"


def slug(name: str) -> str:
    """A stage's name as part of an image name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "stage"


def with_image(spec: EnvSpec, *, image: str | None, repository: str | None) -> EnvSpec:
    """Return *spec* with the image of its runs as its base; each run ships the code separately.

    This is *image*, if the deployment sets one for all stages; the base, if nothing is installed on it;
    otherwise the image that `envscaler build` pushes to *repository*.

    Raises:
        SpecError: The image is not known.
    """
    if image is not None:
        return _based_on(image, spec)
    requirements = read_requirements(spec)
    has_base = spec.base is not None and spec.base.image is not None
    if has_base and not spec.system_packages and requirements.is_empty:
        return spec
    if repository is None:
        why = "the spec names no base.image"
        if has_base:
            why = "its packages are not in base.image, and no image with them is known"
        raise SpecError(
            f"{spec.name}: a pod needs an image, and none is known: {why}; build it by `envscaler build "
            "--push` and name its repository as image_repository, or name one with everything: base.image "
            "or --image (`envscaler submit --image`)"
        )
    return _based_on(image_name(spec, requirements, repository), spec)


def _based_on(image: str, spec: EnvSpec) -> EnvSpec:
    base = Base(image=image) if spec.base is None else spec.base.model_copy(update={"image": image})
    return spec.model_copy(update={"base": base})
