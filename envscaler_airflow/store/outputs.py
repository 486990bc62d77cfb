"""What a run hands over: a folder or one file, with a manifest written last.

The URI of an output is that of its folder, ``<run>/outputs/g1/model``; whoever gets the URI opens
the folder as a store of its own and checks every file against the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.protocol import Manifest, is_safe_name
from envscaler_airflow.store import folders
from envscaler_airflow.store.base import Store, open_store
from envscaler_airflow.store.moved import Moved
from envscaler_airflow.store.names import MANIFEST

_OUTPUT_URI = re.compile(r"(.+)/(outputs/g\d{1,9}/[^/]+)/?\Z")
_CHECKPOINT_URI = re.compile(r"(.+)/(checkpoints/[^/]+)/?\Z")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller does while an output goes up.

    Attributes:
        between: Runs before each file, and may raise.
        check: Runs before the old output stops counting and before the new one counts, and may raise.
        moved: Counts the bytes.
    """

    between: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    moved: Moved | None = None


def output_prefix(generation: int, name: str) -> str:
    """Store name, below the run, of an output's folder.

    Raises:
        CheckpointError: *name* cannot be a folder's.
    """
    if not is_safe_name(name):
        raise CheckpointError(f"output {name!r:.200}: use letters, digits, '.', '_' and '-'")
    return f"outputs/g{generation}/{name}"


def is_output_uri(uri: str) -> bool:
    """True for the URI of a run's output, which counts only with its manifest."""
    return bool(_OUTPUT_URI.match(uri))


def open_folder(uri: str, options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """The store of the run that *uri* names an output or checkpoint of, and the folder's prefix in it.

    Any other URI is a store of its own, with the prefix ``""``. So an output that was never written is
    absent, and not a store that cannot be read.

    Raises:
        SpecError: No such store can be opened.
    """
    match = _OUTPUT_URI.match(uri) or _CHECKPOINT_URI.match(uri)
    return (open_store(match[1], options), match[2]) if match else (open_store(uri, options), "")


def put_output(
    store: Store,
    name: str,
    path: Path,
    *,
    generation: int,
    attempt: int,
    parent: Path | None = None,
    hooks: Hooks | None = None,
) -> str:
    """Upload the folder or file at *path* as output *name* of the run; returns its URI.

    *parent*: where the folder above really is, when that is known from before the training ran.

    What an earlier attempt left under this name stops counting first, so a reader sees the old
    output, none, or the new one, never a mixture.

    Raises:
        CheckpointError: *path* does not exist, or changes meanwhile, or holds a link that leads outside.
        StoreError: Not uploaded; the call can be repeated.
    """
    prefix, during = output_prefix(generation, name), hooks or Hooks()
    if path.is_file():
        tree: tuple[folders.TreeFile, ...] = (folders.one_file(path, parent=parent),)
        kind = "file"
    elif path.is_dir():
        tree, kind = folders.walk(path, parent=parent), "directory"
    else:
        raise CheckpointError(f"output {name!r}: {path} does not exist; the command must write it")
    during.check()
    store.delete(f"{prefix}/{MANIFEST}")
    files = folders.upload(store, prefix, tree, between=during.between, moved=during.moved)
    manifest = Manifest(kind=kind, files=files, generation=generation, attempt=attempt)
    during.check()
    folders.write_manifest(store, prefix, manifest)
    return store.uri(prefix)
