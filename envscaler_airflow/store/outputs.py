"""What a run hands over: a folder or one file, with a manifest written last.

The URI of an output is that of its folder, ``<run>/outputs/g1-a3-c2/model``: each claim to node 0 has its
own, and the run's events name the one that counts. A reader opens the folder as a store of its own and checks
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
from envscaler_airflow.store.base import Store, open_store
from envscaler_airflow.store.names import MANIFEST
from envscaler_airflow.store.root import Place
from envscaler_airflow.store.transfer_progress import Moved

_OUTPUT_URI = re.compile(r"(.+)/(outputs/g\d{1,9}-a\d{1,9}-c\d{1,9}/[^/]+)/?\Z")
_CHECKPOINT_URI = re.compile(r"(.+)/(checkpoints/[^/]+)/?\Z")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller does while an output goes up.

    Attributes:
        between: Runs before each file, and may raise.
        check: Runs before the upload and before the output counts, and may raise.
        moved: Counts the bytes.
    """

    between: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    moved: Moved | None = None


def output_prefix(name: str, *, attempt: tuple[int, int], claim: int) -> str:
    """Store name, below the run, of the folder into which the pod of that claim to node 0 puts an output.

    Args:
        name: Of the output.
        attempt: Generation and number.
        claim: To node 0.

    Raises:
        CheckpointError: *name* cannot be a folder's.
    """
    if not is_safe_name(name):
        raise CheckpointError(f"output {name!r:.200}: use letters, digits, '.', '_' and '-'")
    generation, number = attempt
    return f"outputs/g{generation}-a{number}-c{claim}/{name}"


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
    attempt: tuple[int, int],
    claim: int,
    parent: Place | None = None,
    hooks: Hooks | None = None,
) -> str:
    """Upload the folder or file at *path* as output *name* of the run; returns its URI.

    *parent*: the folder above, when that is known from before the training ran.

    No other pod writes below it, so one that wakes late destroys nothing of a newer one. What an earlier try
    of this pod left stops counting first: a reader sees the old output, none, or the new one, no mixture.

    Raises:
        CheckpointError: *path* does not exist, or changes meanwhile, or holds a link that leads outside.
        StoreError: Not uploaded; the call can be repeated.
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
