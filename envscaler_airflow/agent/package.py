"""The agent as a folder of its own: what any interpreter needs on its path to import it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Iterator

from envscaler_airflow.errors import BackendError

PARTS = ("__init__.py", "errors.py", "protocol.py", "agent", "frameworks")
"""What runs in any training: standard library only, but for what a training imports by itself."""
_MERGE = '\n__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'
"""Appended to the copy: where the interpreter has the whole package, the rest is found there."""


def package_folder() -> Path:
    """The folder ``envscaler_airflow`` that this process runs from."""
    return Path(__file__).parents[1]


def copy_agent(root: Path) -> Path:
    """A folder below *root* with the parts that run in any training, made once for each content.

    Raises:
        BackendError: A part is not installed.
    """
    package = package_folder()
    sources = {path: path.relative_to(package.parent) for path in sorted(_agent_files(package))}
    sources[Path(_pynvml_path())] = Path("pynvml.py")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    folder = root / f"agent-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    draft = root / f".{folder.name}.{os.getpid()}"
    for path, name in sources.items():
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    with (draft / "envscaler_airflow" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(_MERGE)
    try:
        draft.rename(folder)
    except OSError:  # another one was first
        shutil.rmtree(draft)
    return folder


def _pynvml_path() -> str:
    """The one file of nvidia-ml-py, which samplers need where there is a driver."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise BackendError("nvidia-ml-py is not installed: its module pynvml goes with the agent")
    return spec.origin


def _agent_files(package: Path) -> Iterator[Path]:
    for name in PARTS:
        path = package / name
        if path.is_dir():
            yield from path.rglob("*.py")
        else:
            yield path
