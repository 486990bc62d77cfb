"""The outputs of a run: a folder or one file each, with a manifest written last.

The URI of an output is that of its folder, ``<run>/outputs/g1-a3-c2/model``. Each claim to node 0 has its own
folder, and the run's events name the valid one. A reader opens the folder as a separate store and checks
every file against the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envscaler_agent.protocol import Manifest, is_safe_name
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store import manifests
from envscaler_airflow.store.keys import MANIFEST
from envscaler_airflow.store.root import Place
from envscaler_airflow.store.run_store import Store, open_store
from envscaler_airflow.store.transfer_progress import Moved

_OUTPUT_URI = re.compile(r"(.+)/(outputs/g\d{1,9}-a\d{1,9}-c\d{1,9}/[^/]+)/?\Z")
_CHECKPOINT_URI = re.compile(r"(.+)/(checkpoints/[^/]+)/?\Z")


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks while an output is uploaded.

    Attributes:
        between: Called before each file; may raise.
        check: Called before the upload and before the manifest is written; may raise.
        moved: Counts the bytes.
    """

    between: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    moved: Moved | None = None


def output_prefix(name: str, *, attempt: tuple[int, int], claim: int) -> str:
    """Store name, below the run, of an output's folder for the pod with that claim to node 0.

    Args:
        name: Name of the output.
        attempt: Generation and number.
        claim: The pod's claim to node 0.

    Raises:
        CheckpointError: *name* is not a valid folder name.
    """
    if not is_safe_name(name):
        raise CheckpointError(f"output {name!r:.200}: use letters, digits, '.', '_' and '-'")
    generation, number = attempt
    return f"outputs/g{generation}-a{number}-c{claim}/{name}"


def is_output_uri(uri: str) -> bool:
    """True for the URI of a run's output, which is valid only with its manifest."""
    return bool(_OUTPUT_URI.match(uri))


def open_folder(uri: str, options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Open the run's store of an output or checkpoint URI; return it and the folder's prefix in it.

    Any other URI is opened as a store, with the prefix ``""``. So an output that was never written reads as
    absent, not as an unreadable store.

    Raises:
        SpecError: The store cannot be opened.
    """
    match = _OUTPUT_URI.match(uri) or _CHECKPOINT_URI.match(uri)
    return (open_store(match[1], options), match[2]) if match else (open_store(uri, options), "")


def put_output(
    store: Store,
    name: str,
    path: Path,
    *,
    attempt: tuple[int, int],
    claim: int,
    parent: Place | None = None,
    hooks: Hooks | None = None,
) -> str:
    """Upload the folder or file at *path* as output *name* of the run; return its URI.

    *parent* is the parent folder, if it is known from before the training ran.

    No other pod writes to this output's folder, so a pod that resumes late cannot damage a newer pod's
    output. The manifest of this pod's earlier try is deleted first. So a reader sees the old output, none, or
    the new one, never a mixture.

    Raises:
        CheckpointError: *path* does not exist, or changes meanwhile, or contains a link that leads outside.
        StoreError: The output was not uploaded; the call can be repeated.
    """
    prefix, during = output_prefix(name, attempt=attempt, claim=claim), hooks or Hooks()
    if path.is_file():
        tree: tuple[manifests.TreeFile, ...] = (manifests.one_file(path, parent=parent),)
        kind = "file"
    elif path.is_dir():
        tree, kind = manifests.walk(path, parent=parent), "directory"
    else:
        raise CheckpointError(f"output {name!r}: {path} does not exist; the command must write it")
    during.check()
    store.delete(f"{prefix}/{MANIFEST}")
    files = manifests.upload(store, prefix, tree, between=during.between, moved=during.moved)
    generation, number = attempt
    manifest = Manifest(kind=kind, files=files, generation=generation, attempt=number)
    during.check()
    manifests.write_manifest(store, prefix, manifest)
    return store.uri(prefix)
