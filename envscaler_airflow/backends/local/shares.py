"""Offers of this machine, and what a spec requests beyond it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.machine import GIB, Gpu, Machine
from envscaler_airflow.catalog.packaged import scaled_price, shadow_offer
from envscaler_airflow.envspec.resources import Gpu as GpuRequest
from envscaler_airflow.envspec.resources import Resources
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.planning.record import Record

SHARED_SUFFIX = "-shared"
"""An offer of this kind is not counted: it shares the machine with everything else that runs."""


def is_shared(offer: Offer) -> bool:
    """True for an offer that is marked as shared."""
    return offer.instance_type.endswith(SHARED_SUFFIX)


def share_offers(machine: Machine, prices: Mapping[str, float] | None = None) -> tuple[Offer, ...]:
    """``local/cpu-1``, ``local/cpu-2``, ... up to all CPUs; ``local/gpu-1``, ... where the machine has GPUs.

    Counts are powers of two and the full count. Memory, and CPUs of a GPU share, are in proportion. The price
    is a shadow price: that of the nearest published cloud type, scaled to this machine's share; *prices* (USD
    per hour by name, such as ``cpu-2``) replace it.
    """
    cpus, usable_gib = len(machine.cpus), machine.usable_memory_bytes / GIB
    shadow = shadow_offer(cpus, machine.memory_bytes / GIB, arch=machine.arch)
    offers = [
        _offer(f"cpu-{count}", count, usable_gib * count / cpus, shadow=shadow) for count in _counts(cpus)
    ]
    for name in sorted({gpu.name for gpu in machine.gpus}):
        offers += _gpu_offers(machine, name)
    return tuple(_priced(offer, prices or {}) for offer in offers)


def _priced(offer: Offer, prices: Mapping[str, float]) -> Offer:
    if offer.instance_type not in prices:
        return offer
    return replace(offer, usd_per_hour=prices[offer.instance_type], price_source="set in the configuration")


def _gpu_offers(machine: Machine, name: str) -> list[Offer]:
    ours = [gpu for gpu in machine.gpus if gpu.name == name]
    cpus, usable_gib = len(machine.cpus), machine.usable_memory_bytes / GIB
    shadow = shadow_offer(cpus, machine.memory_bytes / GIB, gpu_name=name, gpus=len(ours), arch=machine.arch)
    kinds = len({gpu.name for gpu in machine.gpus})
    suffix = "" if kinds == 1 else "-" + name.lower().replace(" ", "-")
    offers = []
    for count in _counts(len(ours)):
        share = count / len(machine.gpus)
        vcpus = max(1, math.floor(cpus * share))
        offers.append(
            _offer(f"gpu-{count}{suffix}", vcpus, usable_gib * share, shadow=shadow, gpus=ours[:count])
        )
    return offers


def _counts(full: int) -> list[int]:
    powers = [2**exponent for exponent in range(full.bit_length()) if 2**exponent <= full]
    return powers if full in powers else [*powers, full]


def _offer(
    name: str, vcpus: float, memory_gib: float, *, shadow: Offer | None, gpus: Sequence[Gpu] = ()
) -> Offer:
    price = scaled_price(shadow, vcpus=vcpus, gpus=len(gpus)) if shadow else None
    source = "no published type has this GPU"
    if shadow:
        kind = f"{shadow.cloud} {shadow.instance_type} {shadow.capacity_type} {shadow.region}"
        source = f"shadow price: {kind}, {shadow.price_source}"
    return Offer(
        cloud="local",
        region="",
        instance_type=name,
        capacity_type="on-demand",
        vcpus=float(vcpus),
        memory_gib=math.floor(memory_gib * 100) / 100,
        gpu_name=gpus[0].name if gpus else None,
        gpus=len(gpus),
        gpu_memory_gb=gpus[0].memory_gb if gpus else None,
        usd_per_hour=price,
        price_source=source,
    )


def shortfalls(resources: Resources, machine: Machine) -> list[str]:
    """What *resources* request and *machine* can never provide; one sentence each, [] when it fits.

    Of alternatives (``any_of``, ``ordered``) one that fits is enough; when none does, the closest one is
    reported.

    Args:
        resources: What one node requests.
        machine: This machine, when nothing else runs on it.
    """
    return min((_missing(one, machine) for one in resources.alternatives), key=len)


def _missing(resources: Resources, machine: Machine) -> list[str]:
    missing, requests = [], resources.requests
    cpu = requests.cpu_cores
    if cpu is not None and cpu > len(machine.cpus):
        missing.append(f"cpu: {cpu:g} asked, this machine has {len(machine.cpus)}")
    memory = requests.memory_bytes
    if memory is not None and memory > machine.usable_memory_bytes:
        has = machine.usable_memory_bytes / GIB
        missing.append(f"memory: {memory / GIB:.4g}Gi asked, this machine can give {has:.4g}Gi")
    gpu = None if resources.cpu_fallback else requests.gpu
    return missing + _gpu_shortfalls(gpu, machine)


def _gpu_shortfalls(gpu: GpuRequest | None, machine: Machine) -> list[str]:
    if gpu is None:
        return []
    count, wanted, least_gb = gpu.count, gpu.type, gpu.memory_gb or 0.0
    named = [one for one in machine.gpus if not wanted or one.name in wanted]
    fitting = [one for one in named if one.memory_gb >= least_gb]
    if len(fitting) >= count:
        return []
    kind = " or ".join(wanted) if wanted else "any type"
    size = f" with {least_gb:g} GB" if least_gb else ""
    return [f"gpu: {count} of {kind}{size} asked, this machine has {len(fitting)}"]


def allocation_shortfalls(allocation: Allocation, machine: Machine) -> list[str]:
    """What all nodes of *allocation* need together beyond the whole machine; [] when it fits."""
    offer, nodes = allocation.offer, allocation.nodes
    if is_shared(offer):
        return []
    missing = []
    if offer.vcpus * nodes > len(machine.cpus):
        missing.append(f"cpu: {offer.vcpus * nodes:g} asked, this machine has {len(machine.cpus)}")
    if offer.memory_gib * nodes > machine.usable_memory_bytes / GIB:
        has = machine.usable_memory_bytes / GIB
        missing.append(f"memory: {offer.memory_gib * nodes:.4g}Gi asked, this machine can give {has:.4g}Gi")
    have = sum(gpu.name == offer.gpu_name for gpu in machine.gpus)
    if offer.gpus * nodes > have:
        missing.append(f"gpu: {offer.gpus * nodes} of {offer.gpu_name} asked, this machine has {have}")
    return missing


@dataclass(frozen=True, slots=True)
class Claim(Record):
    """The part of the machine that one node uses.

    Attributes:
        attempt: Folder name of the attempt.
        node: Index of the node.
        vcpus: CPUs that it uses.
        memory_bytes: Memory that it uses.
        cpus: CPUs that the training is pinned to; () for a shared offer, which is not pinned.
        gpus: GPUs that it sees.
        run: Folder of the run in the store, to display; "" if an older version wrote the claim.
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


class Slots:
    """The table of claims of one machine, in the folder of all attempts."""

    def __init__(
        self, root: Path, machine: Machine, *, on_dead: Callable[[Claim], None] = lambda _claim: None
    ) -> None:
        """Count below *root*, which other machines may share: the table's name contains the host's.

        *on_dead* is called once for each claim whose holder died, before its share is allocated again.
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
        """Allocate shares for *nodes* of *run*, all or none. The caller has locked the nodes.

        Raises:
            CapacityError: Not enough is free now; the message says what is used.
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
        """Claims whose holders are alive."""
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
        try:
            return [Claim.from_dict(item) for item in body.get("claims", [])]
        except ValueError as err:
            raise BackendError(f"{self._table}: claim of a share: {err}") from err

    def _is_live(self, claim: Claim) -> bool:
        node = files.node_folder(self._root / claim.attempt, claim.node)
        return not (node / files.END).exists() and files.lock_state(node / files.LOCK) == "held"


def nodes_that_fit(offer: Offer, *, machine: Machine, taken: Iterable[Claim]) -> int:
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
    """The share that *node* gets beside those *taken*: the CPUs and GPUs with the fewest other users.

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
