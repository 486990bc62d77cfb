"""What one node needs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from envscaler_airflow.envspec import gpus
from envscaler_airflow.envspec.fields import Count, Cpu, GpuMemory, Memory, Word, fault
from envscaler_airflow.envspec.quantities import cpu_cores, gpu_memory_gb, memory_bytes

GIB = 1 << 30
MAX_NODES = 100_000
"""Chosen: no job has more; a typing error does."""


_NODES = re.compile(r"[1-9][0-9]{0,4}\Z")


class Model(BaseModel):
    """Base of all parts of a spec: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


MOST_OVER_REQUEST = 4
"""Memory that a container may use where its spec states no limit, times what it requests. Chosen: a stage
that states a quarter of what it needs runs, and one that leaks does not take the whole machine."""


def default_limit_bytes(requested: int | None, whole: int) -> int:
    """Memory limit of a stage that states none, on a share of *whole* bytes of a machine."""
    return whole if requested is None else min(whole, MOST_OVER_REQUEST * requested)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _absent_when_zero(value: Any) -> Any:
    """``gpu: {count: 0}`` asks for none."""
    return (
        None if isinstance(value, dict) and value.get("count") == 0 and value["count"] is not False else value
    )


GpuTypes = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=40)], ...],
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    Field(max_length=32, examples=[["A100-80GB", "H100"]]),
]


class Gpu(Model):
    """GPUs of one node.

    ``memory`` is a minimum of the vendor's nominal figure, ``memory_max`` a maximum. ``type`` names
    alternatives, which are normalised to the catalog's names with the requested memory.
    """

    count: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    type: GpuTypes = ()
    vendor: Literal["nvidia", "amd", "intel"] | None = None
    memory: GpuMemory | None = None
    memory_max: GpuMemory | None = None

    @property
    def memory_gb(self) -> float | None:
        """Least nominal memory of one GPU, GB; None when any will do."""
        return None if self.memory is None else gpu_memory_gb(self.memory)

    @property
    def memory_max_gb(self) -> float | None:
        """Most nominal memory of one GPU, GB; None when any will do."""
        return None if self.memory_max is None else gpu_memory_gb(self.memory_max)

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        low, high = self.memory_gb, self.memory_max_gb
        if low is not None and high is not None and low > high:
            raise fault(
                f"{self.memory} is above {self.memory_max}; write the smaller figure first", at="memory"
            )
        names: dict[str, None] = {}
        for name in self.type:
            try:
                names |= dict.fromkeys(gpus.resolve(name, low))
            except ValueError as err:
                raise fault(str(err), at="type") from err
        kept = tuple(name for name in names if high is None or gpus.MEMORY_GB.get(name, 0) <= high)
        if names and not kept:
            raise fault(
                f"none of {', '.join(names)} has at most {self.memory_max}; write a larger one", at="memory"
            )
        object.__setattr__(self, "type", kept)
        return self


class Amounts(Model):
    """CPU and memory of one node."""

    cpu: Cpu | None = None
    memory: Memory | None = None

    @property
    def cpu_cores(self) -> float | None:
        """Cores; None when the field is absent."""
        return None if self.cpu is None else cpu_cores(self.cpu)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes; None when the field is absent."""
        return None if self.memory is None else memory_bytes(self.memory)


class Requests(Amounts):
    """The minimum that an offer must have, which is reserved on a shared machine."""

    gpu: Annotated[Gpu | None, BeforeValidator(_absent_when_zero)] = None

    @property
    def memory_gib(self) -> float | None:
        """GiB; None when not requested."""
        return None if self.memory is None else memory_bytes(self.memory) / GIB

    @property
    def gpu_count(self) -> int:
        """GPUs per node, 0 without."""
        return 0 if self.gpu is None else self.gpu.count


class GpuLimit(Model):
    """GPUs cannot be shared: the limit is the request."""

    count: Annotated[int, Field(strict=True, ge=0, le=64)]


class Limits(Amounts):
    """The maximum that the stage may use."""

    gpu: GpuLimit | None = None


class Resources(Model):
    """The needs of one node; an absent field accepts anything.

    ``any_of`` and ``ordered`` are lists of alternatives, each complete in itself once loaded: the planner
    chooses among all of them, or takes the first that is available.
    """

    requests: Requests = Requests()
    limits: Limits = Limits()
    cloud: Word | None = None
    region: Word | None = None
    zone: Word | None = None
    instance_type: Word | None = None
    disk_size: Memory | None = None
    disk_tier: Literal["none", "low", "medium", "high", "ultra", "best"] | None = None
    shm_size: Memory | None = None
    cpu_fallback: Annotated[bool, Field(strict=True)] = False
    capacity: Literal["spot", "on-demand", "auto"] | None = None
    any_of: Annotated[tuple[Resources, ...], Field(max_length=32)] = ()
    ordered: Annotated[tuple[Resources, ...], Field(max_length=32)] = ()

    @property
    def alternatives(self) -> tuple[Resources, ...]:
        """What will do: the entries of ``any_of`` or ``ordered``, or this alone."""
        return self.any_of or self.ordered or (self,)

    @property
    def is_ordered(self) -> bool:
        """True when the first available alternative is taken at any price."""
        return bool(self.ordered)

    @property
    def disk_bytes(self) -> int | None:
        """Least disk, bytes; None when any will do."""
        return None if self.disk_size is None else memory_bytes(self.disk_size)

    @property
    def shm_bytes(self) -> int | None:
        """Size of ``/dev/shm``, bytes; None for the backend's choice."""
        return None if self.shm_size is None else memory_bytes(self.shm_size)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        asked, most = self.requests, self.limits
        if asked.cpu_cores is not None and most.cpu_cores is not None and most.cpu_cores < asked.cpu_cores:
            raise fault(
                f"{most.cpu} is below the request of {asked.cpu}; write at least that", at="limits.cpu"
            )
        if asked.memory_bytes and most.memory_bytes is not None and most.memory_bytes < asked.memory_bytes:
            text = f"{most.memory} is below the request of {asked.memory}; write at least that"
            raise fault(text, at="limits.memory")
        if most.gpu is not None and most.gpu.count != asked.gpu_count:
            text = f"{most.gpu.count}, but requests.gpu.count is {asked.gpu_count}; write the same"
            raise fault(text, at="limits.gpu.count")
        if self.any_of and self.ordered:
            raise fault("beside any_of; write one of them", at="ordered")
        return self


class NodeRange(Model):
    """How many nodes: ``1`` or ``1..4``."""

    min: Count = 1
    max: Count = 1

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NODES:
            return {"min": value, "max": value}
        if isinstance(value, str):
            low, dots, high = value.partition("..")
            high = high if dots else low
            if all(_NODES.match(part) for part in (low, high)):
                return {"min": int(low), "max": int(high)}
        if isinstance(value, dict | NodeRange):
            return value
        raise fault(f"{value!r:.60} is not a number of nodes; write 2 or 1..4")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise fault(f"{self.min}..{self.max} runs backwards; write {self.max}..{self.min}")
        return self
