"""Multi-process training: the launcher's command, and gradient accumulation for the global batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import SpecError

PORT = 29400
"""Rendezvous port. Source: torchrun's own default for c10d."""


ELASTIC_RESTARTS = 100
"""Restarts that an elastic launch makes by itself after it loses a node. Chosen: each lost node costs one,
and the owner's own count ends a training that always fails long before this.
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


def launch_command(
    spec: EnvSpec, nodes: int, *, endpoint: str = f"127.0.0.1:{PORT}", node_rank: str | None = None
) -> tuple[str, ...]:
    """The entrypoint with its launcher, as each of *nodes* nodes runs it.

    Args:
        spec: The stage.
        nodes: Number of nodes.
        endpoint: ``host:port`` of node 0, used for the rendezvous.
        node_rank: Text that expands to the node's rank (``$(NODE)`` on Kubernetes); None lets c10d assign
            ranks.

    torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process.
    """
    words = spec.entrypoint
    distributed = spec.distributed
    if distributed is None or distributed.launcher == "none" or not words:
        return words
    processes = spec.processes_per_node
    is_python, program = _program(words)
    if distributed.launcher == "torchrun":
        bounds = f"{spec.node_bounds.min}:{spec.node_bounds.max}" if distributed.elastic else None
        options = _torchrun(nodes, processes, endpoint, node_rank, elastic=bounds)
        return ("torchrun", *options, *([] if is_python else ["--no-python"]), *program)
    host, _, port = endpoint.rpartition(":")
    rank = node_rank if node_rank is not None else "0"
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


def _torchrun(
    nodes: int, processes: int, endpoint: str, node_rank: str | None, *, elastic: str | None
) -> list[str]:
    if nodes == 1 and elastic is None:
        return ["--standalone", f"--nproc_per_node={processes}"]
    options = [f"--nnodes={elastic or nodes}", f"--nproc_per_node={processes}"]
    options += [] if elastic is None else [f"--max_restarts={ELASTIC_RESTARTS}"]
    options += [] if node_rank is None else [f"--node_rank={node_rank}"]
    return [*options, "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=envscaler"]


def _program(words: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Return True and the script for ``python script.py ...``, False and all words for any other program.

    ``python -m package`` keeps ``-m``, which all launchers accept too. With other interpreter options
    (``-u``) it counts as any other program.
    """
    first = words[0].rpartition("/")[2]
    if first in ("python", "python3") and len(words) > 1 and (words[1] == "-m" or words[1][:1] != "-"):
        return True, tuple(words[1:])
    return False, tuple(words)
