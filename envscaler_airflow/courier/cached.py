"""Keep what was fetched for later pods of the same machine: only what changed at the source comes again.

A file beside the folder remembers by which version each of its files was fetched. Two pods may fill one
folder at the same time: every file is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from envscaler_airflow.courier.site import Site
from envscaler_airflow.protocol import SCHEMA
from envscaler_airflow.store import folders
from envscaler_airflow.store.base import Store, TellsVersions
from envscaler_airflow.store.moved import Moved
from envscaler_airflow.store.names import landing


def fetch(site: Site, store: Store, sizes: Mapping[str, int], path: Path, index: Path, moved: Moved) -> None:
    """Let *path* hold exactly the objects of *sizes*; *index* remembers their versions, *moved* counts bytes.

    Raises:
        StoreError: The store did not answer in time.
        SetupCancelledError, WorkInterruptedError: See :meth:`Site.wanted`.
    """
    known = _read(index)
    held: dict[str, str | None] = {}

    def hold(name: str) -> None:
        if name in held:  # by an earlier try
            moved.add(sizes[name])
            return
        target = path / name
        version = store.version(name) if isinstance(store, TellsVersions) else None
        if version is not None and known.get(name) == version and target.is_file():
            moved.add(sizes[name])
        else:
            with landing(target) as part, part.open("w+b") as stream, moved.arriving(stream, sizes[name]):
                store.get_file(name, stream)
        held[name] = version

    site.patiently(lambda: each(hold, sizes, store, moved, between=site.wanted), what=path.name, moved=moved)
    _remove_others(path, {path / name for name in sizes})
    _write(index, {name: version for name, version in held.items() if version is not None})


def each(
    act: Callable[[str], None],
    sizes: Mapping[str, int],
    store: Store,
    moved: Moved,
    *,
    between: Callable[[], None],
) -> None:
    """*act* on each name of *sizes*, small ones side by side."""
    moved.begin(sum(sizes.values()))
    folders.side_by_side(act, sorted(sizes), store.at_once, size=sizes.__getitem__, between=between)


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
