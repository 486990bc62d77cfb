"""Slices of this machine in use, counted under a file lock.

A claim lives as long as the lock of its node is held, which starts before the claim is made and
is inherited by node main without a gap; so a dead holder's slice is free, however it died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.machine import GIB, Machine
from envscaler_airflow.backends.local.slices import is_shared
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.planning.offers import Allocation, Offer


@dataclass(frozen=True, slots=True)
class Claim:
    """What one node holds of the machine.

    Attributes:
        attempt: Folder name of the attempt.
        node: Index of the node.
        vcpus: CPUs that count as taken.
        memory_bytes: Memory that counts as taken.
        cpus: CPUs that the training is pinned to; () for a shared slice, which is not pinned.
        gpus: GPUs that it sees.
        run: Folder of the run in the store, to be shown; "" where an older version claimed.
    """

    attempt: str
    node: int
    vcpus: float
    memory_bytes: int
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    run: str = ""

    @property
    def holder(self) -> str:
        """Human-readable name of its user: the run without its deployment, else the attempt's folder."""
        run = self.run.partition("/")[2].removesuffix("/-1") or self.attempt
        return f"{run} (node {self.node})"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it stands in the table."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Claim:
        """Read what :meth:`to_dict` wrote."""
        try:
            return cls(
                attempt=str(body["attempt"]),
                node=int(body["node"]),
                vcpus=float(body["vcpus"]),
                memory_bytes=int(body["memory_bytes"]),
                cpus=tuple(int(cpu) for cpu in body["cpus"]),
                gpus=tuple(int(gpu) for gpu in body["gpus"]),
                run=str(body.get("run", "")),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise BackendError(f"claim of a slice: {err!r}") from err


class Slots:
    """The table of claims of one machine, in the folder of all attempts."""

    def __init__(
        self, root: Path, machine: Machine, *, on_dead: Callable[[Claim], None] = lambda _claim: None
    ) -> None:
        """Count below *root*, which other machines may share: the table's name carries the host's.

        *on_dead* is called once for each claim whose holder died, before its slice is given out.
        """
        self._root = root
        self._on_dead = on_dead
        self._machine = machine
        host = machine.identity.host or "localhost"
        self._table = root / f"slots-{host}.json"
        self._lock = root / f"slots-{host}.lock"

    def claim(
        self, attempt: str, allocation: Allocation, nodes: Iterable[int], *, run: str = ""
    ) -> dict[int, Claim]:
        """Take slices for *nodes* of *run*, all or none. Their node locks are held by the caller.

        Raises:
            CapacityError: Not enough is free now; says what is taken.
        """
        with files.locked(self._lock):
            claims = self._claims()
            made = {}
            for node in nodes:
                claims = [claim for claim in claims if (claim.attempt, claim.node) != (attempt, node)]
                found = fit(attempt, node, allocation, machine=self._machine, taken=claims)
                made[node] = replace(found, run=run)
                claims.append(made[node])
            files.write_json(self._table, {"claims": [claim.to_dict() for claim in claims]})
            return made

    def live(self) -> list[Claim]:
        """Claims whose holders live."""
        with files.locked(self._lock):
            return [claim for claim in self._read() if self._is_live(claim)]

    def _claims(self) -> list[Claim]:
        live = []
        for claim in self._read():
            if self._is_live(claim):
                live.append(claim)
            else:
                self._on_dead(claim)
        return live

    def _read(self) -> list[Claim]:
        body = files.read_json(self._table) or {}
        return [Claim.from_dict(item) for item in body.get("claims", [])]

    def _is_live(self, claim: Claim) -> bool:
        node = files.node_folder(self._root / claim.attempt, claim.node)
        return not (node / files.END).exists() and files.lock_state(node / files.LOCK) == "held"


def room(offer: Offer, *, machine: Machine, taken: Iterable[Claim]) -> int:
    """Nodes of *offer*, which is counted, that fit on *machine* beside those *taken*."""
    claims = list(taken)
    nodes = 0
    while True:
        try:
            claims.append(fit("", nodes, Allocation(offer), machine=machine, taken=claims))
        except CapacityError:
            return nodes
        nodes += 1


def fit(attempt: str, node: int, allocation: Allocation, *, machine: Machine, taken: list[Claim]) -> Claim:
    """The slice that *node* gets beside those *taken*: the CPUs and GPUs that fewest others have.

    Raises:
        CapacityError: Not enough is free.
    """
    offer = allocation.offer
    memory = int(offer.memory_gib * GIB)
    if is_shared(offer):
        return Claim(attempt, node, 0.0, 0)
    counted = [claim for claim in taken if claim.vcpus]
    free_cpus = len(machine.cpus) - sum(claim.vcpus for claim in counted)
    free_memory = machine.usable_memory_bytes - sum(claim.memory_bytes for claim in counted)
    held = {gpu for claim in counted for gpu in claim.gpus}
    gpus = [gpu.index for gpu in machine.gpus if gpu.name == offer.gpu_name and gpu.index not in held]
    if offer.vcpus > free_cpus or memory > free_memory or offer.gpus > len(gpus):
        holders = ", ".join(claim.holder for claim in counted) or "nothing"
        raise CapacityError(
            f"{offer.name}: needs {offer.vcpus:g} CPUs, {offer.memory_gib:g} GiB and {offer.gpus} GPUs; "
            f"free are {free_cpus:g} CPUs, {free_memory / GIB:.4g} GiB and {len(gpus)} GPUs; "
            f"in use by {holders}"
        )
    users = {cpu: sum(cpu in claim.cpus for claim in counted) for cpu in machine.cpus}
    cpus = sorted(machine.cpus, key=lambda cpu: (users[cpu], cpu))[: max(1, int(-(-offer.vcpus // 1)))]
    return Claim(attempt, node, offer.vcpus, memory, tuple(sorted(cpus)), tuple(gpus[: offer.gpus]))
