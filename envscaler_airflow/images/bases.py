"""What common base images contain, and how to install packages on them: a small table, no network."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from packaging.version import Version as PackageVersion

from envscaler_airflow.envspec.models import Base
from envscaler_airflow.errors import SpecError

Family = Literal["apt", "dnf", "apk"]

_DISTROS: dict[str, tuple[str, Family]] = {
    "debian": ("debian:12-slim", "apt"),
    "ubuntu": ("ubuntu:22.04", "apt"),
    "fedora": ("fedora:40", "dnf"),
    "rocky": ("rockylinux:9", "dnf"),
    "rockylinux": ("rockylinux:9", "dnf"),
    "almalinux": ("almalinux:9", "dnf"),
    "amazonlinux": ("amazonlinux:2023", "dnf"),
    "alpine": ("alpine:3.20", "apk"),
}
"""Image and package manager of a distribution named without a version. Chosen: long-term releases."""

_CODENAMES = {"bookworm": "12", "bullseye": "11", "trixie": "13", "jammy": "22.04", "noble": "24.04"}

_NGC_PYTORCH = {
    "23.10": {"python": "3.10", "torch": "2.1.0a0", "cuda": "12.2.2"},
    "24.01": {"python": "3.10", "torch": "2.2.0a0", "cuda": "12.3.2"},
    "24.04": {"python": "3.10", "torch": "2.3.0a0", "cuda": "12.4.1"},
    "24.10": {"python": "3.10", "torch": "2.5.0a0", "cuda": "12.6.2"},
    "25.01": {"python": "3.12", "torch": "2.6.0a0", "cuda": "12.8.0"},
}
"""Source: NVIDIA, Frameworks Support Matrix, container versions by release."""


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What is known of a base before it is pulled.

    Attributes:
        image: Image name to build from.
        family: Family of its package manager.
        provides: Packages in the image, name to version, including ``python`` and ``cuda``.
        is_known: False when the package manager is a guess.
    """

    image: str
    family: Family
    provides: dict[str, str] = field(default_factory=dict)
    is_known: bool = True

    @property
    def python(self) -> str | None:
        """Version of the Python for which its packages are installed; None without one."""
        return self.provides.get("python")

    @property
    def cuda(self) -> str | None:
        """CUDA version of its libraries; None without them."""
        return self.provides.get("cuda")

    @property
    def packages(self) -> dict[str, str]:
        """Python packages in the image, canonical name to version.

        Raises:
            SpecError: A version is invalid.
        """
        found: dict[str, str] = {}
        for name, version in self.provides.items():
            if name.lower() in NOT_PACKAGES:
                continue
            try:
                found[canonicalize_name(name)] = str(PackageVersion(version))
            except InvalidVersion as err:
                raise SpecError(
                    f"base.provides: {name}: {version!r:.60} is not a version; write 2.1.0"
                ) from err
        return found

    def has_python(self, version: str | None) -> bool:
        """True when its own Python satisfies a stage that requests *version* (None: any)."""
        if self.python is None:
            return bool(self.packages)
        return version is None or _is_within(version, self.python) or _is_within(self.python, version)


def _is_within(version: str, wider: str) -> bool:
    """Version prefix match: 3.10.12 is within 3.10 and 3."""
    return f"{version}.".startswith(f"{wider}.")


_HAS_FETCHERS = re.compile(r"(?:^|/)(?:python|buildpack-deps):(?!.*(?:slim|alpine|curl))")
"""Images with git, mercurial, subversion and ssh. Source: docker-library/buildpack-deps, scm variant."""


def fetching_packages(programs: Collection[str], known: BaseFacts) -> tuple[str, ...]:
    """System packages for *programs* that fetch requirements, on a base that may not have them."""
    if not programs or _HAS_FETCHERS.search(known.image):
        return ()
    names = {"openssh-client": "openssh-clients"} if known.family == "dnf" else {}
    return ("ca-certificates", *(names.get(name, name) for name in sorted(programs)))


NOT_PACKAGES = ("python", "cuda", "cudnn", "driver")
"""Names in ``base.provides`` that are not Python packages."""
DEFAULT_IMAGE = "debian:12-slim"
"""Base of a spec without one. Chosen: small, and ordinary wheels run on it."""


def facts(base: Base | None) -> BaseFacts:
    """Return what is known of *base*; ``base.provides`` overrides the table.

    Raises:
        SpecError: The distribution is unknown.
    """
    if base is None:
        return BaseFacts(DEFAULT_IMAGE, "apt")
    if base.image is None:
        image, family = _of_distro(base.distro or "")
        return BaseFacts(image, family, dict(base.provides))
    known = _provides(base.image)
    family_of_image = _family(base.image)
    if base.distro is not None:
        family_of_image = _of_distro(base.distro)[1]
    provides = {**known, **base.provides}
    return BaseFacts(base.image, family_of_image or "apt", provides, is_known=family_of_image is not None)


def _of_distro(text: str) -> tuple[str, Family]:
    match = re.match(r"([a-z]+)[-_]?([0-9][0-9.]*|[a-z]+)?\Z", text.lower())
    name = match[1] if match else ""
    version = match[2] if match else None
    for known in _DISTROS:
        if match and name.startswith(known) and name != known and version is None:
            name, version = known, name.removeprefix(known)
    if name not in _DISTROS:
        listed = ", ".join(sorted(_DISTROS))
        raise SpecError(f"base.distro: {text!r} is not known; write one of {listed}, or base.image")
    image, family = _DISTROS[name]
    if version is not None:
        image = f"{image.partition(':')[0]}:{_CODENAMES.get(version, version)}"
    return image, family


def _family(image: str) -> Family | None:
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    if "alpine" in tag:
        return "apk"
    if re.search(r"ubuntu|debian|bookworm|bullseye|trixie|slim", tag):
        return "apt"
    if re.search(r"ubi|rocky|centos|fedora", f"{name}:{tag}"):
        return "dnf"
    if name in _DISTROS:
        return _DISTROS[name][1]
    return "apt" if name in ("python", "pytorch", "tensorflow", "cuda") else None


def _provides(image: str) -> dict[str, str]:
    """Read versions from the tags of CUDA's, Python's, PyTorch's and NVIDIA's PyTorch images."""
    plain = image.partition("@")[0]
    if match := re.search(r"nvcr\.io/nvidia/pytorch:([0-9]{2}\.[0-9]{2})-py3", plain):
        return dict(_NGC_PYTORCH.get(match[1], {"python": "3"}))
    if match := re.search(r"(?:^|/)pytorch/pytorch:([0-9.]+)-cuda([0-9.]+)-", plain):
        return {"python": "3", "torch": match[1], "cuda": match[2]}
    if match := re.search(r"(?:^|/)nvidia/cuda:([0-9]+\.[0-9]+\.[0-9]+)-", plain):
        return {"cuda": match[1]}
    if match := re.search(r"(?:^|/)python:(3\.[0-9]+(?:\.[0-9]+)?)", plain):
        return {"python": match[1]}
    return {}
