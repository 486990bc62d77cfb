"""The agent's files: what any interpreter needs on its path to import ``envscaler_agent``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import envscaler_agent
from envscaler_airflow.errors import BackendError


def package_root() -> Path:
    """The folder from which this process imports ``envscaler_agent``."""
    return Path(envscaler_agent.__file__).parents[1]


def agent_wheel() -> Path:
    """The wheel of ``envscaler_agent`` that this package carries for training images.

    Raises:
        BackendError: It carries none, as an editable install of a clone.
    """
    found = sorted((Path(__file__).parent / "wheels").glob("envscaler_agent-*.whl"))
    if not found:
        root = package_root()
        raise BackendError(
            f"{root}: a clone carries no wheel of the agent; write: uv build --wheel {root}, "
            f"or: pip wheel --no-deps {root}"
        )
    return found[-1]


def copy_agent(root: Path) -> Path:
    """Copy the agent once for each content into a folder below *root*, and return that folder.

    Raises:
        BackendError: A part is not installed.
    """
    sources = dict(_agent_files())
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    folder = root / f"agent-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    draft = root / f".{folder.name}.{os.getpid()}"
    _copy(sources, draft)
    try:
        draft.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(draft)
    return folder


def install_agent(folder: Path) -> None:
    """Copy the agent into *folder*, over an earlier copy.

    Raises:
        BackendError: A part is not installed.
    """
    _copy(dict(_agent_files()), folder)


def _copy(sources: dict[Path, Path], folder: Path) -> None:
    for path, name in sources.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _agent_files() -> Iterator[tuple[Path, Path]]:
    """Each file with its name below the copy's root; the samplers need ``pynvml`` where a driver is."""
    root = package_root()
    for path in sorted((root / envscaler_agent.__name__).rglob("*.py")):
        yield path, path.relative_to(root)
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is None or pynvml.origin is None:
        raise BackendError("nvidia-ml-py is not installed: the agent's samplers import its module pynvml")
    yield Path(pynvml.origin), Path("pynvml.py")
