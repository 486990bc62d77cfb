"""Checkpoints of a run: which count, which to resume from, which to let go.

A checkpoint is a folder ``checkpoints/g1-step-00004200-a3`` below the run with a manifest that was
written last. Only names that the owner lists as candidates, and those of the asking attempt itself,
are ever chosen or counted: what an older attempt saves after a newer one began is void.

All functions take the store of the run (``for_run``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal

from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.protocol import MAX_JSON_BYTES, Control, Manifest, parse_checkpoint_name
from envscaler_airflow.store import folders
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.claims import newest_claim
from envscaler_airflow.store.names import MANIFEST

FOLDER = "checkpoints"
"""Where they lie, below the run."""
NEVER_DELETED = 2
"""Newest good checkpoints that stay whatever ``keep`` says. Chosen: one deletion may be on its way while the
owner lists what the next attempt may resume from."""
Fence = Literal["open", "held", "over"]
"""What the controls of later attempts say to an attempt: nothing, publish nothing, end."""
_CONTROL = re.compile(r"g(\d{1,9})-a(\d{1,9})\.json\Z")


def checkpoint_prefix(name: str) -> str:
    """Store name of the folder of checkpoint *name*.

    Raises:
        CheckpointError: *name* is no checkpoint name.
    """
    if parse_checkpoint_name(name) is None:
        raise CheckpointError(f"{name!r:.200} is no checkpoint name")
    return f"{FOLDER}/{name}"


def is_complete(store: Store, name: str) -> bool:
    """True when its manifest is in the store; a link or a pipe in its place is none.

    Raises:
        StoreError: Cannot be told.
    """
    try:
        return store.size(f"{checkpoint_prefix(name)}/{MANIFEST}") is not None
    except ProtocolError:
        return False


def complete_checkpoints(store: Store, generation: int) -> tuple[str, ...]:
    """Names of a generation's checkpoints that have a manifest, newest first.

    Newest by attempt, then by step: an attempt goes on from what it restored, so a later attempt
    at a smaller step (one that found the newest torn) is the truth.

    Raises:
        StoreError: Cannot be told.
    """
    names = _names(store, generation)
    return tuple(name for name in names if is_complete(store, name))


def _names(store: Store, generation: int) -> list[str]:
    found = [(parse_checkpoint_name(name), name) for name in store.children(FOLDER)]
    mine = [((key[2], key[1]), name) for key, name in found if key is not None and key[0] == generation]
    return [name for _, name in sorted(mine, reverse=True)]


def resume_order(
    complete: Iterable[str], *, generation: int, attempt: int, candidates: Iterable[str]
) -> tuple[str, ...]:
    """Checkpoints that *attempt* may resume from, best first. Pure.

    Its own complete ones, newest first, then the owner's *candidates* in their order. Names of
    another generation or of a later attempt are never among them, nor are own ones without a manifest.
    """
    own = [
        (key[1], name)
        for name in complete
        if (key := parse_checkpoint_name(name)) is not None and key[0] == generation and key[2] == attempt
    ]
    order = [name for _, name in sorted(own, reverse=True)]
    for name in candidates:
        key = parse_checkpoint_name(name)
        if key is not None and key[0] == generation and key[2] < attempt and name not in order:
            order.append(name)
    return tuple(order)


def read_checkpoint(store: Store, name: str) -> Manifest:
    """Manifest of a checkpoint, which must be one of its folder's generation and attempt.

    Raises:
        CheckpointError: Absent, torn, or another's.
        StoreError: Cannot be told.
    """
    manifest = folders.read_manifest(store, checkpoint_prefix(name))
    key = parse_checkpoint_name(name)
    if (
        manifest.kind != "checkpoint"
        or key is None
        or (manifest.generation, manifest.attempt) != (key[0], key[2])
    ):
        raise CheckpointError(
            f"{name}: its manifest is of a {manifest.kind} of generation {manifest.generation}, "
            f"attempt {manifest.attempt}"
        )
    return manifest


def fence_of(store: Store, generation: int, attempt: int) -> Fence:
    """What the owner's controls of later attempts mean for this one.

    ``held``: the owner prepares a later attempt, so this one publishes and deletes nothing, and trains on.
    ``over``: a later attempt runs, so this one is void and ends. A later control that cannot be read holds.

    Raises:
        StoreError: The store does not answer.
    """
    found = [(match, name) for name in store.children("control") if (match := _CONTROL.match(name))]
    later = [name for match, name in found if (int(match[1]), int(match[2])) > (generation, attempt)]
    if not later:
        return "open"
    return "over" if any(_has_begun(store, f"control/{name}") for name in later) else "held"


def _has_begun(store: Store, name: str) -> bool:
    control = read_control(store, name)
    return control is not None and control.action != "hold"


def read_control(store: Store, name: str) -> Control | None:
    """The control *name*; None when it is absent, or cannot be read by this version.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        body = store.read(name, max_bytes=MAX_JSON_BYTES)
        return None if body is None else Control.from_json(body, where=name)
    except ProtocolError:
        return None


def prune(
    store: Store,
    *,
    generation: int,
    attempt: int,
    claim: int,
    candidates: Collection[str],
    keep: int,
    rejected: Collection[str] = (),
    spare: str | None = None,
) -> tuple[str, ...]:
    """Delete what lies beyond the *keep* newest good checkpoints; returns the names deleted.

    Good: manifest readable, every file there with its size, and not among *rejected*. Counted are
    this attempt's own and the owner's candidates. Never deleted: the :data:`NEVER_DELETED` newest good ones,
    whatever *keep* says; *spare*; one without a manifest of this attempt (it is being written); anything
    when a later attempt is prepared or has begun, when another pod than that of *claim* speaks for node 0, or
    when no good one is found. One of an older attempt that
    is no candidate goes when it is older than all that are kept and these are as many as are wanted, or it is
    not complete.

    Controls and claims are read after the list is made and before anything is deleted. So once a later
    control is in the store no deletion begins, and one that was on its way spares the newest.

    Raises:
        StoreError: The store does not answer; nothing more is deleted.
    """
    names = _names(store, generation)
    complete = [name for name in names if is_complete(store, name)]
    order = resume_order(complete, generation=generation, attempt=attempt, candidates=candidates)
    kept, beyond = _split(store, order, complete, keep=max(keep, NEVER_DELETED), rejected=rejected)
    if not kept:
        return ()
    oldest = min(_step(name) for name in kept)
    void = [name for name in names if name not in order and _attempt(name) < attempt and _step(name) < oldest]
    old = [*beyond, *(name for name in void if len(kept) >= keep or name not in complete)]
    gone = [name for name in old if name != spare]
    if not gone or fence_of(store, generation, attempt) != "open":
        return ()
    if newest_claim(store, generation=generation, attempt=attempt, node=0, known=claim) > claim:
        return ()
    for name in gone:
        # The manifest goes first: from then on no reader takes the rest for a checkpoint.
        store.delete(f"{checkpoint_prefix(name)}/{MANIFEST}")
        store.delete_tree(checkpoint_prefix(name))
    return tuple(gone)


def _split(
    store: Store, order: Iterable[str], complete: Collection[str], *, keep: int, rejected: Collection[str]
) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    beyond: list[str] = []
    for name in order:
        if name not in complete:
            continue
        if len(kept) < keep and name not in rejected and looks_good(store, name):
            kept.append(name)
        elif len(kept) >= keep:
            beyond.append(name)
    return kept, beyond


def looks_good(store: Store, name: str) -> bool:
    """True when its manifest can be read and every file is there with its size.

    Raises:
        StoreError: Cannot be told.
    """
    try:
        folders.check_sizes(store, checkpoint_prefix(name), read_checkpoint(store, name))
    except CheckpointError:
        return False
    return True


def _step(name: str) -> int:
    key = parse_checkpoint_name(name)
    assert key is not None
    return key[1]


def _attempt(name: str) -> int:
    key = parse_checkpoint_name(name)
    assert key is not None
    return key[2]
