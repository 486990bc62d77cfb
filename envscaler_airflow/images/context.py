"""The folder that an image is built from: Dockerfile, requirements, the agent, the code; and its hash."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from envscaler_airflow.agent_files import copy_agent
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.requirements import Requirements
from envscaler_airflow.images.targets import render
from envscaler_airflow.store.archive import pack_workdir, unpack

EPOCH = 946684800
"""Time of every file, 2000-01-01: a layer depends on content alone. Chosen: old, and legal in a zip."""


@dataclass(frozen=True, slots=True)
class Context:
    """A build context.

    Attributes:
        folder: Where it lies.
        content: 64 hex digits over every name, mode and byte of it.
    """

    folder: Path
    content: str


def assemble(
    spec: EnvSpec, requirements: Requirements, folder: Path, options: ImageOptions | None = None
) -> Context:
    """Lay out the context of *spec* in the empty *folder*.

    The code comes from ``workdir`` as runs ship it: what ``.gitignore`` leaves out is left out here too.

    Raises:
        SpecError: The code cannot be packed, or the spec cannot be an image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workdir = spec.resolve_path("workdir")
    if workdir is not None:
        archive = pack_workdir(workdir)
        try:
            (folder / "work").mkdir()
            unpack(archive.path, folder / "work", sha256=archive.sha256)
        finally:
            archive.path.unlink(missing_ok=True)
    agent = copy_agent(folder)
    agent.rename(folder / "envscaler")
    options = replace(options or ImageOptions(), has_agent=True, has_workdir=workdir is not None)
    for item in render("dockerfile", spec, requirements, options=options):
        path = folder / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(item.text, encoding="utf-8")
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)
    settle(folder)
    return Context(folder, _hash(folder))


def settle(folder: Path) -> None:
    """Set modes and times that depend on content alone; every user may read the files."""
    for here, folders, files in os.walk(folder):
        for name in files:
            path = Path(here, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        for name in (*files, *folders):
            os.utime(Path(here, name), (EPOCH, EPOCH), follow_symlinks=False)
        for name in folders:
            if not Path(here, name).is_symlink():
                Path(here, name).chmod(0o755)


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            digest.update(f"link {name} {path.readlink()}\0".encode())
        elif path.is_file():
            mode = "x" if path.stat().st_mode & 0o100 else "-"
            digest.update(f"file {name} {mode} {path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
