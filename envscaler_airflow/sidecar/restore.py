"""Which checkpoint this start resumes from, verified and copied to the local disk.

Only node 0 chooses; it publishes its choice in its status, and the other nodes wait for that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from envscaler_agent.protocol import (
    Control,
    Ended,
    Manifest,
    Progress,
    Resume,
    Status,
    is_safe_name,
    parse_checkpoint_name,
    status_name,
)
from envscaler_airflow.errors import CheckpointError, ProtocolError, SpecError
from envscaler_airflow.run import outcome_of
from envscaler_airflow.sidecar import saver_layouts
from envscaler_airflow.sidecar.completeness import Settling
from envscaler_airflow.sidecar.context import SetupCancelledError, SidecarContext
from envscaler_airflow.sidecar.spool_state import AttemptNode
from envscaler_airflow.store import checkpoints, manifests
from envscaler_airflow.store.outputs import open_folder
from envscaler_airflow.store.root import Root
from envscaler_airflow.store.run_store import Store, read_message

_URI = re.compile(r"[a-z][a-z0-9+.-]*://|/")
_ADDRESS = re.compile(r"[0-9A-Za-z.\[\]:-]{3,64}\Z")
_POLL_S = 1.0
NODE_0_S = 900.0
"""Longest wait for a pod that replaces node 0's, seconds. Chosen: as long as for a store that does not
answer; the end of the attempt ends this node sooner.
"""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint on the local disk, every byte verified.

    Attributes:
        source: Its name, or the URI that was given.
        path: Folder.
        manifest: Its manifest, with this node's files.
        claim: Claim of the manifest in its folder; None for a URI.
    """

    source: str
    path: Path
    manifest: Manifest
    claim: int | None = None

    def to_start(self) -> Mapping[str, object]:
        """The ``restore`` part of ``start.json``."""
        return {
            "path": str(self.path),
            "name": self.path.name if _is_uri(self.source) else self.source,
            "step": self.manifest.step,
            "epoch": self.manifest.epoch,
            "samples": self.manifest.samples,
        }


def _is_uri(source: str) -> bool:
    return bool(_URI.match(source))


def restore(context: SidecarContext, control: Control) -> Restored | None:
    """Choose (node 0) or follow node 0, fetch, verify; None starts without one.

    Raises:
        CheckpointError: ``restore_from`` is not valid, or this node cannot get what node 0 chose.
        SetupCancelledError: The attempt, or node 0, was stopped.
        StoreError: The store did not answer in time.
    """
    began = context.monotonic()
    context.memory.update(is_restoring=True)
    try:
        found, resume = _choose(context, control) if context.who.node == 0 else _follow(context, control)
        if found is not None:
            found = _lay_back(context, found)
    finally:
        context.memory.update(is_restoring=False)
    _publish(context, found, resume, context.monotonic() - began)
    return found


def is_regrouped(context: SidecarContext) -> bool:
    """True where all nodes continue from one checkpoint once the pod of one was replaced.

    Not for one node, and not where nodes come and go: such a training goes on without the lost one.
    """
    return context.who.nodes > 1 and context.layout.processes_per_node is None


def claims_of(context: SidecarContext) -> tuple[int, ...]:
    """The newest claim to each node of the attempt, at least 1: of a pod that has yet to come, too.

    Raises:
        StoreError: The store did not answer in time.
    """
    who, resume = context.who, context.memory.state.resume
    known = resume.claims if resume is not None else (1,) * who.nodes

    def newest(node: int) -> int:
        call = partial(context.newest_claim, node, known=known[node])
        return context.patiently(call, what=f"claim of node {node}")

    return tuple(who.claim if node == who.node else newest(node) for node in range(who.nodes))


def _publish(
    context: SidecarContext, found: Restored | None, resume: Resume | None, restore_s: float
) -> None:
    if found is None:
        context.memory.update(start_step=0, restored_from=None, restored_claim=None, resume=resume)
        return
    key = parse_checkpoint_name(found.source)
    context.memory.update(
        start_step=found.manifest.step,
        restored_from=found.source,
        restored_claim=found.claim,
        resume=resume,
        restore_s=restore_s,
        name_step=max(context.memory.state.name_step, key[1] if key else found.manifest.step or 0),
    )


def _choose(context: SidecarContext, control: Control) -> tuple[Restored | None, Resume | None]:
    found = _newest_good(context, control)
    if context.who.claim == 1 or not is_regrouped(context):
        return found, None
    choice = Resume(claims_of(context), step=0)
    if found is not None:
        choice = replace(
            choice, checkpoint=found.source, manifest_claim=found.claim, step=found.manifest.step
        )
    return found, choice


def _newest_good(context: SidecarContext, control: Control) -> Restored | None:
    rejected = []
    for name in _order(context, control):
        try:
            claim = context.patiently(partial(checkpoints.manifest_claim, context.run, name), what=name)
            return fetch_checkpoint(context, name, claim)
        except CheckpointError as err:
            rejected.append(f"{name}: {err}")
            context.memory.update(rejected=tuple(rejected))
            _discard(context, name)
    if control.restore_from is not None:
        try:
            return _fetch_uri(context, control.restore_from)
        except CheckpointError as err:
            raise CheckpointError(f"restore_from {control.restore_from}: {err}") from err
    return None


def _order(context: SidecarContext, control: Control) -> tuple[str, ...]:
    who = context.who
    context.patiently(
        lambda: checkpoints.accept_manifests(
            context.run, generation=who.generation, attempt=who.attempt, claim=who.claim
        ),
        what="claims",
    )
    complete = context.patiently(
        lambda: checkpoints.complete_checkpoints(context.run, who.generation), what="checkpoints"
    )
    return checkpoints.resume_order(
        complete, generation=who.generation, attempt=who.attempt, candidates=control.candidates or ()
    )


def _follow(context: SidecarContext, control: Control) -> tuple[Restored | None, Resume | None]:
    decided = _node_0_decided(context)
    if decided.address is not None and _ADDRESS.match(decided.address):
        context.rendezvous = decided.address
    resume = decided.resume if is_regrouped(context) else None
    if resume is None:
        return _allowed(context, control, decided.restored_from, decided.restored_claim), None
    return _allowed(context, control, resume.checkpoint, resume.manifest_claim), resume


def _allowed(
    context: SidecarContext, control: Control, chosen: str | None, claim: int | None
) -> Restored | None:
    """Fetch what node 0 *chose*, if the owner allows it."""
    if chosen is None:
        return None
    if chosen == control.restore_from:
        return _fetch_uri(context, chosen)
    who = context.who
    if not checkpoints.resume_order(
        [chosen], generation=who.generation, attempt=who.attempt, candidates=control.candidates or ()
    ).count(chosen):
        raise CheckpointError(f"node 0 says {chosen!r:.200}, which the owner does not allow")
    return fetch_checkpoint(context, chosen, claim)


def status_of(context: SidecarContext, node: int) -> tuple[int, Status | None]:
    """The newest claim to *node*, and what its pod reports; None for no status that can be read.

    Raises:
        StoreError: The store did not answer in time.
    """
    who = context.who
    claim = context.patiently(partial(context.newest_claim, node), what=f"claim of node {node}")
    name = status_name(who.generation, who.attempt, node, claim)
    read = partial(read_message, context.run, name, Status)
    try:
        return claim, context.patiently(read, what=f"status of node {node}")
    except ProtocolError as err:
        context.messages.say("restore", f"status of node {node}: {err}")
        return claim, None


def counts_for(who: AttemptNode, resume: Resume | None, claim_0: int) -> bool:
    """True if what the pod of node 0 with *claim_0* chose counts for the pod *who*: it knew both. Pure."""
    if resume is None:  # the first choice of all
        return who.claim == 1 and claim_0 == 1
    return (
        len(resume.claims) == who.nodes
        and resume.claims[0] == claim_0
        and resume.claims[who.node] == max(1, who.claim)
    )


class _NodeZero:
    """Node 0 as the other nodes see it: what the last pod that claimed it reports.

    When this node's pod replaces an earlier one, that pod may be lost too, with its last status left in the
    store. Then a status counts only if it changes while this node watches, and an end of node 0 counts only
    after a replacement had time to start.
    """

    def __init__(self, context: SidecarContext) -> None:
        self._context = context
        self._until = context.monotonic() + NODE_0_S
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] = (0, 0)

    def decided(self) -> Status | None:
        """Its status, once it names its choice; None before.

        Raises:
            CheckpointError, SetupCancelledError: It has ended.
            StoreError: The store did not answer in time.
        """
        status = self._read()
        if status is None:
            return None
        if status.ended is not None:
            self._heed_end(status.ended)
            return None
        is_decided = status.start_step is not None or status.restored_from is not None
        if is_decided and is_regrouped(self._context):
            return status if counts_for(self._context.who, status.resume, self._last[0]) else None
        return status if is_decided and self._is_alive else None

    def _read(self) -> Status | None:
        claim, status = status_of(self._context, 0)
        self._last = (claim, status.sequence if status is not None else 0)
        self._first = self._first or self._last
        return status

    @property
    def _is_alive(self) -> bool:
        """True when neither node was ever replaced, or when node 0 reports while this node watches."""
        return (self._context.who.claim == 1 and self._last[0] == 1) or self._last != self._first

    def _heed_end(self, ended: Ended) -> None:
        reported = f"node 0 has ended: {ended.reason} {ended.detail}"
        outcome = outcome_of(ended.reason)
        is_blameless = outcome.is_orderly or outcome.caused_by == "platform"
        has_failed = not is_blameless and self._is_alive
        if not has_failed and self._context.monotonic() < self._until:
            self._context.messages.say("restore", f"{reported}; waits for the pod that replaces it")
        elif is_blameless:  # and it causes no failure of this node either
            raise SetupCancelledError(reported)
        else:
            raise CheckpointError(reported)


def _node_0_decided(context: SidecarContext) -> Status:
    node_0 = _NodeZero(context)
    while True:
        status = node_0.decided()
        if status is not None:
            context.messages.say("restore", None)
            return status
        context.ending.wait(_POLL_S)
        context.wanted()


def _fetch_uri(context: SidecarContext, uri: str) -> Restored:
    try:
        store, prefix = open_folder(uri, context.layout.store_options)
    except SpecError as err:
        raise CheckpointError(str(err)) from err
    last = uri.rstrip("/").rpartition("/")[2]
    manifest = context.patiently(lambda: _manifest_at(store, prefix), what=uri)
    target = context.spool.restored / (last if is_safe_name(last) else "restore-from")
    return Restored(uri, target, _fetch(context, store, prefix, manifest, target))


def fetch_checkpoint(context: SidecarContext, name: str, claim: int | None) -> Restored:
    """Fetch checkpoint *name* of this run by the manifest of *claim*, which node 0 chose for every node.

    Raises:
        CheckpointError: It is not valid.
        SetupCancelledError: The owner asks for the end.
        StoreError: The store did not answer in time.
    """
    manifest = context.patiently(
        lambda: checkpoints.read_checkpoint(context.run, name, claim=claim), what=name
    )
    target = context.spool.restored / name
    prefix = checkpoints.checkpoint_prefix(name)
    return Restored(name, target, _fetch(context, context.run, prefix, manifest, target), claim)


def _fetch(context: SidecarContext, store: Store, prefix: str, manifest: Manifest, target: Path) -> Manifest:
    """Fetch this node's files of *manifest*, which is returned."""
    mine = manifests.for_node(manifest, context.who.node)
    root = context.spool.made_folder(target)
    node, between = context.who.node, context.wanted
    with context.transfer("restoring", checkpoints.words(target.name)) as moved:
        context.patiently(
            lambda: manifests.fetch(store, prefix, mine, root, node=node, between=between, moved=moved),
            what=target.name,
            moved=moved,
        )
    return mine


def _manifest_at(store: Store, prefix: str) -> Manifest:
    """The manifest of the folder that a URI names: of another run, whose claims are unknown here."""
    manifest = manifests.newest_manifest(store, prefix)
    if manifest.kind != "checkpoint":
        raise CheckpointError(f"it is a {manifest.kind}, not a checkpoint")
    return manifest


def _discard(context: SidecarContext, name: str) -> None:
    with suppress(OSError):
        context.spool.remove(context.spool.restored / name)


def _lay_back(context: SidecarContext, found: Restored) -> Restored:
    """Put a snapshot where code that does not import the library will look for it.

    The folder then contains exactly the snapshot; files of an earlier attempt are removed.
    """
    if found.manifest.cooperative or context.layout.checkpoint_path is None:
        return found
    target = Path(context.layout.checkpoint_path)
    target.mkdir(parents=True, exist_ok=True)
    root, fetched = Root.of(target, parent=context.place(target)), context.spool.made_folder(found.path)
    root.empty()
    for item in found.manifest.files:
        root.take(item.path, fetched)
    manifests.lay_links(found.manifest, root)
    with suppress(OSError):
        context.spool.remove(found.path)
    context.memory.update(snapshot=_fingerprint(context, target))
    return replace(found, path=target)


def _fingerprint(context: SidecarContext, target: Path) -> str:
    """Fingerprint of the restored files, so that they do not count as new."""
    settling = Settling(context.monotonic)
    settling.look(saver_layouts.look(target, parent=context.place(target)), Progress())
    return settling.select(is_over=True).fingerprint


def empty(folder: Path) -> None:
    """Remove the content of *folder*, but not the folder, which may be a mount."""
    Root.of(folder).empty()
