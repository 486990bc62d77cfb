"""``envscaler init``: a first spec with its code."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from envscaler_airflow.errors import SpecError

SUFFIX = ".template"
"""Suffix of every file of a template, so that no tool treats it as a module of the package."""

PYTHON = "@PYTHON@"
"""Placeholder in a template for this machine's Python version, which needs no download."""


def _python() -> str:
    """Version of this Python, limited to those that the module ``envscaler/python`` supports."""
    return f"3.{min(max(sys.version_info.minor, 10), 13)}"


def template_names() -> list[str]:
    """Names of the templates that come with the package."""
    folder = resources.files("envscaler_airflow.images").joinpath("templates")
    return sorted(item.name for item in folder.iterdir() if item.is_dir() and item.name[0] != "_")


def write_template(name: str, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the files of template *name* into *folder*; write nothing if one of them exists.

    Raises:
        SpecError: The template does not exist, or a file exists.
    """
    if name not in template_names():
        raise SpecError(f"template {name!r:.60} is not known; write one of {', '.join(template_names())}")
    source = resources.files("envscaler_airflow.images").joinpath("templates", name)
    files = {
        folder / item.name.removesuffix(SUFFIX): item.read_text(encoding="utf-8").replace(PYTHON, _python())
        for item in source.iterdir()
        if item.name.endswith(SUFFIX)
    }
    existing = [str(path) for path in files if path.exists()]
    if existing and not overwrite:
        raise SpecError(f"{', '.join(sorted(existing))}: exists; use another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return sorted(files)
