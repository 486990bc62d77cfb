"""What ``submit`` sends for one attempt: an Indexed Job and the ConfigMap of its layout. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from envscaler_agent.ending import EXIT_CODES
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import mounts as at
from envscaler_airflow.backends.kubernetes import names, security
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.scheduling import (
    affinity,
    gpu_resource,
    grace_s,
    placement,
    tolerations,
)
from envscaler_airflow.envspec.resources import Resources, default_limit_bytes
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.launch import Launch
from envscaler_airflow.planning.offers import AllocationPart, Offer
from envscaler_airflow.run import outcome_of
from envscaler_airflow.sidecar import context

_CONTAINER_LISTS = ("env", "envFrom", "ports", "volumeMounts", "volumeDevices")
_SPEC_LISTS = ("initContainers", "volumes")


def merge_pod(base: Mapping[str, Any], override: Mapping[str, Any], *, keep_name: str) -> dict[str, Any]:
    """Merge *override* into *base*; the first container keeps the name *keep_name*."""
    if not override:
        return dict(base)
    spec, wanted = base["spec"], override.get("spec") or {}
    merged = _merged(spec, wanted, _SPEC_LISTS)
    containers = zip_longest(spec["containers"], wanted.get("containers") or ())
    merged["containers"] = [_merged(one or {}, other or {}, _CONTAINER_LISTS) for one, other in containers]
    merged["containers"][0]["name"] = keep_name
    return {"metadata": _metadata(base.get("metadata") or {}, override.get("metadata") or {}), "spec": merged}


def _metadata(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **wanted}
    for name in ("labels", "annotations"):
        joined = {**(base.get(name) or {}), **(wanted.get(name) or {})}
        if joined:
            merged[name] = joined
    return merged


def _merged(base: Mapping[str, Any], wanted: Mapping[str, Any], lists: Iterable[str]) -> dict[str, Any]:
    """*base* with the values of *wanted*; *lists* are joined."""
    merged = {**base, **{key: value for key, value in wanted.items() if value is not None}}
    for name in lists:
        if base.get(name) or wanted.get(name):
            merged[name] = [*(base.get(name) or ()), *(wanted.get(name) or ())]
    return merged


SIDECAR = "sidecar"
INSTALL = "install"
MIB = 1 << 20
GIB = 1 << 30
SIDECAR_CPUS = 0.1
"""Cores that the sidecar requests. Chosen: it waits most of the time; it may use more."""
SIDECAR_MEMORY_BYTES = 256 * MIB
"""Memory that the sidecar requests, bytes. Chosen: twice the memory of a sidecar with boto3."""
MAX_CONFIG_BYTES = 1_000_000
"""Largest layout. Source: Kubernetes refuses a ConfigMap over 1 MiB."""
UNBILLED_S = 3600.0
"""How much longer than its pods a Job may be active, seconds: waiting for quota and nodes costs nothing.
Chosen: twice as long as most autoscalers try.
"""
_OF_RUN = (names.MANAGED_BY, names.RUN)
_ORDERLY = [code for reason, code in EXIT_CODES.items() if outcome_of(reason).is_orderly]
"""Exit codes of a node that stopped on request: the other nodes continue to their own end."""


def render_attempt(
    request: AttemptRequest, settings: Settings, *, drivers: Collection[str] = ()
) -> dict[str, Any]:
    """Everything that ``submit`` would create, without secrets.

    A mixed allocation has ``parts``, each like an attempt on one offer: a Job with its ConfigMap. Owner
    references and the values of secrets are added when it is sent. *drivers* are the CSI drivers that the
    cluster has.

    Raises:
        SpecError: It requests something that no pod can have.
    """
    parts = render_parts(request, settings, drivers=drivers)
    if len(parts) == 1:
        return parts[0]
    return {"name": parts[0]["name"], "namespace": settings.namespace, "parts": parts}


def job_artefact(request: AttemptRequest, settings: Settings) -> Artefact:
    """``job.yaml`` of an attempt on one offer, with a comment on what is decided when it is sent.

    Raises:
        SpecError: It requests something that no pod can have.
    """
    (part,) = render_parts(request, settings)
    keys = ", ".join(part["secret_keys"])
    notes = [
        f"What `envscaler submit` sends for attempt {request.attempt} of {request.run_prefix}.",
        "submit also chooses the nodes, and makes the Job the owner of the other objects.",
        *([f"submit also creates the Secret {part['name']} with {keys}."] if keys else []),
        *_unreachable_store(request.store_url, settings),
    ]
    documents = [*part.get("claims", ()), part["config_map"], part["job"]]
    return Artefact("job.yaml", comment(notes) + yaml_text(*documents))


def _unreachable_store(store_url: str, settings: Settings) -> list[str]:
    """What to change where the run store is a folder that no pod has; empty where pods reach it."""
    path, mount = store_url.removeprefix("file://"), settings.store_mount.rstrip("/")
    if path == store_url or (settings.store_volume and f"{path}/".startswith(f"{mount}/")):
        return []
    return [
        f"Pods cannot reach the run store {store_url}: it is a folder of this machine. Set the volume that",
        f"has it (store_volume, mounted at {mount}) in --config, or name another one, such as",
        "ENVSCALER_STORE_URL=s3://bucket/path.",
    ]


def render_parts(
    request: AttemptRequest, settings: Settings, *, drivers: Collection[str] = ()
) -> list[dict[str, Any]]:
    """One Job with its ConfigMap for each offer of the allocation, in the order of nodes.

    Raises:
        SpecError: It requests something that no pod can have.
    """
    name = names.attempt_name(request)
    return [
        _render_part(_Attempt(request, settings, names.part_name(name, index), part, frozenset(drivers)))
        for index, part in enumerate(request.allocation.parts)
    ]


def _render_part(part: _Attempt) -> dict[str, Any]:
    request, settings, name = part.request, part.settings, part.name
    found = at.layout_of(
        request.launch,
        request.store_options,
        drivers=part.drivers,
        cache=settings.cache_path,
    )
    layout = json.dumps(found, sort_keys=True)
    if len(layout.encode()) > MAX_CONFIG_BYTES:
        raise SpecError(
            f"{request.run_label}: command and volumes take {len(layout.encode())} bytes, "
            f"a ConfigMap can have at most {MAX_CONFIG_BYTES}; put the long part into a file of the workdir"
        )
    metadata = {"name": name, "namespace": settings.namespace, "labels": names.labels_of(request)}
    return {
        "name": name,
        "namespace": settings.namespace,
        "job": part.job(),
        "config_map": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": {"layout.json": layout},
        },
        "secret_keys": part.own_secrets(),
    } | ({"claims": claims} if (claims := part.claims()) else {})


def secret_object(rendered: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any] | None:
    """The Secret of an attempt with its values; None when it needs none. Never rendered, only sent."""
    if not rendered["secret_keys"]:
        return None
    metadata = dict(rendered["config_map"]["metadata"])
    data = {name: values[name] for name in rendered["secret_keys"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": data,
    }


@dataclass(frozen=True, slots=True)
class _Attempt:
    request: AttemptRequest
    settings: Settings
    name: str
    part: AllocationPart
    drivers: frozenset[str]

    @property
    def offer(self) -> Offer:
        return self.part.offer

    @property
    def launch(self) -> Launch:
        return self.request.launch

    @property
    def need(self) -> Resources:
        return self.launch.need(self.offer)

    @property
    def grace_s(self) -> int:
        return grace_s(self.offer, self.request.grace_s, self.settings)

    @property
    def is_elastic(self) -> bool:
        """True when its number of nodes may change during the run."""
        return self.launch.max_nodes is not None and not self.request.allocation.is_mixed

    @property
    def most(self) -> int:
        """Most nodes that this Job may have."""
        return max(self.part.nodes, self.launch.max_nodes or 0) if self.is_elastic else self.part.nodes

    def job(self) -> dict[str, Any]:
        request, settings = self.request, self.settings
        nodes, first = self.part.nodes, self.part.first_rank
        labels = names.labels_of(request)
        job_labels = labels | ({names.QUEUE: settings.queue} if settings.queue else {})
        job_labels |= {names.FIRST_NODE: str(first)} if first else {}
        job_labels |= (
            {names.MAX_NODES: str(self.most), names.INITIAL_NODES: str(nodes)} if self.is_elastic else {}
        )
        template = self._template(labels)
        holds = any(names.RUN in claim["metadata"].get("labels", {}) for claim in self.claims())
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "suspend": True,  # until ConfigMap and Secret exist; with a Kueue queue, Kueue decides
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules(self.most, template["spec"])},
            "ttlSecondsAfterFinished": settings.ttl_s,
            "template": template,
        }
        spec |= (
            {"backoffLimit": 0} if self.most == 1 else {"backoffLimitPerIndex": 0, "backoffLimit": self.most}
        )
        asked_s = math.inf if request.deadline_s is None else request.deadline_s + UNBILLED_S
        spec["activeDeadlineSeconds"] = max(1, math.ceil(min(settings.longest_s, asked_s)))
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": self.name,
                "namespace": settings.namespace,
                "labels": {**job_labels, names.NODES: str(nodes)},
                "annotations": {
                    names.PREFIX: request.run_prefix,
                    names.STORE: request.store_url,
                    names.STAGE: request.run_label,
                }
                | ({names.DELETES_CLAIMS: "true"} if holds else {}),
            },
            "spec": spec,
        }

    @property
    def run(self) -> str:
        return names.run_hash(self.request.store_url, self.request.run_prefix)

    def claims(self) -> list[dict[str, Any]]:
        """Claims that are created with the attempt; those that remain have no owner."""
        labels = {name: value for name, value in names.labels_of(self.request).items() if name in _OF_RUN}
        found = at.claims_of(self.launch.paths.volumes, run=self.run, labels=labels)
        for claim in found:
            claim["metadata"]["namespace"] = self.settings.namespace
        return found

    def own_secrets(self) -> list[str]:
        """Variables with values in the attempt's Secret: all except those from the cluster's Secrets."""
        keys = {security.OF_STORE + name for name in self._store_keys()}
        return sorted((set(self.request.secret_env) - set(self._cluster_secrets())) | keys)

    def _store_keys(self) -> Mapping[str, str]:
        return security.store_keys(self.request.store_login, self.settings)

    def _cluster_secrets(self) -> dict[str, dict[str, Any]]:
        """``secret:NAME/key`` stays a reference: the owner never sees its value."""
        return {
            variable: {"name": reference.name, "key": reference.key}
            for variable, reference in self.launch.secrets.items()
            if reference.kind == "secret"
        }

    def _template(self, labels: Mapping[str, str]) -> dict[str, Any]:
        request, settings = self.request, self.settings
        cache = settings.cache_path
        mounts = at.mounts_of(self.launch.paths, run=self.run, drivers=self.drivers, cache=cache)
        self._add_shm(mounts)
        self._add_tmp(mounts)
        self._add_store(mounts)
        where = affinity(self.offer, settings)
        stand = placement(labels, request.allocation.nodes, settings)
        joint = ({"nodeAffinity": where} if where else {}) | stand.pop("affinity", {})
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,  # only the sidecar has a token, see security.py
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": self.grace_s,
            "tolerations": tolerations(self.offer, settings),
            "initContainers": [self._install(), self._sidecar(mounts)],
            "containers": [self._main(mounts)],
            "volumes": mounts.volumes,
            **stand,
        }
        spec |= {"affinity": joint} if joint else {}
        if request.deadline_s is not None:  # counts from the pod's arrival on its node, like its bill
            nearer_s = min(settings.longest_s, request.deadline_s)
            spec["activeDeadlineSeconds"] = max(1, math.ceil(nearer_s))
        spec |= {"nodeSelector": dict(settings.node_selector)} if settings.node_selector else {}
        spec |= {"serviceAccountName": settings.service_account} if settings.service_account else {}
        spec |= {"priorityClassName": settings.priority_class} if settings.priority_class else {}
        spec |= {"imagePullSecrets": secrets} if (secrets := self._pull_secrets()) else {}
        spec["securityContext"] = security.pod_security(settings.user)
        identity = security.own_identity((names.MAIN, INSTALL)) if settings.service_account else {}
        marks = {"annotations": marked} if (marked := {**identity, **mounts.annotations}) else {}
        pod = {"metadata": {"labels": dict(labels), **marks}, "spec": spec}
        return merge_pod(pod, settings.pod_override, keep_name=names.MAIN)

    def _pull_secrets(self) -> list[dict[str, str]]:
        found = [*self.settings.pull_secrets]
        login = self.launch.image_login
        found += [login.name] if login is not None and login.kind == "secret" else []
        return [{"name": name} for name in dict.fromkeys(found)]

    # -- containers

    def _main(self, mounts: at.Mounts) -> dict[str, Any]:
        settings = self.settings
        options = ["--grace", f"{_wrapper_grace(self.grace_s):g}", "--drain", f"{settings.drain_s:g}"]
        return {
            "name": names.MAIN,
            "image": self._image(),
            "command": ["python3", f"{at.AGENT}/pod_main.py"],
            "args": [*options, "--", *(escaped(word) for word in self.launch.command)],
            "env": self._env(),
            "resources": self._resources(),
            "volumeMounts": mounts.training,
            "securityContext": security.main_security(settings.user, read_only_root=settings.read_only_root),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    def _image(self) -> str:
        image = self.settings.image or self.launch.image
        if not image:
            raise SpecError(
                f"{self.request.run_label}: a pod needs an image, and none is named; write "
                "base: {image: python:3.11-slim}"
            )
        return image

    def _install(self) -> dict[str, Any]:
        home = {"name": at.SCRATCH, "mountPath": at.HOME, "subPath": "home"}
        return self._agent(INSTALL, ["-m", "envscaler_airflow.backends.kubernetes.install", at.HOME], [home])

    def _sidecar(self, mounts: at.Mounts) -> dict[str, Any]:
        own = {"first_node": self.part.first_rank} if self.part.first_rank else {}
        own |= {"max_nodes": self.most} if self.is_elastic else {}
        words = self.request.sidecar_options(at.SPOOL, f"{at.LAYOUT}/layout.json", **own)
        command = ["-m", "envscaler_airflow.backends.kubernetes.pod_sidecar", *map(escaped, words)]
        container = self._agent(SIDECAR, command, mounts.sidecar)
        container["restartPolicy"] = "Always"
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
        container["env"] = [*container["env"], address, uid]
        if self.settings.store_secret or self._store_keys():
            container["env"].append({"name": context.VARIABLE, "value": security.STORE_KEYS})
        return container

    def _agent(self, name: str, command: Sequence[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
        memory = f"{SIDECAR_MEMORY_BYTES // MIB}Mi"
        return {
            "name": name,
            "image": self.settings.sidecar_image,
            "command": ["python3", *command],
            "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108  # its root is read-only
            "resources": {"requests": {"cpu": f"{SIDECAR_CPUS * 1000:.0f}m", "memory": memory}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],  # noqa: S108  # same
            "securityContext": security.agent_security(self.settings.user, reads_training=name == SIDECAR),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    # -- environment

    def _env(self) -> list[dict[str, Any]]:
        request = self.request
        plain = {**self.launch.env, **request.env(spool=at.SPOOL, cpus=self._cpus())}
        found: list[dict[str, Any]] = [
            {"name": name, "value": escaped(value)} for name, value in sorted(plain.items())
        ]
        theirs = self._cluster_secrets()
        for name in sorted(request.secret_env):
            source = theirs.get(name, {"name": self.name, "key": name})
            found.append({"name": name, "valueFrom": {"secretKeyRef": source}})
        return found

    # -- resources

    def _cpus(self) -> float:
        need, whole = self.need, self.offer.vcpus
        asked, most = need.requests.cpu_cores, need.limits.cpu_cores
        if asked is not None:
            return asked
        return whole if most is None else min(whole, most)

    def _memory(self) -> tuple[int, int]:
        """``(request, limit)`` in bytes: the spec's, at most the offer's share, which is the default."""
        whole = int(self.offer.memory_gib * GIB)
        requested, most = self.need.requests.memory_bytes, self.need.limits.memory_bytes
        limit = default_limit_bytes(requested, whole) if most is None else min(most, whole)
        return limit if requested is None else min(requested, limit), limit

    def _resources(self) -> dict[str, Any]:
        need = self.need
        asked, most = self._memory()
        requests = {"cpu": f"{round(self._cpus() * 1000)}m", "memory": f"{asked // MIB}Mi"}
        limits = {"memory": f"{most // MIB}Mi"}
        if (cpu := need.limits.cpu_cores) is not None:
            limits["cpu"] = f"{round(cpu * 1000)}m"
        if need.disk_size:
            requests["ephemeral-storage"] = need.disk_size
        resource = gpu_resource(self.offer, self.settings)
        if resource is not None and need.requests.gpu_count:
            limits[resource] = str(self.offer.gpus)
        return {"requests": requests, "limits": limits}

    def _add_shm(self, mounts: at.Mounts) -> None:
        """``/dev/shm``: as requested; else half of the memory for GPUs or several nodes. Chosen."""
        asked = self.need.shm_bytes
        if asked is None and not self.offer.gpus and self.most == self.request.allocation.nodes == 1:
            return
        size = self._memory()[1] // 2 if asked is None else asked
        shared = {"medium": "Memory", "sizeLimit": f"{size // MIB}Mi"}
        mounts.volumes.append({"name": "shm", "emptyDir": shared})
        mounts.training.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  # a mount point

    def _add_tmp(self, mounts: at.Mounts) -> None:
        """``/tmp`` of the training where its root is read-only; the sidecar's is another one."""
        if self.settings.read_only_root:
            mounts.volumes.append({"name": "training-tmp", "emptyDir": {}})
            mounts.training.append({"name": "training-tmp", "mountPath": "/tmp"})  # noqa: S108  # a mount point

    def _add_store(self, mounts: at.Mounts) -> None:
        mounts.volumes.append({"name": "layout", "configMap": {"name": self.name}})
        mounts.sidecar.append({"name": "layout", "mountPath": at.LAYOUT, "readOnly": True})
        mounts.volumes.append({"name": "tmp", "emptyDir": {}})
        source = self.settings.store_volume
        if source:
            where = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else source
            mounts.volumes.append({"name": "store", **where})
            request = self.request
            read = security.read_uris(self.launch.paths.volumes, request.restore_from)
            folders = security.StoreFolders(
                self.settings.store_mount, request.store_url, request.run_prefix, read
            )
            mounts.sidecar += folders.mounts()
        self._add_credentials(mounts)

    def _add_credentials(self, mounts: at.Mounts) -> None:
        """What opens the store, for the sidecar only."""
        if self.settings.service_account:
            mounts.volumes.append(security.token_volume())
            mounts.sidecar.append({"name": "token", "mountPath": security.TOKEN, "readOnly": True})
        keys, secret = self._store_keys(), self.settings.store_secret
        if keys or secret:
            mounts.volumes.append(security.keys_volume(secret or self.name, keys))
            mounts.sidecar.append({"name": "store-keys", "mountPath": security.STORE_KEYS, "readOnly": True})


def escaped(text: str) -> str:
    """*text* with every ``$`` doubled, so that Kubernetes passes it on unchanged.

    Source: Kubernetes, define command and arguments: ``$(NAME)`` is expanded, ``$$`` becomes ``$``.
    """
    return text.replace("$", "$$")


def _failure_rules(nodes: int, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Disrupted pods are replaced; a node that stopped on request ends alone; other failures end the Job.

    That includes failures before the training: without a rule only that index would fail, and the others
    would wait.
    """
    ignored = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    if nodes == 1:
        ours = {"containerName": names.MAIN, "operator": "In", "values": list(EXIT_CODES.values())}
        return [ignored, {"action": "FailJob", "onExitCodes": ours}]
    went = {"containerName": names.MAIN, "operator": "In", "values": _ORDERLY}
    other = {"containerName": names.MAIN, "operator": "NotIn", "values": [0, *_ORDERLY]}
    before = [one.get("name") for one in pod["initContainers"] if one.get("restartPolicy") != "Always"]
    failed = ({"containerName": name, "operator": "NotIn", "values": [0]} for name in before if name)
    return [
        ignored,
        {"action": "FailIndex", "onExitCodes": went},
        *({"action": "FailJob", "onExitCodes": codes} for codes in (other, *failed)),
    ]


def _wrapper_grace(grace_s: float) -> float:
    """Seconds that the wrapper gives the command; the rest of the grace is for the last uploads."""
    return max(grace_s - 5.0, grace_s / 2)
