"""What the owner's side and the training's side write to each other, versioned.

The owner writes :class:`Control`; the training's side writes :class:`Status`, :class:`Manifest`, metrics and
logs. Everything read from the other side is untrusted: bounded in size, checked here, never a path or a
command.

Runs on Python 3.8 with only the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Tuple

from envscaler_agent.messages import Message, check_allowed, check_finite

MAX_MANIFEST_BYTES = 1 << 25
"""Largest manifest that is read, bytes. Chosen: 100,000 files with hashes and paths of 150 characters."""

ACTIONS = ("hold", "run", "checkpoint", "drain", "stop")
"""The requests of a control: wait until the candidates are listed, continue, save now and continue, save and
exit with EXIT_DRAINED, exit within the grace.
"""
ALIGNMENTS = ("now", "step", "epoch")
PHASES = ("setup", "restoring", "running", "checkpointing", "draining", "uploading", "ended")
"""Phases of one node of one attempt. ``uploading``: the command has ended, outputs are being uploaded."""
HEALTHS = ("ok", "stalled")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_CHECKPOINT = re.compile(r"g(\d{1,9})-step-(\d{8,18})-a(\d{1,9})\Z")
_MAX_TIME_NS = 1 << 62  # in the year 2116; chosen: every file system accepts it
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_UNSAFE = re.compile(r"[\0\\]|(?:^|/)\.{0,2}(?:/|\Z)")
_MANIFEST = re.compile(r"manifest-c(\d{1,9})\.json\Z")


def control_name(generation: int, attempt: int) -> str:
    """Store name, relative to the run's folder, of the owner's requests to an attempt."""
    return f"control/g{generation}-a{attempt}.json"


def claim_name(generation: int, attempt: int, node: int, number: int) -> str:
    """Store name of a claim: which pod or node process represents a node. The highest number is valid."""
    return f"claims/g{generation}-a{attempt}-n{node}-{number:06d}.json"


def accepted_name(generation: int, attempt: int, claim: int) -> str:
    """Store name of the manifests of lower claims that *claim* to node 0 accepts; all others do not count."""
    return f"claims/g{generation}-a{attempt}-n0-{claim:06d}-accepted.json"


def manifest_name(claim: int) -> str:
    """Name, in a checkpoint's folder, of the manifest that *claim* to node 0 wrote."""
    return f"manifest-c{claim}.json"


def parse_manifest_name(name: str) -> Optional[int]:
    """Claim of a checkpoint's manifest, None when *name* is not one."""
    match = _MANIFEST.match(name)
    return int(match[1]) if match else None


def status_name(generation: int, attempt: int, node: int, claim: int = 1) -> str:
    """Store name of what a node last reported under *claim*, which is 1 until it is replaced."""
    return f"status/g{generation}-a{attempt}-n{node}-c{claim}.json"


def metrics_name(generation: int, attempt: int, node: int, chunk: int, claim: int = 1) -> str:
    """Store name of a closed chunk of metrics (JSON lines)."""
    return f"metrics/g{generation}-a{attempt}-n{node}-c{claim}-{chunk:06d}.jsonl"


def log_name(generation: int, attempt: int, node: int, chunk: int, claim: int = 1) -> str:
    """Store name of a closed chunk of stdout and stderr."""
    return f"logs/g{generation}-a{attempt}-n{node}-c{claim}-{chunk:06d}.log"


def checkpoint_name(generation: int, step: int, attempt: int) -> str:
    """Folder name under ``checkpoints/``; sorts by step within a generation."""
    return f"g{generation}-step-{step:08d}-a{attempt}"


def parse_checkpoint_name(name: str) -> Optional[Tuple[int, int, int]]:
    """``(generation, step, attempt)`` of a checkpoint folder, None when it is not one."""
    match = _CHECKPOINT.match(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def is_safe_relative_path(path: str) -> bool:
    """True for ``a/b.bin``: relative, no empty, ``.`` or ``..`` part, no NUL or backslash, at most 1024."""
    return len(path) <= 1024 and not _UNSAFE.search(path)


def is_safe_link(path: str, target: str) -> bool:
    """True when a link at *path* to *target*, relative to its own folder, stays in the tree.

    ``..`` is allowed only in front: after another link, it would lead from that link's target.
    """
    if not target or len(target) > 1024 or "\0" in target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    above = parts.count("..")
    return above <= path.count("/") and ".." not in parts[above:]


@dataclass(frozen=True)
class Control(Message):
    """What the owner requests of one attempt (``control/g1-a3.json``, overwritten).

    Attributes:
        sequence: Grows with every write; a node acknowledges it in its status.
        action: One of :data:`ACTIONS`.
        align: When ``checkpoint`` and ``drain`` are executed: ``now`` means the next step boundary without
            further waiting, ``step`` the same, ``epoch`` the end of an epoch.
        align_timeout_s: Longest wait for the alignment, seconds; then the next step boundary.
        grace_s: Seconds from the request to a kill, for ``drain`` after the alignment and for ``stop``.
        reason: Shown to users.
        candidates: Checkpoint folder names that node 0 may resume from, best first; what earlier attempts
            write later does not count. Checkpoints of this attempt may also be used. None until the owner has
            listed them, which it does once ``hold`` is in the store.
        restore_from: URI of another run's checkpoint folder, for a fresh run that starts from it.
        orphan_after_s: Seconds without a change of the lease after which the sidecar stops the attempt.
        checkpoint_every_s: Seconds between checkpoints, if a shorter interval than the spec's is better;
            None: the spec's. Used at the start of an attempt.
    """

    sequence: int = 0
    action: str = "run"
    align: str = "step"
    align_timeout_s: float = 3600.0
    grace_s: float = 30.0
    reason: str = ""
    candidates: Optional[Tuple[str, ...]] = None
    restore_from: Optional[str] = None
    orphan_after_s: float = 1800.0
    checkpoint_every_s: Optional[float] = None

    def __post_init__(self) -> None:
        """Refuse a control that no reader could execute."""
        check_allowed(self.action, ACTIONS, "action")
        check_allowed(self.align, ALIGNMENTS, "align")
        check_finite(
            align_timeout_s=self.align_timeout_s,
            grace_s=self.grace_s,
            orphan_after_s=self.orphan_after_s,
            checkpoint_every_s=self.checkpoint_every_s,
        )
        for name in self.candidates or ():
            if parse_checkpoint_name(name) is None:
                raise ValueError(f"candidates: {name!r} is not a checkpoint name")


@dataclass(frozen=True)
class Progress(Message):
    """What the training reported; every field is None when unknown.

    Attributes:
        step: Optimizer steps done in this generation, including restored ones.
        total_steps: Steps that the whole training takes.
        epoch: Epochs finished.
        epochs: Epochs that the whole training takes.
        samples: Samples seen in this generation, including restored ones.
        tokens: Tokens seen by this attempt; a checkpoint does not contain their count.
        batch: Global batch size of the last step, samples.
        micro_batches: Passes that each rank accumulates in a step; None counts as one.
        loss: Last reported loss (may be negative; NaN is reported as None with ``loss_is_nan``).
        loss_is_nan: True when the last loss was NaN or infinite.
        accuracy: Last reported accuracy, in [0, 1] or per cent, as the training reports it.
        step_time_s: Mean seconds per step over the last window.
        data_time_s: Part of it spent waiting for data.
        sync_time_s: Part of it spent synchronising gradients.
        steps_per_s: Steps / seconds over the last window, including stalls.
        samples_per_s: Samples / seconds over the last window.
        phase: ``loading``, ``training``, ``evaluation`` or a name that the user chose.
        repeated_samples: Samples used again since the restore, if known.
        noise_scale: Gradient noise scale in samples, when the training reports it.
        elapsed_s: Seconds from the start of the command to the moment ``step`` was read, by the node's
            monotonic clock.
        first_step_s: Seconds from the start of the command to the end of its first step.
        save_s: Seconds that training has paused so far to save checkpoints.
    """

    step: Optional[int] = None
    total_steps: Optional[int] = None
    epoch: Optional[int] = None
    epochs: Optional[int] = None
    samples: Optional[int] = None
    tokens: Optional[int] = None
    batch: Optional[int] = None
    micro_batches: Optional[int] = None
    loss: Optional[float] = None
    loss_is_nan: Optional[bool] = None
    accuracy: Optional[float] = None
    step_time_s: Optional[float] = None
    data_time_s: Optional[float] = None
    sync_time_s: Optional[float] = None
    steps_per_s: Optional[float] = None
    samples_per_s: Optional[float] = None
    phase: Optional[str] = None
    repeated_samples: Optional[int] = None
    noise_scale: Optional[float] = None
    elapsed_s: Optional[float] = None
    first_step_s: Optional[float] = None
    save_s: Optional[float] = None


LOG_PATTERN_FIELDS = ("step", "total_steps", "epoch", "epochs", "loss", "accuracy", "samples", "tokens")
"""Fields of Progress that ``metrics.log_patterns`` can read from a line of output."""


@dataclass(frozen=True)
class Ended(Message):
    """How the command of a node ended.

    Attributes:
        exit_code: 0 to 255; None when a signal ended it.
        signal: Signal number; None when it exited.
        reason: ``succeeded``, ``drained``, ``stopped``, ``orphaned``, ``failed``, ``not-found``,
            ``setup-failed``, ``out-of-memory``, ``cuda-out-of-memory``, ``killed``, ``disk-full``,
            ``peer-lost``.
        detail: One human-readable line.
        last_lines: Last lines of its output, secrets masked, at most 100.
    """

    exit_code: Optional[int] = None
    signal: Optional[int] = None
    reason: str = "failed"
    detail: str = ""
    last_lines: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a reason that no reader knows."""
        check_allowed(self.reason, END_REASONS, "reason")


END_REASONS = (
    "succeeded",
    "drained",
    "stopped",
    "orphaned",
    "failed",
    "not-found",
    "setup-failed",
    "out-of-memory",
    "cuda-out-of-memory",
    "killed",
    "disk-full",
    "peer-lost",
)
"""Reasons that a wrapper may report; the owner's table of outcomes defines each."""


@dataclass(frozen=True)
class Transfer(Message):
    """What the sidecar moves between its node and a store, and its progress.

    Attributes:
        activity: ``uploading``, ``restoring`` or ``fetching``.
        name: What is moved, such as ``checkpoint 440`` or ``output model``.
        done_bytes: Bytes moved so far.
        total_bytes: Bytes to move in all.
    """

    activity: str = ""
    name: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Resume(Message):
    """Where all nodes of an attempt continue once the pod of one was replaced, as node 0 chose it.

    Attributes:
        claims: Claim to each node, by its number, for which node 0 chose; 1 where none was replaced.
        checkpoint: Checkpoint folder name, or the URI that the attempt began from; None: from the beginning.
        manifest_claim: Claim of the manifest that it chose in that folder; None for a URI.
        step: Step of that checkpoint; 0 at the beginning, None if unknown.
        reached: Step that the training had reached at the choice; None if unknown.
        repeated_steps: Steps that are done again, over all choices of this pod of node 0.
    """

    claims: Tuple[int, ...] = ()
    checkpoint: Optional[str] = None
    manifest_claim: Optional[int] = None
    step: Optional[int] = None
    reached: Optional[int] = None
    repeated_steps: int = 0


@dataclass(frozen=True)
class Status(Message):
    """The last report of a node (``status/g1-a3-n0-c2.json``, every 15 s and on change).

    Attributes:
        generation, attempt, node: Which node this status is of.
        claim: The claim to the node under which it is reported; 0 for a wrapper's, which knows none.
        sequence: Grows with every write. A reader measures the age with its own clock, from the moment it saw
            the number change.
        phase: One of :data:`PHASES`.
        health: One of :data:`HEALTHS`.
        control_sequence: Last control that was followed.
        progress: What the training reported.
        start_step: Step that this attempt began at (0 fresh, else the checkpoint's).
        restored_from: Checkpoint folder name or URI that node 0 chose; None when fresh.
        restored_claim: Claim of the manifest that it chose in that folder; None for a URI.
        resume: Where it continues since a node was replaced; None until then.
        setup_s: Seconds from the node's start to the start of its command: workdir, inputs, restore.
        restore_s, checkpoint_s: Seconds of the restore and of the last checkpoint (save and upload).
        rejected: Checkpoints that were found torn at the restore, each with its reason.
        last_checkpoint: Newest folder name whose manifest is in the store.
        last_checkpoint_step: Its step.
        checkpoints: How many this attempt has completed.
        cpu_seconds: CPU seconds used by the command so far.
        usage: Aggregates of the last window, e.g. ``cpu_percent``, ``memory_bytes``,
            ``memory_peak_bytes``, ``gpu0_utilization_percent``; absent when not measured.
        address: Address at which the other nodes reach node 0.
        ended: None while the command runs.
        transfer: What the sidecar moves now; a change of only this field writes no status. None while it
            moves nothing.
        outputs: Output name to the URI of its folder, once uploaded with a manifest.
        agent_version: Version of the agent that wrote it.
        message: One human-readable line.
    """

    generation: int = 0
    attempt: int = 0
    node: int = 0
    claim: int = 0
    sequence: int = 0
    phase: str = "setup"
    health: str = "ok"
    control_sequence: int = 0
    progress: Progress = field(default_factory=Progress)
    start_step: Optional[int] = None
    restored_from: Optional[str] = None
    restored_claim: Optional[int] = None
    resume: Optional[Resume] = None
    setup_s: Optional[float] = None
    restore_s: Optional[float] = None
    checkpoint_s: Optional[float] = None
    rejected: Tuple[str, ...] = ()
    last_checkpoint: Optional[str] = None
    last_checkpoint_step: Optional[int] = None
    checkpoints: int = 0
    cpu_seconds: Optional[float] = None
    usage: Dict[str, float] = field(default_factory=dict)
    address: Optional[str] = None
    ended: Optional[Ended] = None
    transfer: Optional[Transfer] = None
    outputs: Dict[str, str] = field(default_factory=dict)
    agent_version: str = ""
    message: str = ""

    def __post_init__(self) -> None:
        """Refuse a phase or health that no reader knows."""
        check_allowed(self.phase, PHASES, "phase")
        check_allowed(self.health, HEALTHS, "health")

    @property
    def resumed_at(self) -> Optional[int]:
        """Step at which the training last began, by this pod's start or since another node was replaced."""
        return self.start_step if self.resume is None or self.resume.step is None else self.resume.step


@dataclass(frozen=True)
class ManifestFile(Message):
    """One file of a checkpoint or output.

    Attributes:
        path: Relative to the folder; see :func:`is_safe_relative_path`.
        size: Bytes.
        sha256: 64 lower-case hex digits.
        node: Node that uploaded it.
        claim: The claim to that node; 0 in a folder without parts, such as an output.
        mtime_ns: When it was modified, by its machine's clock: code finds the last save by this order. 0 if
            unknown.
    """

    path: str = ""
    size: int = 0
    sha256: str = ""
    node: int = 0
    claim: int = 0
    mtime_ns: int = 0

    def __post_init__(self) -> None:
        """Refuse paths that leave the folder and hashes of the wrong form."""
        if not is_safe_relative_path(self.path):
            raise ValueError(f"path {self.path!r:.200} is not a plain relative path")
        if self.size < 0 or self.node < 0 or self.claim < 0:
            raise ValueError(f"size must be >= 0, got {self.size}; node {self.node}, claim {self.claim}")
        if not 0 <= self.mtime_ns < _MAX_TIME_NS:
            raise ValueError(f"mtime_ns must be in 0..{_MAX_TIME_NS}, got {self.mtime_ns}")
        if not _SHA256.match(self.sha256):
            raise ValueError(f"sha256 must be 64 hex digits, got {self.sha256!r:.80}")


@dataclass(frozen=True)
class Manifest(Message):
    """Written last; a folder without it does not count. Nodes may have saved different files under one path.

    Attributes:
        kind: ``checkpoint``, ``directory`` or ``file`` (an output that is one file).
        files: All files of all ranks.
        step, epoch, samples, world_size, global_batch: State of the training, for checkpoints.
        generation, attempt: Which attempt wrote it.
        cooperative: True when the training saved it through ``Session``; False for a snapshot.
        links: Path of each symbolic link to its target, relative to its own folder and inside the tree.
    """

    MAX_BYTES = MAX_MANIFEST_BYTES

    kind: str = "checkpoint"
    files: Tuple[ManifestFile, ...] = ()
    step: Optional[int] = None
    epoch: Optional[int] = None
    samples: Optional[int] = None
    world_size: Optional[int] = None
    global_batch: Optional[int] = None
    generation: int = 0
    attempt: int = 0
    cooperative: bool = True
    links: Dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an unknown kind, a file that is not exactly one, and a path that occurs twice."""
        check_allowed(self.kind, ("checkpoint", "directory", "file"), "kind")
        if self.kind == "file" and len(self.files) != 1:
            raise ValueError(f"files: a manifest of one file has {len(self.files)}")
        paths = [item.path for item in self.files]
        if len({(item.path, item.node if item.claim else 0) for item in self.files}) != len(paths):
            raise ValueError("files: a path is named twice")
        for path, target in self.links.items():
            if not is_safe_relative_path(path) or not is_safe_link(path, target):
                raise ValueError(f"links: {path!r:.200} to {target!r:.200} leaves the folder")
        if not self.links:
            return
        below = [path for path in (*paths, *self.links) if _is_below_a_link(path, self.links)]
        if below or set(paths) & set(self.links):
            raise ValueError("links: a path is named twice, or is below a link")


def _is_below_a_link(path: str, links: Mapping[str, str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:count]) in links for count in range(1, len(parts)))


def is_safe_name(name: str) -> bool:
    """True for names of outputs, nodes and files in the spool folder."""
    return bool(_NAME.match(name)) and ".." not in name


__all__: List[str] = [name for name in dir() if not name.startswith("_")]
