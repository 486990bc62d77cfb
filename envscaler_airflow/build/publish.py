"""What may be published: a document that means the same everywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from envscaler_airflow.build.plain import read_plain
from envscaler_airflow.build.registry import MAX_BYTES
from envscaler_airflow.errors import SpecError
from envscaler_airflow.spec import load_spec

_WRAPPER = "version: v1\nname: check\nextends: [./document.yaml]\n"


def check_document(
    path: Path, *, parameters: Mapping[str, str], registry: Callable[[str], str | Path]
) -> str:
    """Text of the spec or module in *path*, when it may be published.

    It is loaded as the base of an empty spec, so that a module without a name is checked too.

    Raises:
        SpecError: Its faults; or it names files, which the registry does not hold.
    """
    try:
        text = read_plain(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as err:
        raise SpecError(f"{path}: cannot be read ({err}); write the path of a spec or module") from err
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "document.yaml").write_text(text, encoding="utf-8")
        Path(folder, "envscaler.yaml").write_text(_WRAPPER, encoding="utf-8")
        faults = _files_named(text, str(path))
        if faults:
            raise SpecError("\n".join(faults), faults=faults)
        try:
            load_spec(Path(folder, "envscaler.yaml"), parameters=parameters, registry=registry)
        except SpecError as err:
            own = [fault.replace(f"{folder}/document.yaml", str(path)) for fault in err.faults]
            raise SpecError("\n".join(own), faults=own) from err
    return text


def _files_named(text: str, where: str) -> list[str]:
    """References to files beside the document: nobody else has them. Broken YAML is the loader's to tell."""
    try:
        body = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    if not isinstance(body, dict):
        return []
    named = [
        f"{name}: {item!r:.100} is a file; publish it and write registry://..."
        for name in ("extends", "modules")
        for item in _listed(body.get(name))
        if isinstance(item, str) and not item.startswith("registry:")
    ]
    if isinstance(body.get("workdir"), str):
        named.append("workdir: is a folder, which the registry does not hold; leave it to the spec")
    named += [
        "runtimes: requirements: is a file; write packages: [...]"
        for runtime in _listed(body.get("runtimes"))
        if isinstance(runtime, dict) and isinstance(runtime.get("requirements"), str)
    ]
    return [f"{where}: {text}" for text in named]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
