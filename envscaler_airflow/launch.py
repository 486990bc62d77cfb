"""What an attempt launches: computed once from the resolved spec and the number of nodes. Pure.

A backend sees nothing of a spec but its :class:`Launch`, and turns it into a Job, or into processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from envscaler_airflow.envspec.models import EnvSpec, Volume
from envscaler_airflow.envspec.resources import Resources
from envscaler_airflow.envspec.secrets import Reference, parse_reference
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Offer

PORT = 29400
"""Rendezvous port. Source: torchrun's own default for c10d."""
RENDEZVOUS_HOST = "$ENVSCALER_RENDEZVOUS_HOST"
"""Host of node 0 in the command of several nodes. Only the nodes know it; the wrapper fills it in."""
RENDEZVOUS_PORT = "$ENVSCALER_RENDEZVOUS_PORT"
"""Port of node 0, filled in the same way."""
NODE_RANK = "$ENVSCALER_NODE"
"""Number of a node, filled in the same way."""
KEEP = 3
"""Checkpoints kept when the spec names no number. Source: the spec's own default, ``checkpoint.keep``."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths that a training reads and writes.

    Attributes:
        volumes: What is mounted or copied in.
        outputs: Path of each output, absolute or relative to the working directory.
        inputs: URI of each input.
        checkpoint: Folder of the checkpoints; None without one.
    """

    volumes: tuple[Volume, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None

    @classmethod
    def of(cls, spec: EnvSpec) -> Paths:
        """The paths of *spec*."""
        checkpoint = None if spec.checkpoint is None else spec.checkpoint.path
        return cls(spec.volumes, dict(spec.outputs), dict(spec.inputs), checkpoint)

    @property
    def uploaded(self) -> tuple[str, ...]:
        """What the sidecar uploads: outputs, then the checkpoint folder."""
        return (*self.outputs.values(), *([self.checkpoint] if self.checkpoint else []))

    @property
    def written(self) -> tuple[str, ...]:
        """Folders, outside every volume, of outputs and checkpoints; an output may be a file.

        One directly below ``/`` is taken for a folder, since ``/`` cannot be mounted.
        """
        mounts = [volume.mount_path for volume in self.volumes]
        paths = [PurePosixPath(path) for path in self.uploaded if path.startswith("/")]
        outside = [path for path in paths if not any(map(path.is_relative_to, mounts))]
        return tuple(dict.fromkeys(str(path if len(path.parts) == 2 else path.parent) for path in outside))

    def env(self, local: Callable[[str], str] = str) -> dict[str, str]:
        """``ENVSCALER_OUTPUT_MY_MODEL`` and the like; *local* returns where a path of the spec is.

        An input that a volume brings is the volume's path, any other its URI.
        """
        brought = {volume.source: local(volume.mount_path) for volume in reversed(self.volumes)}
        env = {_variable("OUTPUT", name): local(path) for name, path in self.outputs.items()}
        env |= {_variable("VOLUME", volume.name): local(volume.mount_path) for volume in self.volumes}
        env |= {_variable("INPUT", name): brought.get(uri, uri) for name, uri in self.inputs.items()}
        return env | ({"ENVSCALER_CHECKPOINT_DIR": local(self.checkpoint)} if self.checkpoint else {})


def _variable(kind: str, name: str) -> str:
    """``ENVSCALER_OUTPUT_MY_MODEL`` for the output ``my-model``."""
    return f"ENVSCALER_{kind}_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of the wrapper and of ``Session``, which reach ``start.json`` as they are.

    Attributes:
        every: ``{"seconds"|"steps"|"epochs": n}`` between checkpoints; None without ``checkpoint:``.
        align: ``now``, ``step`` or ``epoch``.
        global_batch: Samples per step over all ranks; None when the spec does not say.
        log_patterns: For scripts that do not import the library.
        stall_factor, stall_min_s: When a training without steps counts as stalled; None: the wrapper's.
        secret_env: Names of variables whose values are secrets.
        success: ``all-steps`` where exit code 0 before the last step is a failure, else None.
    """

    every: Mapping[str, float] | None = None
    align: str = "step"
    global_batch: int | None = None
    log_patterns: Mapping[str, str] = field(default_factory=dict)
    stall_factor: float | None = None
    stall_min_s: float | None = None
    secret_env: tuple[str, ...] = ()
    success: str | None = None

    @classmethod
    def of(cls, spec: EnvSpec) -> SessionSettings:
        """The settings of *spec*."""
        every = {} if spec.checkpoint is None else spec.checkpoint.every.model_dump(exclude_none=True)
        return cls(
            every={unit: float(count) for unit, count in every.items()} or None,
            align=spec.checkpoint_align,
            global_batch=None if spec.distributed is None else spec.distributed.global_batch,
            log_patterns=dict(spec.metrics.log_patterns),
            stall_factor=spec.stall.factor,
            stall_min_s=spec.stall.min_s,
            secret_env=tuple(item.name for item in spec.env if item.value_from is not None),
            success="all-steps" if spec.success == "all-steps" else None,
        )

    def with_interval(self, seconds: float | None) -> SessionSettings:
        """Copy with checkpoints at least every *seconds*, if its interval is a time; None changes nothing."""
        every = (self.every or {}).get("seconds")
        if not seconds or every is None or every <= seconds:
            return self
        return replace(self, every={"seconds": seconds})

    def to_dict(self) -> dict[str, Any]:
        """Its JSON, without what is not known."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return known | {"secret_env": list(self.secret_env)}


@dataclass(frozen=True, slots=True)
class Launch:
    """What every node of an attempt runs.

    Attributes:
        command: Entrypoint with its launcher; placeholders as :data:`NODE_RANK` are the wrapper's to fill in.
        env: Plain variables: those of the spec, and how the global batch is split.
        secrets: Reference of each variable whose value is a secret.
        paths: What the training reads and writes.
        resources: What one node requests, with the attempt's own memory and CPUs.
        image: The spec's image; None: the deployment's.
        image_login: Credentials of the image's registry.
        max_nodes: Most nodes that an elastic launch may have while it runs; None: their number is fixed.
        processes_per_node: Processes that the launcher starts on each node.
        session: Settings of the training's side.
        keep: Checkpoints to keep.
        workdir_archive: Name of the code's archive in the run's folder; None without a workdir.
    """

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Reference] = field(default_factory=dict)
    paths: Paths = field(default_factory=Paths)
    resources: Resources = field(default_factory=Resources)
    image: str | None = None
    image_login: Reference | None = None
    max_nodes: int | None = None
    processes_per_node: int = 1
    session: SessionSettings = field(default_factory=SessionSettings)
    keep: int = KEEP
    workdir_archive: str | None = None

    def layout(self, local: Callable[[str], str] = str) -> dict[str, Any]:
        """What ``layout.json`` has on every backend; *local* returns where a path of the spec is."""
        return {
            "workdir_archive": self.workdir_archive,
            "outputs": {name: local(path) for name, path in self.paths.outputs.items()},
            "checkpoint_path": local(self.paths.checkpoint) if self.paths.checkpoint else None,
            "keep": self.keep,
            "session": self.session.to_dict(),
        }

    def need(self, offer: Offer) -> Resources:
        """The alternative of the spec for which *offer* was chosen."""
        for one in self.resources.alternatives:
            types = one.requests.gpu.type if one.requests.gpu is not None else ()
            if one.requests.gpu_count == offer.gpus and (not types or offer.gpu_name in types):
                return one
        return self.resources.alternatives[0]

    def resized(self, *, memory_bytes: int | None, vcpus: float | None) -> Launch:
        """A copy that requests these amounts; None keeps the spec's.

        The memory request equals its limit: an attempt that has more than the spec states needs all of it.
        """
        memory = {} if memory_bytes is None else {"memory": f"{memory_bytes // 2**20}Mi"}
        cpu = {} if vcpus is None else {"cpu": f"{round(vcpus * 1000)}m"}

        def amounts(one: Resources) -> dict[str, Any]:
            asked = one.requests.model_copy(update=memory | cpu)
            return {"requests": asked, "limits": one.limits.model_copy(update=memory)}

        def alternatives(found: tuple[Resources, ...]) -> tuple[Resources, ...]:
            return tuple(one.model_copy(update=amounts(one)) for one in found)

        whole = self.resources
        lists = {"any_of": alternatives(whole.any_of), "ordered": alternatives(whole.ordered)}
        return replace(self, resources=whole.model_copy(update=amounts(whole) | lists))


def launch_of(spec: EnvSpec, nodes: int, *, workdir_archive: str | None = None) -> Launch:
    """Return what each of *nodes* nodes of *spec* runs, with the code in *workdir_archive*.

    Raises:
        SpecError: This number of nodes cannot keep the global batch.
    """
    plain = {item.name: item.value for item in spec.env if item.value is not None}
    base, distributed = spec.base, spec.distributed
    login = None if base is None or base.credentials is None else parse_reference(base.credentials)
    return Launch(
        command=launch_command(spec, nodes),
        env=plain | batch_env(spec, nodes),
        secrets={item.name: found for item in spec.env if (found := item.reference) is not None},
        paths=Paths.of(spec),
        resources=spec.resources,
        image=None if base is None else base.image,
        image_login=login,
        max_nodes=spec.node_bounds.max if distributed is not None and distributed.elastic else None,
        processes_per_node=spec.processes_per_node,
        session=SessionSettings.of(spec),
        keep=KEEP if spec.checkpoint is None else spec.checkpoint.keep,
        workdir_archive=workdir_archive,
    )


ELASTIC_RESTARTS = 100
"""Restarts that an elastic launch makes by itself after it loses a node. Chosen: each lost node costs one,
and the owner's own count ends a training that always fails long before this.
"""
JOIN_S = 900
"""How long torchrun waits until all nodes have joined, seconds. Chosen: five minutes more than a lost pod
should take to be replaced, and as long as a node waits for a new pod of node 0. With torchrun's own 600 s an
attempt whose new pod is about to join ends as if its code had failed; the owner ends one whose pod does not
come. Source: ``join_timeout`` of torch.distributed.elastic's dynamic rendezvous.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """How one world size splits the global batch.

    ``micro x replicas x accumulation = global_batch``; the micro batch is the same for every size, so memory
    and kernel speed do not depend on the number of nodes.

    Attributes:
        nodes: Number of nodes.
        world_size: Total number of processes.
        replicas: Copies of the model: world size / model_parallel.
        micro: Samples per copy and pass.
        accumulation: Passes per optimiser step.
    """

    nodes: int
    world_size: int
    replicas: int
    micro: int
    accumulation: int


def batches(spec: EnvSpec) -> tuple[Batch, ...]:
    """The batch for every number of nodes within the stage's bounds; () without ``global_batch``.

    The micro batch is the largest divisor of the samples per copy of the model at every size.

    Raises:
        SpecError: The global batch is not divisible at some sizes; names all of them.
    """
    distributed = spec.distributed
    if distributed is None or distributed.global_batch is None:
        return ()
    total, parallel = distributed.global_batch, distributed.model_parallel
    bounds = spec.node_bounds
    sizes = [(nodes, nodes * spec.processes_per_node) for nodes in range(bounds.min, bounds.max + 1)]
    whole = [(nodes, world) for nodes, world in sizes if world % parallel == 0]
    broken = [(nodes, world // parallel) for nodes, world in whole if total % (world // parallel)]
    if broken or not whole:
        raise SpecError(_cannot(total, parallel, broken))
    micro = math.gcd(*(total // (world // parallel) for _, world in whole))
    return tuple(
        Batch(nodes, world, world // parallel, micro, total // (world // parallel) // micro)
        for nodes, world in whole
    )


def _cannot(total: int, parallel: int, broken: Sequence[tuple[int, int]]) -> str:
    if not broken:
        return (
            f"distributed.model_parallel: no number of nodes gives a multiple of {parallel} processes; "
            "write more GPUs, or a smaller model_parallel"
        )
    listed = ", ".join(f"{nodes} nodes ({replicas} copies)" for nodes, replicas in broken[:8])
    fits = math.lcm(total, *(replicas for _, replicas in broken))
    return (
        f"distributed.global_batch: {total} cannot be kept with {listed}; "
        f"write {fits}, or bounds of scaling that leave these numbers out"
    )


def batch_env(spec: EnvSpec, nodes: int) -> dict[str, str]:
    """Micro batch and accumulation for *nodes* nodes as variables; {} without ``global_batch``.

    Raises:
        SpecError: As :func:`batches`, or *nodes* nodes do not fit a complete copy of the model.
    """
    found = {batch.nodes: batch for batch in batches(spec)}
    if not found:
        return {}
    if nodes not in found:
        raise SpecError(f"distributed: {nodes} nodes make no whole number of copies of the model")
    batch = found[nodes]
    assert spec.distributed is not None
    return {
        "ENVSCALER_GLOBAL_BATCH": str(spec.distributed.global_batch),
        "ENVSCALER_MICRO_BATCH": str(batch.micro),
        "ENVSCALER_GRADIENT_ACCUMULATION": str(batch.accumulation),
    }


def launch_command(spec: EnvSpec, nodes: int) -> tuple[str, ...]:
    """The entrypoint with its launcher, as each of *nodes* nodes runs it.

    The rendezvous of several nodes is at :data:`RENDEZVOUS_HOST`. torchrun numbers them, and sets RANK,
    LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process; other launchers get
    :data:`NODE_RANK`.
    """
    words, distributed = spec.entrypoint, spec.distributed
    if distributed is None or distributed.launcher == "none" or not words:
        return words
    is_python, program = _program(words)
    processes = spec.processes_per_node
    host, port, rank = RENDEZVOUS_HOST, RENDEZVOUS_PORT, NODE_RANK
    if nodes == 1 and not distributed.elastic:
        host, port, rank = "127.0.0.1", str(PORT), "0"
    if distributed.launcher == "torchrun":
        bounds = f"{spec.node_bounds.min}:{spec.node_bounds.max}" if distributed.elastic else None
        options = _torchrun(nodes, processes, f"{host}:{port}", elastic=bounds)
        return ("torchrun", *options, *([] if is_python else ["--no-python"]), *program)
    if distributed.launcher == "accelerate":
        options = [
            f"--num_machines={nodes}", f"--num_processes={nodes * processes}", f"--machine_rank={rank}",
            f"--main_process_ip={host}", f"--main_process_port={port}",
        ]  # fmt: skip
        return ("accelerate", "launch", *options, *([] if is_python else ["--no_python"]), *program)
    options = [
        f"--num_nodes={nodes}", f"--num_gpus={processes}", f"--node_rank={rank}",
        f"--master_addr={host}", f"--master_port={port}", "--no_ssh",
    ]  # fmt: skip
    return ("deepspeed", *options, *([] if is_python else ["--no_python"]), *program)


def _torchrun(nodes: int, processes: int, endpoint: str, *, elastic: str | None) -> list[str]:
    if nodes == 1 and elastic is None:
        return ["--standalone", f"--nproc_per_node={processes}"]
    options = [f"--nnodes={elastic or nodes}", f"--nproc_per_node={processes}"]
    options += [] if elastic is None else [f"--max_restarts={ELASTIC_RESTARTS}"]
    options += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=envscaler"]
    return [*options, f"--rdzv_conf=join_timeout={JOIN_S}"]


def _program(words: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Return True and the script for ``python script.py ...``, False and all words for any other program.

    ``python -m package`` keeps ``-m``, which all launchers accept too. With other interpreter options
    (``-u``) it counts as any other program.
    """
    first = words[0].rpartition("/")[2]
    if first in ("python", "python3") and len(words) > 1 and (words[1] == "-m" or words[1][:1] != "-"):
        return True, tuple(words[1:])
    return False, tuple(words)
