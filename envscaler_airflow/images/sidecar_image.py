"""The sidecar image, built from the installed package alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import envscaler_airflow
from envscaler_airflow.agent_files import package_root
from envscaler_airflow.images.build import carry_out, check_name, default_logs, qualified, settle
from envscaler_airflow.images.builders import Access, Builder, Order

REQUIREMENTS = Path(__file__).with_name("sidecar-requirements.txt")
"""The distributions that the sidecar imports and theirs, each with its version and its files' hashes."""
DISTRIBUTION = "envscaler-airflow"
_DOCKERFILE = "sidecar.Dockerfile"
_METADATA = ("METADATA", "entry_points.txt")


def sidecar_image_name(repository: str) -> str:
    """*repository* with its registry and, unless it names a tag, the version of this package.

    Raises:
        SpecError: It is not a valid image name.
    """
    check_name("--push", repository)
    name = qualified(repository)
    return name if ":" in name.rpartition("/")[2] else f"{name}:{envscaler_airflow.__version__}"


def build_sidecar_image(
    builder: Builder, name: str, *, args: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Build the image *name*; *args* are arguments of the Dockerfile, such as BASE.

    Raises:
        SpecError: A step fails; the end of the log is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="envscaler-sidecar-") as scratch:
        folder = Path(scratch, "context")
        write_context(folder)
        labels = {"org.opencontainers.image.version": envscaler_airflow.__version__}
        log = default_logs() / f"sidecar-{envscaler_airflow.__version__}.log"
        carry_out(builder, Order(folder, name, labels=labels, args=args), Access(), log=log, say=say)


def write_context(folder: Path) -> None:
    """Write Dockerfile, requirements and the files of both packages into the new *folder*."""
    packages = folder / "packages"
    for source in (Path(envscaler_airflow.__file__).parent, package_root() / "envscaler_agent"):
        shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    _write_metadata(packages)
    shutil.copyfile(Path(__file__).with_name(_DOCKERFILE), folder / "Dockerfile")
    shutil.copyfile(REQUIREMENTS, folder / "requirements.txt")
    settle(folder)


def _write_metadata(packages: Path) -> None:
    """Write what entry points are found by; a package that is only on the path has none."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return
    folder = packages / f"envscaler_airflow-{installed.version}.dist-info"
    folder.mkdir()
    for name in _METADATA:
        (folder / name).write_text(installed.read_text(name) or "", encoding="utf-8")
