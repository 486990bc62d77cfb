"""Uploads: chunks of logs and metrics, checkpoints, changes of writable volumes, at the end the outputs."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envscaler_agent.protocol import (
    Manifest,
    ManifestFile,
    Status,
    log_name,
    manifest_name,
    metrics_name,
    parse_checkpoint_name,
    status_name,
)
from envscaler_airflow.backoff import Backoff
from envscaler_airflow.errors import CheckpointError, ProtocolError, StoreError
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.owner_watch import WHY, standing_of
from envscaler_airflow.sidecar.snapshots import snapshot_facts
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.store import checkpoints, manifests, outputs
from envscaler_airflow.store.outputs import is_output_uri
from envscaler_airflow.store.run_store import open_store, read_message

COARSE_NS = 10_000_000
"""How far the file system's time may be behind, ns. Source: Linux, coarse clock, at most 10 ms."""


class WriteBack:
    """Uploads changed files of writable volumes, with every checkpoint and after a command that succeeded.

    A file counts as changed when its ctime is later than the volume's copy-in or last upload, so the
    training's clock has no effect. Deleted files stay in the store. If two nodes write the same name, the
    last upload counts.
    """

    def __init__(self, context: SidecarContext) -> None:
        """Continue from the marks in the spool."""
        self._context = context
        self._backoff = Backoff(context.monotonic)

    def mark(self) -> None:
        """Record that the store has everything in the volumes now. Raises OSError."""
        for index, _ in self._writable():
            self._context.spool.write(self._mark(index), b"")

    def flush(self) -> None:
        """Upload what changed since the last time.

        Raises:
            CheckpointError: A link leads outside its volume, or a name cannot be kept; the others are
                uploaded.
            StoreError, OSError: Some files are not uploaded; the call can be repeated.
            WorkInterruptedError: The sidecar must end.
        """
        refused: CheckpointError | None = None
        for index, mount in self._writable():
            mark = self._mark(index)
            since = self._marked_ns(mark)
            now = mark.with_suffix(".new")
            self._context.spool.write(now, b"")
            try:
                self._upload(mount, since - COARSE_NS)
            except CheckpointError as err:
                refused = refused or err
            else:
                self._context.spool.folder.rename(now.name, mark.name)
        if refused is not None:
            raise refused

    def step(self) -> bool:
        """The same at the end; True when nothing is left, or when a volume cannot be uploaded.

        Raises:
            WorkInterruptedError: The sidecar must end; the next one continues.
        """
        if not self._backoff.is_ready:
            return False
        try:
            self.flush()
        except CheckpointError as err:
            self._context.memory.update(failed=str(err))
            return True
        except (StoreError, OSError) as err:
            self._backoff.failed()
            self._context.messages.say("volumes", f"volumes wait: {err}")
            return False
        self._context.messages.say("volumes", None)
        return True

    def _writable(self) -> list[tuple[int, Mount]]:
        found = [item for item in enumerate(self._context.layout.mounts) if item[1].is_written_back]
        return [(index, mount) for index, mount in found if not is_output_uri(mount.source)]

    def _marked_ns(self, mark: Path) -> int:
        """When the mark was made, by the file system's clock; 0 without one."""
        try:
            return self._context.spool.folder.stat(mark.name).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _mark(self, index: int) -> Path:
        return self._context.spool.root / f"volume-{index}.mark"

    def _upload(self, mount: Mount, since_ns: int) -> None:
        context = self._context
        context.check_place(Path(mount.path))
        store = open_store(mount.source, context.layout.store_options)
        found = manifests.walk(Path(mount.path), parent=context.place(Path(mount.path)))
        items = [item for item in found if item.ctime_ns >= since_ns]
        with context.transfer("uploading", f"volume {mount.name}") as moved:
            moved.begin(sum(item.size for item in items))

            def put(item: manifests.TreeFile) -> None:
                try:
                    with item.open() as stream, moved.sending(stream, item.size):
                        store.put_file(item.path, stream)
                except (FileNotFoundError, manifests.ChangedError):
                    return  # the file that replaced it is newer than this scan, and is uploaded next time
                except ProtocolError as err:
                    raise CheckpointError(f"volume {mount.name}: {item.path}: {err}") from err

            manifests.side_by_side(
                put, items, store.at_once, size=lambda item: item.size, between=context.between
            )


OTHERS_S = 600.0
"""Longest wait for the other nodes' part of a checkpoint. Chosen: a tenth of an hour's work of all nodes."""
OTHERS_AT_END_S = 120.0
"""The same once this node's command has ended and no other reports uploads: the others end soon after, or
never report again. Chosen.
"""
_AGENT = "agent.json"
log = logging.getLogger(__name__)


class Chunks:
    """Uploads closed chunks in order and deletes them; a chunk that cannot be uploaded stays."""

    def __init__(self, context: SidecarContext) -> None:
        """Begin with the existing chunks."""
        self._context = context
        self._backoff = Backoff(context.monotonic)

    def step(self, *, has_ended: bool) -> bool:
        """Upload closed chunks; True when none is left. Once it *has_ended*, no process writes any more."""
        if not self._backoff.is_ready:
            return False
        try:
            for folder in ("logs", "metrics"):
                if has_ended:
                    self._context.spool.close_chunks(folder)
                for number, path in self._context.spool.chunks(folder):
                    self._send(folder, number, path)
                    self._context.spool.remove(path)
        except (StoreError, OSError) as err:
            self._backoff.failed()
            self._context.messages.say("chunks", f"logs and metrics wait: {err}")
            return False
        self._backoff.worked()
        self._context.messages.say("chunks", None)
        return True

    def _send(self, folder: str, number: int, path: Path) -> None:
        """Send the chunk; anything else that the training put there is skipped and blocks no later one."""
        try:
            with self._context.spool.opened(path) as stream:
                self._context.run.put_file(self._name(folder, number), stream)
        except ProtocolError as err:
            self._context.messages.say("chunks", f"not uploaded: {err}")

    def _name(self, folder: str, number: int) -> str:
        who = self._context.who
        name = log_name if folder == "logs" else metrics_name
        return name(who.generation, who.attempt, who.node, number, who.claim)


@dataclass(frozen=True, slots=True)
class _Uploaded:
    files: tuple[ManifestFile, ...]
    since: float
    upload_s: float


class Checkpoints:
    """Uploads local saves, completes them with a manifest, and removes old ones."""

    def __init__(self, context: SidecarContext, keep: int, *, volumes: WriteBack | None = None) -> None:
        """Keep the *keep* newest good ones in the store; *volumes* are uploaded with each."""
        self._context = context
        self._volumes = volumes or WriteBack(context)
        self._keep = keep
        self._backoff = Backoff(context.monotonic)
        self._uploaded: dict[str, _Uploaded] = {}
        self._given_up: set[str] = set()
        self._warned: set[str] = set()

    def step(self) -> bool:
        """Advance every local save by one step; True when none is left.

        Raises:
            WorkInterruptedError: The sidecar must end; the next one uploads again.
        """
        if not self._backoff.is_ready:
            return False
        waiting = [
            name for name in self._context.spool.saved(self._context.who) if name not in self._given_up
        ]
        for name in waiting:
            try:
                self._bring_on(name)
            except CheckpointError as err:
                self._give_up(name, str(err))
            except (StoreError, OSError) as err:
                self._backoff.failed()
                self._context.messages.say("checkpoint", f"checkpoint {name} waits: {err}")
                return False
        self._backoff.worked()
        return all(name in self._given_up for name in self._context.spool.saved(self._context.who))

    def forget_after(self, step: int) -> None:
        """Remove this node's saves of the attempt beyond *step*, which the training does again.

        Otherwise this node would take a later save at the same step for done, and node 0 would complete it
        with files from before.

        Raises:
            StoreError, OSError: Some are left; the call can be repeated.
        """
        spool, who = self._context.spool, self._context.who
        for name in spool.saved(who, with_done=True):
            key = parse_checkpoint_name(name)
            if key is None or key[1] <= step or snapshot_facts(spool, name).exists():
                continue
            if who.node != 0:
                listed = manifests.node_list(who.node, who.claim)
                self._context.run.delete(f"{checkpoints.checkpoint_prefix(name)}/{listed}")
            self._uploaded.pop(name, None)
            self._given_up.discard(name)
            spool.remove(spool.checkpoints / name)
            spool.remove(spool.done(name))

    def _give_up(self, name: str, why: str) -> None:
        """Stop waiting for it, so that later saves do not wait: it counts as done, like one in the store."""
        self._given_up.add(name)
        self._uploaded.pop(name, None)
        self._context.messages.say("checkpoint", f"checkpoint {name} is lost: {why}; the one before stays")
        with contextlib.suppress(OSError):
            self._context.spool.write_json(self._context.spool.done(name), {"name": name, "lost": why})
            self._tidy(name)

    def _bring_on(self, name: str) -> None:
        if name not in self._uploaded:
            if self._is_in_store(name) or not self._may_publish(name):
                return
            self._upload(name)
        self._complete(name)

    def _is_in_store(self, name: str) -> bool:
        """True when it is complete: by a sidecar that was killed, or by node 0 with what this node saved."""
        who, store = self._context.who, self._context.run
        claim = checkpoints.manifest_claim(store, name)
        if claim is None or (who.node == 0 and claim != who.claim):
            return False
        manifest = checkpoints.read_checkpoint(store, name, claim=claim)
        if who.node != 0 and any(item.claim != who.claim for item in manifest.files if item.node == who.node):
            return False  # of the pod that this one replaced
        self._completed(name, manifest, 0.0)
        return True

    def _upload(self, name: str) -> None:
        context = self._context
        began = context.monotonic()
        folder = context.spool.folder.enter(context.spool.name(context.spool.checkpoints / name))
        is_snapshot = snapshot_facts(context.spool, name).exists()
        skip = set() if is_snapshot else {_AGENT}
        files = [item for item in manifests.files_of(folder) if item.path not in skip]
        prefix = checkpoints.checkpoint_prefix(name)
        with context.transfer("uploading", checkpoints.words(name)) as moved:
            done = manifests.upload(
                context.run,
                prefix,
                files,
                node=context.who.node,
                claim=context.who.claim,
                between=context.between,
                shares_names=is_snapshot,
                moved=moved,
            )
        self._write_back()
        if context.who.node != 0:
            part = Manifest(files=done, generation=context.who.generation, attempt=context.who.attempt)
            manifests.write_manifest(
                context.run, prefix, part, name=manifests.node_list(context.who.node, context.who.claim)
            )
        now = context.monotonic()
        self._uploaded[name] = _Uploaded(done, now, now - began)

    def _write_back(self) -> None:
        """Upload volumes before the checkpoint counts, so that none has an older volume; report failures."""
        try:
            self._volumes.flush()
        except CheckpointError as err:
            self._context.messages.say("volumes", f"not written back: {err}")
        else:
            self._context.messages.say("volumes", None)

    def _complete(self, name: str) -> None:
        context, mine = self._context, self._uploaded[name]
        if context.who.node != 0:
            if not self._is_in_store(name):
                self._check_patience(name, mine, "node 0's manifest", [0])
            return
        lists, missing = self._others(name)
        if missing:
            self._check_patience(name, mine, f"the files of nodes {missing}", missing)
            return
        if not self._may_publish(name):
            return
        files, differ = _merge([mine.files, *lists])
        manifest = self._manifest(name, files)
        prefix = checkpoints.checkpoint_prefix(name)
        manifests.write_manifest(context.run, prefix, manifest, name=manifest_name(context.who.claim))
        self._warn_of(differ)
        self._completed(name, manifest, mine.upload_s)

    def _warn_of(self, differ: list[str]) -> None:
        """Warn about files that a restore on another number of nodes would leave out."""
        if not differ:
            self._context.messages.say("names", None)
            return
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        line = (
            f"several nodes saved different files as {differ[0]}{more}; each node gets its own back, and on "
            "another number of nodes some are left out: put the rank into the name"
        )
        if differ[0] not in self._warned:
            self._warned.add(differ[0])
            log.warning("%s", line)
        self._context.messages.say("names", line)

    def _may_publish(self, name: str) -> bool:
        """False, and a message, while the owner prepares a later attempt.

        Raises:
            CheckpointError: A later attempt has begun, or another pod has claimed the node.
        """
        standing = standing_of(self._context)
        if standing == "open":
            return True
        if standing != "held":
            raise CheckpointError(WHY[standing])
        self._context.messages.say("checkpoint", f"checkpoint {name} is not published: {WHY[standing]}")
        return False

    def _check_patience(self, name: str, mine: _Uploaded, what: str, nodes: list[int]) -> None:
        waited = self._context.monotonic() - mine.since
        is_late = self._context.has_ended() and waited >= OTHERS_AT_END_S and not self._are_uploading(nodes)
        if is_late or waited >= OTHERS_S:
            raise CheckpointError(f"{what} did not come within {waited:.0f} s")
        self._context.messages.say("checkpoint", f"checkpoint {name} waits for {what}")

    def _are_uploading(self, nodes: list[int]) -> bool:
        who = self._context.who
        for node in nodes:
            where = status_name(who.generation, who.attempt, node, self._context.newest_claim(node))
            try:
                status = read_message(self._context.run, where, Status)
            except ProtocolError:
                return False
            if status is None or status.phase != "uploading":
                return False
        return True

    def _others(self, name: str) -> tuple[list[tuple[ManifestFile, ...]], list[int]]:
        lists, missing = [], []
        if snapshot_facts(self._context.spool, name).exists():
            return [], []  # only node 0 takes snapshots
        prefix = checkpoints.checkpoint_prefix(name)
        for node in range(1, self._nodes_of(name)):
            listed = manifests.node_list(node, self._context.newest_claim(node))
            if self._context.run.size(f"{prefix}/{listed}") is None:
                missing.append(node)
            else:
                lists.append(manifests.read_manifest(self._context.run, prefix, name=listed).files)
        return lists, missing

    def _nodes_of(self, name: str) -> int:
        """Number of nodes that saved it; with elastic nodes, from the number of processes that saved it."""
        each, processes = self._context.layout.processes_per_node, _whole(self._facts(name)[0], "world_size")
        if each is None or processes is None:
            return self._context.who.nodes
        return max(1, math.ceil(processes / each))

    def _manifest(self, name: str, files: tuple[ManifestFile, ...]) -> Manifest:
        facts, cooperative = self._facts(name)
        key = parse_checkpoint_name(name)
        step = _whole(facts, "step")
        try:
            return Manifest(
                kind="checkpoint",
                files=files,
                step=step if step is not None or not cooperative or key is None else key[1],
                epoch=_whole(facts, "epoch"),
                samples=_whole(facts, "samples"),
                world_size=_whole(facts, "world_size"),
                global_batch=_whole(facts, "global_batch"),
                generation=self._context.who.generation,
                attempt=self._context.who.attempt,
                cooperative=cooperative,
                links=_links(facts),
            )
        except ValueError as err:
            raise CheckpointError(f"{name}: {err}") from err

    def _facts(self, name: str) -> tuple[Mapping[str, Any], bool]:
        spool = self._context.spool
        beside = snapshot_facts(spool, name)
        cooperative = not beside.exists()
        try:
            body = spool.read_json(spool.checkpoints / name / _AGENT if cooperative else beside)
        except ProtocolError as err:
            raise CheckpointError(f"{name}: {err}") from err
        return body or {}, cooperative

    def _completed(self, name: str, manifest: Manifest, upload_s: float) -> None:
        context = self._context
        self._uploaded.pop(name, None)
        facts, _ = self._facts(name)
        key = parse_checkpoint_name(name)
        state = context.memory.state
        context.memory.update(
            last_checkpoint=name,
            last_checkpoint_step=manifest.step if manifest.step is not None else key and key[1],
            checkpoint_s=upload_s + _seconds(facts, "save_s"),
            checkpoints=state.checkpoints + (state.last_checkpoint != name),
            name_step=max(state.name_step, key[1] if key else 0),
        )
        context.spool.write_json(context.spool.done(name), {"name": name, "step": manifest.step})
        context.messages.say("checkpoint", None)
        self._tidy(name)
        if context.who.node == 0:
            self._prune()

    def _tidy(self, newest: str) -> None:
        """Remove local saves that are in the store; the newest of the training's own stays until the next."""
        spool = self._context.spool
        for path in list(spool.checkpoints.iterdir()):
            if not path.is_dir() or not spool.done(path.name).exists():
                continue
            facts = snapshot_facts(spool, path.name)
            if path.name != newest or facts.exists():
                with contextlib.suppress(OSError):
                    spool.remove(path)
                spool.remove(facts)
        spool.forget_done(self._context.who)

    def _prune(self) -> None:
        context = self._context
        who = context.who
        try:
            # From the store: the training can change the spool's copy.
            control = checkpoints.read_control(context.run, who.control_name)
            if control is None:
                return
            checkpoints.prune(
                context.run,
                generation=who.generation,
                attempt=who.attempt,
                claim=who.claim,
                candidates=control.candidates or (),
                keep=self._keep,
                rejected=[line.partition(":")[0] for line in context.memory.state.rejected],
                spare=self._begun_from(),
            )
        except StoreError as err:
            context.messages.say("retention", f"old checkpoints stay: {err}")
        else:
            context.messages.say("retention", None)

    def _begun_from(self) -> str | None:
        """The checkpoint that a late or replaced node starts from, like the others; None if none can."""
        layout, state = self._context.layout, self._context.memory.state
        is_alone = self._context.who.nodes == 1 and layout.processes_per_node is None
        if is_alone:
            return None
        return state.restored_from if state.resume is None else state.resume.checkpoint


def _merge(lists: list[tuple[ManifestFile, ...]]) -> tuple[tuple[ManifestFile, ...], list[str]]:
    """All files of all nodes, and the paths where nodes saved different ones, which are all kept.

    A file that all nodes saved identically counts once.
    """
    merged: dict[str, list[ManifestFile]] = {}
    for item in (item for files in lists for item in files):
        merged.setdefault(item.path, []).append(item)
    differ = {path for path, items in merged.items() if len({item.sha256 for item in items}) > 1}
    kept = (items if path in differ else items[:1] for path, items in sorted(merged.items()))
    return tuple(item for items in kept for item in items), sorted(differ)


def _links(facts: Mapping[str, Any]) -> dict[str, str]:
    found = facts.get("links")
    return {str(path): str(target) for path, target in found.items()} if isinstance(found, Mapping) else {}


def _whole(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and 0 <= value < 2**63 else None


def _seconds(facts: Mapping[str, Any], name: str) -> float:
    """Read a time; 0 if it is not valid: JSON can contain NaN, 1e999 and integers beyond any float."""
    value = facts.get(name)
    is_time = isinstance(value, (int, float)) and 0 <= value < 2**63
    return float(value) if is_time and value is not None else 0.0


class Outputs:
    """Uploads the outputs of a command that succeeded, from node 0."""

    def __init__(self, context: SidecarContext) -> None:
        """Begin with the outputs that are not uploaded yet."""
        self._context = context
        self._backoff = Backoff(context.monotonic)

    def step(self) -> bool:
        """Upload what is missing; True when nothing is left, or when an output is not available.

        Raises:
            WorkInterruptedError: The sidecar must end; the next one continues.
        """
        if not self._backoff.is_ready:
            return False
        context = self._context
        for name, path in sorted(context.layout.outputs.items()):
            if name in context.memory.state.outputs:
                continue
            try:
                self._put(name, Path(path))
            except CheckpointError as err:
                context.memory.update(failed=str(err))
                return True
            except (StoreError, OSError) as err:
                self._backoff.failed()
                context.messages.say("outputs", f"output {name} waits: {err}")
                return False
        context.messages.say("outputs", None)
        return True

    def _check_standing(self, name: str) -> None:
        standing = standing_of(self._context)
        if standing == "held":
            raise StoreError(WHY[standing], transient=True)
        if standing != "open":
            raise CheckpointError(f"output {name!r}: {WHY[standing]}")

    def _put(self, name: str, path: Path) -> None:
        context = self._context
        who = context.who
        context.check_place(path)
        with context.transfer("uploading", f"output {name}") as moved:
            uri = outputs.put_output(
                context.run,
                name,
                path,
                parent=context.place(path),
                attempt=(who.generation, who.attempt),
                claim=who.claim,
                hooks=outputs.Hooks(context.between, partial(self._check_standing, name), moved),
            )
        context.memory.update(outputs={**context.memory.state.outputs, name: uri})
