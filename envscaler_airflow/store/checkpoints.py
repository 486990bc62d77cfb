"""Checkpoints of a run: which count, which an attempt may resume from, and which to delete.

A checkpoint is a folder ``checkpoints/g1-step-00004200-a3`` below the run with a part for each node and claim
(``n0-c2/``) and a manifest (``manifest-c2.json``, under claim 2 to node 0), which is written last. Only two
kinds of names count: candidates that the owner lists, and checkpoints of the attempt itself. A checkpoint
that an older attempt saves after a newer one began is void. A manifest of a lower claim is void too, unless
the pod that claimed node 0 later found it (:func:`accept_manifests`).

All functions take the folder of the run (``Run``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from envscaler_agent.messages import Message
from envscaler_agent.protocol import (
    MAX_MANIFEST_BYTES,
    Control,
    Manifest,
    accepted_name,
    manifest_name,
    parse_checkpoint_name,
    parse_manifest_name,
)
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.store import manifests as folders
from envscaler_airflow.store.lease import newest_claim
from envscaler_airflow.store.run_store import Store, read_message

FOLDER = "checkpoints"
"""Folder of the checkpoints, below the run's."""
NEVER_DELETED = 2
"""Number of newest good checkpoints that are never deleted, even if ``keep`` is lower. Chosen: one deletion
may be in flight while the owner lists the candidates of the next attempt."""
Fence = Literal["open", "held", "over"]
"""What the controls of later attempts require of an attempt: nothing, publish nothing, or end."""
_CONTROL = re.compile(r"g(\d{1,9})-a(\d{1,9})\.json\Z")


def checkpoint_prefix(name: str) -> str:
    """Store name of the folder of checkpoint *name*.

    Raises:
        CheckpointError: *name* is not a checkpoint name.
    """
    if parse_checkpoint_name(name) is None:
        raise CheckpointError(f"{name!r:.200} is not a checkpoint name")
    return f"{FOLDER}/{name}"


def words(name: str) -> str:
    """``checkpoint 440`` for display; *name* itself when it is not a checkpoint name."""
    key = parse_checkpoint_name(name)
    return name if key is None else f"checkpoint {key[1]}"


def is_complete(store: Store, name: str) -> bool:
    """True when the store has a valid manifest of *name*.

    Raises:
        StoreError: The store does not answer.
    """
    return manifest_claim(store, name) is not None


def complete_checkpoints(store: Store, generation: int) -> tuple[str, ...]:
    """Names of a generation's checkpoints that have a valid manifest, newest first.

    Sorted by attempt, then by step. An attempt continues from what it restored, so a later attempt at a
    smaller step (which found the newest checkpoint torn) takes precedence.

    Raises:
        StoreError: The store does not answer.
    """
    accepted: dict[tuple[int, int], _Accepted] = {}
    return tuple(
        name
        for name in _names(store, generation)
        if _valid_claim(store, name, accepted.setdefault(_key(name), _Accepted(store, *_key(name))))
    )


def manifest_claim(store: Store, name: str) -> int | None:
    """Claim of the manifest that counts in the folder of checkpoint *name*; None when none does.

    Raises:
        StoreError: The store does not answer.
        CheckpointError: *name* is not a checkpoint name.
    """
    checkpoint_prefix(name)
    return _valid_claim(store, name, _Accepted(store, *_key(name)))


def _key(name: str) -> tuple[int, int]:
    key = parse_checkpoint_name(name)
    assert key is not None
    return key[0], key[2]


def _valid_claim(store: Store, name: str, accepted: _Accepted) -> int | None:
    prefix = checkpoint_prefix(name)
    claims = sorted(
        (claim for part in store.children(prefix) if (claim := parse_manifest_name(part)) is not None),
        reverse=True,
    )
    valid = (claim for claim in claims if accepted.has(name, claim) and _is_file(store, name, claim))
    return next(valid, None)


def _is_file(store: Store, name: str, claim: int) -> bool:
    """False for a link or a pipe in place of a manifest."""
    try:
        return store.size(f"{checkpoint_prefix(name)}/{manifest_name(claim)}") is not None
    except ProtocolError:
        return False


@dataclass(frozen=True)
class Accepted(Message):
    """Manifests of lower claims that count. The pod that claimed node 0 lists them before it restores.

    Attributes:
        manifests: ``g1-step-00004200-a3/manifest-c1.json``, ...
    """

    MAX_BYTES = MAX_MANIFEST_BYTES

    manifests: tuple[str, ...] = ()


class _Accepted:
    """Which manifests of one attempt count; read on first use and cached."""

    def __init__(self, store: Store, generation: int, attempt: int) -> None:
        self._store, self._attempt = store, (generation, attempt)
        self._least: int | None = None
        self._names: frozenset[str] = frozenset()

    def has(self, name: str, claim: int) -> bool:
        """True for a manifest that is in the list, of the newest claim with a list, or of a later claim."""
        if self._least is None:
            self._read()
        assert self._least is not None
        return claim >= self._least or f"{name}/{manifest_name(claim)}" in self._names

    def _read(self) -> None:
        generation, attempt = self._attempt
        for claim in range(newest_claim(self._store, generation=generation, attempt=attempt, node=0), 1, -1):
            where = accepted_name(generation, attempt, claim)
            body = self._store.read(where, max_bytes=MAX_MANIFEST_BYTES)
            if body is not None:
                self._least, self._names = claim, _accepted_in(body, where)
                return
        self._least = 1


def _accepted_in(body: bytes, where: str) -> frozenset[str]:
    try:
        return frozenset(Accepted.from_json(body, where=where).manifests)
    except ProtocolError:
        return frozenset()  # torn: no manifest of a lower claim counts


def accept_manifests(store: Store, *, generation: int, attempt: int, claim: int) -> None:
    """Record which manifests of lower claims to node 0 count; any that are written later are void.

    The pod of *claim* calls this before its first restore. A repeated call changes nothing.

    Raises:
        StoreError: The store does not answer; repeat the call.
    """
    where = accepted_name(generation, attempt, claim)
    if claim <= 1 or store.size(where) is not None:
        return
    found = [
        f"{name}/{manifest_name(earlier)}"
        for name in _names(store, generation)
        if _key(name) == (generation, attempt) and (earlier := manifest_claim(store, name)) is not None
    ]
    store.create(where, Accepted(manifests=tuple(found)).to_json())


def _names(store: Store, generation: int) -> list[str]:
    found = [(parse_checkpoint_name(name), name) for name in store.children(FOLDER)]
    mine = [((key[2], key[1]), name) for key, name in found if key is not None and key[0] == generation]
    return [name for _, name in sorted(mine, reverse=True)]


def resume_order(
    complete: Iterable[str], *, generation: int, attempt: int, candidates: Iterable[str]
) -> tuple[str, ...]:
    """Checkpoints that *attempt* may resume from, best first. Pure.

    These are its own complete checkpoints, newest first, then the owner's *candidates* in their order. The
    result excludes other generations, later attempts, and its own checkpoints without a manifest.
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


def read_checkpoint(store: Store, name: str, *, claim: int | None = None) -> Manifest:
    """Return a checkpoint's manifest, which must match the generation and attempt of its folder.

    Args:
        store: Store of the run.
        name: Name of the checkpoint.
        claim: Claim of the manifest to read; None for the one that counts.

    Raises:
        CheckpointError: The manifest is absent, torn, or of another attempt.
        StoreError: The store does not answer.
    """
    prefix = checkpoint_prefix(name)
    found = manifest_claim(store, name) if claim is None else claim
    if found is None:
        raise CheckpointError(f"{store.uri(prefix)}: no valid manifest: it was never completed")
    manifest = folders.read_manifest(store, prefix, name=manifest_name(found))
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
    """Return what the owner's controls of later attempts require of this one.

    ``held``: the owner prepares a later attempt. This one keeps training, but publishes and deletes nothing.
    ``over``: a later attempt runs. This one is void and ends. A later control that cannot be read counts as
    ``held``.

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
    """Read the control *name*; None when it is absent or this version cannot parse it.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        return read_message(store, name, Control)
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
    """Delete checkpoints older than the *keep* newest good ones; return the deleted names.

    A checkpoint is good if its manifest is readable, every file exists with its size, and it is not in
    *rejected*. This attempt's own checkpoints and the owner's candidates count. Never deleted are the
    :data:`NEVER_DELETED` newest good ones, even if *keep* is lower; *spare*; and a checkpoint of this attempt
    without a manifest, because it is still being written. Nothing is deleted if a later attempt is prepared
    or has begun, if another pod than that of *claim* represents node 0, or if there is no good checkpoint. A
    checkpoint of an older attempt that is not a candidate is deleted if it is incomplete. It is also deleted
    if *keep* checkpoints are kept and it is older than all of these.

    This reads controls and claims after it lists the checkpoints and before it deletes any. So no deletion
    begins once the store has a later control, and one in flight spares the newest.

    Raises:
        StoreError: The store does not answer; no further checkpoint is deleted.
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
        # Delete manifests first: without one, no reader treats the rest as a checkpoint.
        for part in store.children(checkpoint_prefix(name)):
            if parse_manifest_name(part) is not None:
                store.delete(f"{checkpoint_prefix(name)}/{part}")
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
    """True when the manifest of *name* is readable and every file exists with its size.

    Raises:
        StoreError: The store does not answer.
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
