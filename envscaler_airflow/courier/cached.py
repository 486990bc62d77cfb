"""Keep what was fetched for later pods of the same machine: only what changed at the source comes again.

A file beside the folder remembers by which version each of its files was fetched. Two pods may fill one
folder at the same time: every file is replaced as a whole.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from envscaler_airflow.courier.site import Site
from envscaler_airflow.protocol import SCHEMA
from envscaler_airflow.store.base import Store, TellsVersions


def fetch(site: Site, store: Store, names: list[str], path: Path, index: Path) -> None:
    """Let *path* hold exactly the objects *names* of *store*; *index* remembers their versions.

    Raises:
        StoreError: The store did not answer in time.
        SetupCancelledError, WorkInterruptedError: See :meth:`Site.wanted`.
    """
    known = _read(index)
    held: dict[str, str] = {}
    for name in names:
        site.wanted()
        target = path / name
        version = _version(site, store, name)
        if version is None or known.get(name) != version or not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            site.patiently(partial(store.get_file, name, target), what=name)
        if version is not None:
            held[name] = version
    _remove_others(path, {path / name for name in names})
    _write(index, held)


def _version(site: Site, store: Store, name: str) -> str | None:
    """None where nobody can tell: then it is fetched each time."""
    if not isinstance(store, TellsVersions):
        return None
    found: str | None = site.patiently(lambda: store.version(name), what=name)
    return found


def _remove_others(path: Path, kept: set[Path]) -> None:
    for item in path.rglob("*"):
        if (item.is_file() or item.is_symlink()) and item not in kept:
            item.unlink(missing_ok=True)


def _read(index: Path) -> dict[str, str]:
    try:
        body = json.loads(index.read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return body if isinstance(body, dict) else {}


def _write(index: Path, versions: dict[str, str]) -> None:
    index.parent.mkdir(parents=True, exist_ok=True)
    part = index.with_name(f".{index.name}.part")
    part.write_text(json.dumps({"schema": SCHEMA, "versions": versions}), encoding="utf-8")
    part.replace(index)
