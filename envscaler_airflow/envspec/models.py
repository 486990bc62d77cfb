"""The environment spec of one stage, resolved: no templates, no short forms, no references to other files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from envscaler_airflow.envspec.fields import (
    AbsolutePath,
    Argument,
    Count,
    ImageName,
    Line,
    LocalPath,
    Memory,
    PackageName,
    PythonVersion,
    RequirementText,
    SafeName,
    Text,
    VariableName,
    WebUrl,
    Word,
    fault,
)
from envscaler_airflow.envspec.quantities import memory_bytes
from envscaler_airflow.envspec.resources import Model, NodeRange, Resources
from envscaler_airflow.envspec.running import Checkpoint, Failure, Metrics, Scaling, Stall
from envscaler_airflow.envspec.secret_forms import is_secret_name
from envscaler_airflow.envspec.secrets import Reference, parse_reference

AccessMode = Literal["ReadOnly", "ReadOnlyMany", "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]
OBJECT_STORES = ("s3", "gs", "gcs", "oss", "cos", "abfs", "abfss", "az", "hdfs")
"""Schemes whose volumes are copied in before the start."""

_SOURCE = re.compile(
    rf"(?P<kind>{'|'.join(OBJECT_STORES)}|file|pvc|nfs|hostPath):"
    r"(?P<rest>(//)?[A-Za-z0-9/][A-Za-z0-9 ._~%+=@,:/-]*)\Z"
)
Credentials = Annotated[Line, AfterValidator(lambda text: str(parse_reference(text)))]
"""A reference to a login."""
_PLACEHOLDER = re.compile(r"\{\{ inputs\.[A-Za-z_][A-Za-z0-9_]* \}\}")


class Base(Model):
    """The base of the environment: an image, or a distribution.

    ``credentials`` for a private registry is a reference. ``provides`` lists packages that the image is
    known to contain, with versions.
    """

    image: ImageName | None = None
    distro: Word | None = None
    credentials: Credentials | None = None
    provides: dict[Annotated[str, Field(max_length=100)], Line] = Field(default={})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image is None and self.distro is None:
            raise fault("is missing; write image: python:3.11-slim", at="image")
        return self


class Runtime(Model):
    """A language runtime and its packages: from a requirements file, a list, or both."""

    type: Literal["python"] = "python"
    version: PythonVersion | None = None
    package_manager: Literal["pip", "uv", "conda"] = "pip"
    requirements: LocalPath | None = None
    packages: Annotated[tuple[RequirementText, ...], Field(max_length=2000)] = ()
    index_url: WebUrl | None = None
    extra_index_urls: Annotated[tuple[WebUrl, ...], Field(max_length=32)] = ()
    channels: Annotated[tuple[Word, ...], Field(max_length=32)] = ()
    credentials: Credentials | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.channels and self.package_manager != "conda":
            raise fault(
                f"are conda's, not {self.package_manager}'s; write package_manager: conda", at="channels"
            )
        return self


class Volume(Model):
    """Data under a path: an object store, a claim, NFS, a folder of the host, or a stage's output.

    Object stores and outputs are copied in before the start. A stage publishes its results by ``outputs``;
    for an object store with ``access_mode: ReadWriteMany``, changes are written back with each checkpoint.
    A claim with ``size`` is created if it does not exist, with ``storage_class``; ``retain`` states whether
    it is deleted with the run or stays (``always``, the default). ``region`` (for a claim also ``zone``) is
    the location of the data and ``size`` the amount that is read, so that plans count the cost of reading
    them elsewhere, or skip places where a claim cannot be used.
    """

    name: SafeName
    source: Line
    mount_path: AbsolutePath
    access_mode: AccessMode | None = None
    region: Word | None = None
    zone: Word | None = None
    size: Memory | None = None
    storage_class: Word | None = None
    retain: Literal["run", "always"] | None = None

    @property
    def kind(self) -> str:
        """``s3``, ``gs``, ``file``, ``pvc``, ``nfs``, ``hostPath``; ``input`` while an input is not known."""
        match = _SOURCE.match(self.source)
        return match["kind"] if match else "input"

    @property
    def location(self) -> str:
        """The source less its scheme: ``claim`` of ``pvc://claim``, ``/srv`` of ``hostPath:/srv``."""
        match = _SOURCE.match(self.source)
        return match["rest"].removeprefix("//") if match else self.source

    @property
    def is_read_only(self) -> bool:
        """True when the stage cannot write it."""
        return self.access_mode in ("ReadOnly", "ReadOnlyMany")

    @property
    def is_made(self) -> bool:
        """True for a claim that is made when it does not exist."""
        return self.kind == "pvc" and self.size is not None and not self.is_read_only

    @property
    def gib(self) -> float | None:
        """``size`` in GiB."""
        return None if self.size is None else memory_bytes(self.size) / 2**30

    @property
    def is_copied(self) -> bool:
        """True when the sidecar copies it in before the start."""
        return self.kind in (*OBJECT_STORES, "file", "input")

    @field_validator("source")
    @classmethod
    def _check_source(cls, value: str) -> str:
        match = _SOURCE.match(_PLACEHOLDER.sub("s3://input", value, count=1))
        if match is None:
            forms = (
                "s3://bucket/path, gs://..., pvc://claim, nfs://host/path, hostPath:/path or {{ inputs.x }}"
            )
            raise ValueError(f"{value!r:.100} is not a valid source; write {forms}")
        kind, rest = match["kind"], match["rest"]
        if ".." in rest.split("/"):
            raise ValueError(f"{value!r:.100} has a '..' part; write the plain path")
        if kind in ("hostPath", "file"):
            _check_host_path(value, rest)
        elif not rest.startswith("//") or len(rest) < 3 or rest[2] == "/":
            raise ValueError(f"{value!r:.100} names no place; write {kind}://name")
        if kind == "pvc" and not re.fullmatch(r"//[a-z0-9]([a-z0-9.-]*[a-z0-9])?", rest):
            raise ValueError(f"{value!r:.100} is not a valid claim; write pvc://claim-name")
        if kind == "nfs" and not re.fullmatch(r"//[A-Za-z0-9.-]+/.*", rest):
            raise ValueError(f"{value!r:.100} names no export; write nfs://host/path")
        return value

    @model_validator(mode="after")
    def _default_access(self) -> Self:
        is_writable = self.kind in OBJECT_STORES and self.kind != "hdfs"
        if self.is_copied and not is_writable and self.access_mode not in (None, "ReadOnly", "ReadOnlyMany"):
            fix = "write access_mode: ReadOnly, and what is made under outputs"
            raise fault(
                f"{self.access_mode}, but the source is copied in before the start; {fix}", at="access_mode"
            )
        if self.zone is not None and self.is_copied:
            raise fault("is of a claim; what is copied in has a region", at="zone")
        if self.access_mode is None:
            object.__setattr__(self, "access_mode", "ReadOnly" if self.is_copied else "ReadWriteOnce")
        for name in ("storage_class", "retain"):
            if getattr(self, name) is not None and not self.is_made:
                raise fault("is of a claim that is made; write source: pvc://name and size: 10Gi", at=name)
        return self


def _check_host_path(value: str, rest: str) -> None:
    path = rest.removeprefix("//")
    if not path.startswith("/") or path == "/" or "//" in path:
        raise ValueError(
            f"{value!r:.100} names no folder; write the plain absolute path, such as hostPath:/srv/data"
        )


class EnvVar(Model):
    """A variable: a plain value, or a reference to a secret."""

    name: VariableName
    value: Argument | None = None
    value_from: Line | None = None

    @property
    def reference(self) -> Reference | None:
        """Where the value is taken from; None for a plain one."""
        return None if self.value_from is None else parse_reference(self.value_from, variable=self.name)

    @property
    def is_secret(self) -> bool:
        """True for a reference whose value must not be shown: not for ``REGION`` of ``variable:region``."""
        reference = self.reference
        if reference is None:
            return False
        if reference.kind == "connection":
            return reference.key not in ("host", "schema", "port", "login", "username")
        names = (self.name, reference.name, reference.key or "")
        return reference.kind == "secret" or any(map(is_secret_name, names))

    @field_validator("value_from")
    @classmethod
    def _check_reference(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else str(parse_reference(value, variable=info.data.get("name")))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.value is None and self.value_from is None:
            raise fault('has no value; write value: "4" or value_from: secret:NAME/key', at="value")
        if self.value is not None and self.value_from is not None:
            raise fault("beside value; write one of them", at="value_from")
        if self.name.startswith("ENVSCALER_"):
            raise fault(f"{self.name} is set by envscaler; write another name", at="name")
        return self


class Distributed(Model):
    """Training with several processes.

    ``world_size`` is the total number of processes, ``node_count`` the number of nodes. ``model_parallel`` is
    the number of GPUs that share one copy of the model; sizes are multiples of it. With ``elastic``, torchrun
    lets nodes join and leave within the bounds of scaling while it runs; the training loads its newest
    checkpoint whenever it starts.
    """

    launcher: Literal["torchrun", "accelerate", "deepspeed", "none"] = "torchrun"
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    world_size: Count | None = None
    node_count: Count | None = None
    global_batch: Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = None
    model_parallel: Count = 1
    elastic: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.elastic and self.launcher != "torchrun":
            raise fault(
                f"true, but {self.launcher} takes no nodes while it runs; write launcher: torchrun",
                at="elastic",
            )
        if self.world_size and self.node_count and self.world_size % self.node_count:
            text = f"{self.world_size} processes do not divide over {self.node_count} nodes; write a multiple"
            raise fault(text, at="world_size")
        return self


def _canonical_version(value: Any) -> Any:
    return "v1" if value == "v1alpha1" else value


class EnvSpec(Model):
    """One stage: environment, resources, data, command, and how to run it.

    The last fields are not written by people: ``parameters`` and ``inputs`` are the values that the spec
    was resolved with, ``input_names`` the inputs that it names, ``target`` its variant, ``base_dirs`` the
    folders that relative paths are relative to, ``warnings`` what stops nothing.
    """

    version: Annotated[
        Literal["v1"], BeforeValidator(_canonical_version, json_schema_input_type=Literal["v1", "v1alpha1"]),
        Field(examples=["v1"]),
    ]  # fmt: skip
    name: Annotated[SafeName, Field(examples=["bert-finetune"])]
    description: Text = ""
    base: Base | None = None
    system_packages: Annotated[tuple[PackageName, ...], Field(max_length=1000)] = ()
    runtimes: Annotated[tuple[Runtime, ...], Field(max_length=8)] = ()
    resources: Resources = Resources()
    num_nodes: NodeRange = NodeRange()
    workdir: LocalPath | None = None
    volumes: Annotated[tuple[Volume, ...], Field(max_length=100)] = ()
    env: Annotated[tuple[EnvVar, ...], Field(max_length=1000)] = ()
    entrypoint: Annotated[
        tuple[Argument, ...], Field(max_length=1000, examples=[["python", "train.py"]])
    ] = ()
    outputs: Annotated[dict[SafeName, AbsolutePath], Field(max_length=100)] = Field(default={})
    distributed: Distributed | None = None
    checkpoint: Checkpoint | None = None
    scaling: Scaling | None = None
    capacity: Literal["spot", "on-demand", "auto"] = "auto"
    metrics: Metrics = Metrics()
    stall: Stall = Stall()
    failure: Failure = Failure()
    success: Literal["exit-code", "all-steps"] | None = None

    parameters: dict[str, str | int | float | bool | None] = Field(default={})
    inputs: dict[SafeName, Line] = Field(default={})
    input_names: tuple[SafeName, ...] = ()
    target: SafeName | None = None
    base_dirs: dict[str, str] = Field(default={})
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The frozen spec as JSON; :meth:`from_dict` gives back an equal one."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> EnvSpec:
        """Read what :meth:`to_dict` wrote; fields of a newer version are ignored.

        Raises:
            SpecError: Every fault of it.
        """
        from envscaler_airflow.envspec.validation import from_dict  # noqa: PLC0415 (it reads this module's models)

        return from_dict(body)

    def resolve_path(self, field: str) -> Path | None:
        """``workdir`` or ``runtimes[0].requirements`` as an absolute path; None when it is not set."""
        value: Any = self
        for name, index in re.findall(r"([a-z_]+)(?:\[([0-9]+)\])?", field):
            value = getattr(value, name)
            value = value[int(index)] if index else value
        return None if value is None else Path(self.base_dirs.get(field, "")) / str(value)

    @property
    def processes_per_node(self) -> int:
        """Processes that the launcher starts on each node: ``world_size / node_count``, else one per GPU."""
        if self.distributed is not None and self.distributed.world_size is not None:
            nodes = self.distributed.node_count or self.num_nodes.min
            return max(1, self.distributed.world_size // nodes)
        return max(1, self.resources.alternatives[0].requests.gpu_count)

    @property
    def checkpoint_align(self) -> Literal["now", "step", "epoch"]:
        """When a move may happen: ``now``, ``step`` or ``epoch``."""
        return "step" if self.checkpoint is None else self.checkpoint.align

    @property
    def checkpoint_align_timeout_s(self) -> float:
        """Longest wait for that, seconds."""
        return 3600.0 if self.checkpoint is None else self.checkpoint.align_timeout_s

    @property
    def node_bounds(self) -> NodeRange:
        """How many nodes the stage may have while it runs."""
        scaling = self.scaling
        low = (
            scaling.min_nodes if scaling is not None and scaling.min_nodes is not None else self.num_nodes.min
        )
        high = (
            scaling.max_nodes if scaling is not None and scaling.max_nodes is not None else self.num_nodes.max
        )
        return NodeRange(min=min(low, high), max=max(low, high))

    @field_validator("volumes", "env", "runtimes")
    @classmethod
    def _check_names(cls, items: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: set[str] = set()
        for index, item in enumerate(items):
            name = item.type if isinstance(item, Runtime) else item.name
            if name in seen:
                raise fault(f"{name} stands here twice; write it once", at=f"[{index}]")
            seen.add(name)
        return items

    @field_validator("volumes")
    @classmethod
    def _check_mounts(cls, volumes: tuple[Volume, ...]) -> tuple[Volume, ...]:
        paths: dict[str, str] = {}
        for index, volume in enumerate(volumes):
            if volume.mount_path in paths:
                text = (
                    f"{volume.mount_path} is where {paths[volume.mount_path]} is mounted; write another path"
                )
                raise fault(text, at=f"[{index}].mount_path")
            paths[volume.mount_path] = volume.name
        return volumes

    @field_validator("entrypoint")
    @classmethod
    def _check_command(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if words and not words[0].strip():
            raise fault("an empty program; write one, such as python", at="[0]")
        return words

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        scaling = self.scaling
        if scaling is None:
            return self
        if scaling.max_nodes is not None and scaling.max_nodes < self.num_nodes.min:
            text = f"{scaling.max_nodes} is below num_nodes {self.num_nodes.min}; write at least that"
            raise fault(text, at="scaling.max_nodes")
        if scaling.min_nodes is not None and scaling.min_nodes > self.num_nodes.max:
            text = f"{scaling.min_nodes} is above num_nodes {self.num_nodes.max}; write at most that"
            raise fault(text, at="scaling.min_nodes")
        return self


RESOLVED_FIELDS = ("parameters", "inputs", "input_names", "target", "base_dirs", "warnings")
"""Fields that loading fills in and that no document may hold under these meanings."""
UNHASHED_FIELDS = ("description", "target", "base_dirs", "warnings", "input_names")
"""Fields that change nothing of what runs."""
