"""A deployment's settings for its cluster, used by every attempt. Validated at creation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from envscaler_airflow.backends.base import SIDECAR_IMAGE
from envscaler_airflow.catalog.accelerators import is_gpu_resource
from envscaler_airflow.envspec.quantities import duration_s
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Offer

Provider = Literal["eks", "karpenter", "gke", "aks", "plain"]


class NodeClass(BaseModel):
    """An available kind of node, for clusters whose nodes may not be read.

    ``name`` is the offer's instance type. ``usd_per_hour`` is the price of one pod of this size.
    ``gpu_resource`` is what its pods request as GPUs, where that is not ``gpu`` of the GPU's vendor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    vcpus: Annotated[float, Field(gt=0)]
    memory_gib: Annotated[float, Field(gt=0)]
    gpu: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_memory_gb: float | None = None
    gpu_resource: str | None = None
    capacity_type: Literal["spot", "on-demand"] = "on-demand"
    zone: str | None = None
    arch: str | None = None
    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _check_offer(self) -> Self:
        """Report here, with the messages of an offer, what is not valid in one."""
        self.offer("")
        if self.gpu_resource is not None and not is_gpu_resource(self.gpu_resource):
            raise ValueError(
                f"gpu_resource: {self.gpu_resource!r:.60} is not a resource of GPUs; write one of the node's "
                "allocatable ones, such as nvidia.com/mig-1g.5gb"
            )
        return self

    def offer(self, region: str) -> Offer:
        """The offer for the planner."""
        return Offer(
            cloud="kubernetes",
            region=region,
            zone=self.zone,
            instance_type=self.name,
            capacity_type=self.capacity_type,
            vcpus=self.vcpus,
            memory_gib=self.memory_gib,
            gpu_name=self.gpu,
            gpus=self.gpus,
            gpu_memory_gb=self.gpu_memory_gb,
            usd_per_hour=self.usd_per_hour,
            price_source="cluster_prices of the configuration" if self.usd_per_hour is not None else "",
            arch=self.arch,
        )


class Settings(BaseModel):
    """Where attempts run and how.

    Attributes:
        namespace: Where everything is made.
        sidecar_image: The sidecar image, which `envscaler images build-sidecar` builds.
        image: Image of every stage; None takes the spec's own, see ``build.stage_image``.
        image_repository: Where `envscaler build` puts images of specs that install packages.
        service_account: Identity of the pods, by which the sidecar reaches the store; the training gets
            neither its token nor its role.
        provider: The cloud whose labels the nodes have; None reads any.
        region: Region of the cluster in offers, if its nodes have no label for it.
        cluster_prices: Node classes; () derives offers from the nodes themselves.
        usd_per_hour: Price of a whole node by node pool, instance type or ``*``, for derived offers; takes
            precedence over the cloud's price of the type in the catalog.
        node_selector: Labels of the nodes that stages may use, such as those of a pool; {} for all.
        wait_for_node_s: Longest wait for a node; 0 on clusters that add none.
        wait_for_image_s: Longest wait for what a pod lacks: an image whose registry does not answer, a
            Secret, a volume that is not bound or mounted, a webhook. Default chosen: it is available by then,
            or a user must act.
        queue: Kueue queue; the Job is created suspended and Kueue admits it.
        priority_class: Priority class of the pods.
        pod_override: Pod template (metadata and spec) that is merged over the generated one.
        user: User and group of all containers; None keeps the user of the stage's image, with no privileges
            except those over files and users, and the sidecar runs as root with those over files.
        read_only_root: True mounts the root of the training's container read-only too, with a ``/tmp`` of its
            own. Not every image runs so: many libraries write to a cache in the home folder.
        pull_secrets: Names of image pull secrets.
        cache_path: Folder of every machine that caches copied buckets for later pods there; None copies into
            the pod's own scratch space, because many clusters refuse ``hostPath`` volumes.
        store_volume: Claim with the run store, or any volume source of a pod (``{"nfs": {...}}``). Each pod
            gets its run's folder of it, below ``store_mount``, and read-only the folders that it reads of
            other runs.
        store_mount: Where it is mounted; the store's URL is then ``file://`` below it.
        store_secret: Secret whose keys only the sidecar reads, from files, as variables.
        keep: ``never``, ``on-failure``, or a time (``30m``, or seconds): how long a failed pod stays for
            inspection. It uses no resources of its node any more, and costs nothing.
        ttl_s: How long an ended Job stays if it is not released, seconds.
        longest_s: Latest deadline of an attempt, seconds: its Job then ends without a request.
        drain_s: Longest time for uploads after the command ended, seconds.
        cluster_spread: ``zone`` keeps all nodes of an attempt in one zone, ``host`` spreads over hosts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    namespace: str = "default"
    sidecar_image: str = SIDECAR_IMAGE
    image: str | None = None
    image_repository: str | None = None
    service_account: str | None = None
    provider: Provider | None = None
    region: str = ""
    cluster_prices: tuple[NodeClass, ...] = ()
    usd_per_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    node_selector: dict[str, str] = {}
    wait_for_node_s: Annotated[float, Field(ge=0)] = 900.0
    wait_for_image_s: Annotated[float, Field(gt=0)] = 1800.0
    queue: str | None = None
    priority_class: str | None = None
    pod_override: dict[str, Any] = {}
    user: Annotated[int, Field(ge=1)] | None = None
    read_only_root: bool = False
    pull_secrets: tuple[str, ...] = ()
    cache_path: Annotated[str, Field(pattern=r"^/[^:]+$")] | None = None
    store_volume: str | dict[str, Any] | None = None
    store_mount: str = "/var/lib/envscaler-store"
    store_secret: str | None = None
    keep: Literal["never", "on-failure"] | Annotated[int, Field(ge=0)] = "never"
    ttl_s: Annotated[int, Field(ge=60)] = 86400
    longest_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30 * 86400.0
    drain_s: Annotated[float, Field(ge=0)] = 3600.0
    cluster_spread: Literal["none", "zone", "host"] = "none"

    @field_validator("keep", mode="before")
    @classmethod
    def _read_keep(cls, value: Any) -> Any:
        """``30m`` as seconds."""
        if not isinstance(value, str) or value in ("never", "on-failure"):
            return value
        return math.ceil(duration_s(value))

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, value: str) -> str:
        from envscaler_airflow.backends.kubernetes.names import dns_label  # noqa: PLC0415  # keeps models bare

        if dns_label(value) != value:
            raise ValueError(
                f"{value!r:.80} is not a valid namespace; write lower-case letters, digits and dashes"
            )
        return value

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Settings:
        """Check *body*, from a connection's extras or a file.

        Raises:
            SpecError: Names every fault.
        """
        try:
            return cls.model_validate(dict(body))
        except ValidationError as err:
            faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
            raise SpecError(f"kubernetes: {'; '.join(faults)}", faults=faults) from err

    def node_class(self, offer: Offer) -> NodeClass | None:
        """The class behind *offer*; None for an offer derived from nodes."""
        for item in self.cluster_prices:
            if (item.name, item.capacity_type, item.zone) == (
                offer.instance_type,
                offer.capacity_type,
                offer.zone,
            ):
                return item
        return None
