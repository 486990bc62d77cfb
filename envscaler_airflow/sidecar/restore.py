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
    Status,
    is_safe_name,
    parse_checkpoint_name,
    status_name,
)
from envscaler_airflow.errors import CheckpointError, ProtocolError, SpecError
from envscaler_airflow.run import outcome_of
from envscaler_airflow.sidecar import tree
from envscaler_airflow.sidecar.completeness import Settling
from envscaler_airflow.sidecar.context import SetupCancelledError, Site
from envscaler_airflow.store import checkpoints, manifests
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.claims import newest_claim
from envscaler_airflow.store.outputs import open_folder
from envscaler_airflow.store.root import Root

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


def restore(site: Site, control: Control) -> Restored | None:
    """Choose (node 0) or follow node 0, fetch, verify; None starts without one.

    Raises:
        CheckpointError: ``restore_from`` is not valid, or this node cannot get what node 0 chose.
        SetupCancelledError: The attempt, or node 0, was stopped.
        StoreError: The store did not answer in time.
    """
    began = site.monotonic()
    site.memory.update(is_restoring=True)
    try:
        found = _choose(site, control) if site.who.node == 0 else _follow(site, control)
        if found is not None:
            found = _lay_back(site, found)
    finally:
        site.memory.update(is_restoring=False)
    _publish(site, found, site.monotonic() - began)
    return found


def _publish(site: Site, found: Restored | None, restore_s: float) -> None:
    if found is None:
        site.memory.update(start_step=0, restored_from=None, restored_claim=None)
        return
    key = parse_checkpoint_name(found.source)
    site.memory.update(
        start_step=found.manifest.step,
        restored_from=found.source,
        restored_claim=found.claim,
        restore_s=restore_s,
        name_step=max(site.memory.state.name_step, key[1] if key else found.manifest.step or 0),
    )


def _choose(site: Site, control: Control) -> Restored | None:
    rejected = []
    for name in _order(site, control):
        try:
            claim = site.patiently(partial(checkpoints.manifest_claim, site.store, name), what=name)
            return _fetch_checkpoint(site, name, claim)
        except CheckpointError as err:
            rejected.append(f"{name}: {err}")
            site.memory.update(rejected=tuple(rejected))
            _discard(site, name)
    if control.restore_from is not None:
        try:
            return _fetch_uri(site, control.restore_from)
        except CheckpointError as err:
            raise CheckpointError(f"restore_from {control.restore_from}: {err}") from err
    return None


def _order(site: Site, control: Control) -> tuple[str, ...]:
    who = site.who
    site.patiently(
        lambda: checkpoints.accept_manifests(
            site.store, generation=who.generation, attempt=who.attempt, claim=who.claim
        ),
        what="claims",
    )
    complete = site.patiently(
        lambda: checkpoints.complete_checkpoints(site.store, who.generation), what="checkpoints"
    )
    return checkpoints.resume_order(
        complete, generation=who.generation, attempt=who.attempt, candidates=control.candidates or ()
    )


def _follow(site: Site, control: Control) -> Restored | None:
    decided = _node_0_decided(site)
    chosen = decided.restored_from
    if decided.address is not None and _ADDRESS.match(decided.address):
        site.rendezvous = decided.address
    if chosen is None:
        return None
    if chosen == control.restore_from:
        return _fetch_uri(site, chosen)
    who = site.who
    if not checkpoints.resume_order(
        [chosen], generation=who.generation, attempt=who.attempt, candidates=control.candidates or ()
    ).count(chosen):
        raise CheckpointError(f"node 0 says {chosen!r:.200}, which the owner does not allow")
    return _fetch_checkpoint(site, chosen, decided.restored_claim)


class _NodeZero:
    """Node 0 as the other nodes see it: what the last pod that claimed it reports.

    When this node's pod replaces an earlier one, that pod may be lost too, with its last status left in the
    store. Then a status counts only if it changes while this node watches, and an end of node 0 counts only
    after a replacement had time to start.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._until = site.monotonic() + NODE_0_S
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
        return status if is_decided and self._is_alive else None

    def _read(self) -> Status | None:
        site, who = self._site, self._site.who
        claim = site.patiently(
            lambda: newest_claim(site.store, generation=who.generation, attempt=who.attempt, node=0, known=1),
            what="claim of node 0",
        )
        name = status_name(who.generation, who.attempt, 0, claim)
        body = site.patiently(lambda: site.store.read(name), what="status of node 0")
        try:
            status = Status.from_json(body, where=name) if body is not None else None
        except ProtocolError as err:
            site.messages.say("restore", f"status of node 0: {err}")
            return None
        self._last = (claim, status.sequence if status is not None else 0)
        self._first = self._first or self._last
        return status

    @property
    def _is_alive(self) -> bool:
        """True when neither node was ever replaced, or when node 0 reports while this node watches."""
        return (self._site.who.claim == 1 and self._last[0] == 1) or self._last != self._first

    def _heed_end(self, ended: Ended) -> None:
        reported = f"node 0 has ended: {ended.reason} {ended.detail}"
        is_blameless = outcome_of(ended.reason).caused_by in ("owner", "platform")
        has_failed = not is_blameless and self._is_alive
        if not has_failed and self._site.monotonic() < self._until:
            self._site.messages.say("restore", f"{reported}; waits for the pod that replaces it")
        elif is_blameless:  # and it causes no failure of this node either
            raise SetupCancelledError(reported)
        else:
            raise CheckpointError(reported)


def _node_0_decided(site: Site) -> Status:
    node_0 = _NodeZero(site)
    while True:
        status = node_0.decided()
        if status is not None:
            site.messages.say("restore", None)
            return status
        site.ending.wait(_POLL_S)
        site.wanted()


def _fetch_uri(site: Site, uri: str) -> Restored:
    try:
        store, prefix = open_folder(uri, site.layout.store_options)
    except SpecError as err:
        raise CheckpointError(str(err)) from err
    last = uri.rstrip("/").rpartition("/")[2]
    manifest = site.patiently(lambda: _manifest_at(store, prefix), what=uri)
    target = site.spool.restored / (last if is_safe_name(last) else "restore-from")
    return Restored(uri, target, _fetch(site, store, prefix, manifest, target))


def _fetch_checkpoint(site: Site, name: str, claim: int | None) -> Restored:
    """Checkpoint *name* of this run by the manifest of *claim*, which node 0 chose for every node."""
    manifest = site.patiently(lambda: checkpoints.read_checkpoint(site.store, name, claim=claim), what=name)
    target = site.spool.restored / name
    prefix = checkpoints.checkpoint_prefix(name)
    return Restored(name, target, _fetch(site, site.store, prefix, manifest, target), claim)


def _fetch(site: Site, store: Store, prefix: str, manifest: Manifest, target: Path) -> Manifest:
    """Fetch this node's files of *manifest*, which is returned."""
    mine = manifests.for_node(manifest, site.who.node)
    root = site.spool.made_folder(target)
    node, between = site.who.node, site.wanted
    with site.transfer("restoring", checkpoints.words(target.name)) as moved:
        site.patiently(
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


def _discard(site: Site, name: str) -> None:
    with suppress(OSError):
        site.spool.remove(site.spool.restored / name)


def _lay_back(site: Site, found: Restored) -> Restored:
    """Put a snapshot where code that does not import the library will look for it.

    The folder then contains exactly the snapshot; files of an earlier attempt are removed.
    """
    if found.manifest.cooperative or site.layout.checkpoint_path is None:
        return found
    target = Path(site.layout.checkpoint_path)
    target.mkdir(parents=True, exist_ok=True)
    root, fetched = Root.of(target, parent=site.place(target)), site.spool.made_folder(found.path)
    root.empty()
    for item in found.manifest.files:
        root.take(item.path, fetched)
    manifests.lay_links(found.manifest, root)
    with suppress(OSError):
        site.spool.remove(found.path)
    site.memory.update(snapshot=_fingerprint(site, target))
    return replace(found, path=target)


def _fingerprint(site: Site, target: Path) -> str:
    """Fingerprint of the restored files, so that they do not count as new."""
    settling = Settling(site.monotonic)
    settling.look(tree.look(target, parent=site.place(target)), Progress())
    return settling.select(is_over=True).fingerprint


def empty(folder: Path) -> None:
    """Remove the content of *folder*, but not the folder, which may be a mount."""
    Root.of(folder).empty()
