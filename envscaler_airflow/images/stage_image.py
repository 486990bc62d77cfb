"""Which image a stage runs in, for backends that pull images by name."""

from __future__ import annotations

import hashlib
import re

from envscaler_airflow.envspec.models import Base, EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.targets import render

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
        why = "it installs packages on its base" if has_base else "it names no base.image"
        raise SpecError(
            f"{spec.name}: no image to run: {why}; set image_repository to where `envscaler build` puts "
            "images, or name one as base.image, or as image of the deployment (`envscaler submit --image`)"
        )
    return _based_on(image_name(spec, requirements, repository), spec)


def _based_on(image: str, spec: EnvSpec) -> EnvSpec:
    base = Base(image=image) if spec.base is None else spec.base.model_copy(update={"image": image})
    return spec.model_copy(update={"base": base})
