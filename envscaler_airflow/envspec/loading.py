"""Load a spec: read, compose, fill in parameters and inputs, apply the target, validate."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import PurePosixPath
from typing import Any

from envscaler_airflow.envspec import parameters as params
from envscaler_airflow.envspec.compose import Composition, Registry, gather, merge, prune
from envscaler_airflow.envspec.documents import Faults, Node, node_of
from envscaler_airflow.envspec.gpus import MEMORY_GB, is_share, nearest
from envscaler_airflow.envspec.models import UNHASHED_FIELDS, EnvSpec
from envscaler_airflow.envspec.secret_forms import has_secret_shape, has_userinfo
from envscaler_airflow.envspec.secrets import check_secrets
from envscaler_airflow.envspec.shortforms import normalise, split_commands
from envscaler_airflow.envspec.templates import Names, check_scripts, render
from envscaler_airflow.envspec.validation import validate

BACKENDS = "envscaler_airflow.backends"
"""Entry points of backends: the name of each is a target."""


def targets() -> tuple[str, ...]:
    """Targets that need no overlay in the spec, sorted."""
    return tuple(sorted({"docker", "vm", *(point.name for point in entry_points(group=BACKENDS))}))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A spec and the source of each of its values.

    Attributes:
        spec: The resolved spec.
        sources: Path of each value in the source to ``file:line``.
    """

    spec: EnvSpec
    sources: Mapping[str, str]


def load_spec(
    path: str | os.PathLike[str],
    *,
    parameters: Mapping[str, Any] | None = None,
    target: str | None = None,
    inputs: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> EnvSpec:
    """Load and resolve the spec in *path*.

    Args:
        path: The YAML or JSON document.
        parameters: Values that override the spec's defaults; text is parsed as the parameter's type.
        target: Target whose overlay to apply; None checks every target and returns the spec without an
            overlay.
        inputs: URI of each input. None if not known yet; ``{{ inputs.x }}`` is then left unchanged.
        registry: Finds the file of a ``registry://`` reference.

    Raises:
        SpecError: The spec has faults; the message has one per line, and ``faults`` has all of them.
    """
    return load_with_sources(
        path, parameters=parameters, target=target, inputs=inputs, registry=registry
    ).spec


def load_with_sources(
    path: str | os.PathLike[str],
    *,
    parameters: Mapping[str, Any] | None = None,
    target: str | None = None,
    inputs: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> Loaded:
    """Load a spec as :func:`load_spec` does, with the file and line of each value.

    Raises:
        SpecError: As :func:`load_spec`.
    """
    faults = Faults()
    composition = gather(path, faults, registry=registry)
    _check_inputs(inputs, faults)
    if not composition.documents:
        faults.raise_if_any()
    known = _known_targets(composition)
    if target is not None and target not in known and target not in targets():
        listed = ", ".join(sorted({*known, *targets()}))
        faults.add(str(path), 0, "targets", f"no target {target!r:.60}; write one of {listed}")
        faults.raise_if_any()
    resolver = _Resolver(composition, dict(parameters or {}), inputs)
    loaded = resolver.resolve(target, faults)
    for name in known if target is None else ():
        of_target = Faults()
        resolver.resolve(name, of_target)
        faults.extend(of_target.found)
    faults.raise_if_any()
    assert loaded is not None
    return loaded


def spec_hash(spec: EnvSpec) -> str:
    """64 hex digits over everything that affects the run: the resolved spec with parameters and inputs.

    The hash skips the description, the target's name, warnings, and the folders that paths are relative to.
    These do not affect the run, and a new version of a DAG bundle has other folders.
    """
    body = {key: value for key, value in spec.to_dict().items() if key not in UNHASHED_FIELDS}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_inputs(inputs: Mapping[str, str] | None, faults: Faults) -> None:
    for name, uri in (inputs or {}).items():
        if not isinstance(uri, str):
            text = f"got {type(uri).__name__}; hand over the URI of an output, as text"
            faults.add("inputs", 0, f"{name!s:.60}", text)
        elif has_userinfo(uri) or has_secret_shape(uri):
            faults.add(
                "inputs", 0, f"{name!s:.60}", "contains a secret; pass a URI without user and password"
            )


def _known_targets(composition: Composition) -> list[str]:
    names: dict[str, None] = {}
    for document in composition.documents:
        targets = document.get("targets")
        if targets is not None and targets.is_map:
            names |= dict.fromkeys(targets.value)
    return list(names)


class _Resolver:
    """Resolves the documents of one spec for one target after another."""

    def __init__(
        self, composition: Composition, given: dict[str, Any], inputs: Mapping[str, str] | None
    ) -> None:
        self.composition = composition
        self.given = given
        self.inputs = inputs

    def resolve(self, target: str | None, faults: Faults) -> Loaded | None:
        declared = self.declared_parameters(target, faults)
        values = params.resolve(declared, self.given, faults)
        names = Names(values, self.inputs, self.declared_inputs(faults))
        documents = []
        for document in self.composition.documents:
            written = split_commands(document.without("parameters", "inputs"), faults)
            check_scripts(written, declared, names, faults)
            documents.append(normalise(render(written, names, faults), faults))
        self.check_used(names, faults)
        tree = documents[0]
        for document in documents[1:]:
            tree = merge(tree, document)
        overlay = tree.get("targets")
        tree = tree.without("targets")
        chosen = overlay.get(target) if overlay is not None and target is not None else None
        if chosen is not None and chosen.is_map:
            tree = tree.with_value(merge(tree, chosen.without("parameters")).value)
        check_secrets(tree, faults)
        tree = _expand_alternatives(prune(_with_gpu_limit(tree)))
        resolved = {
            "parameters": {name: value for name, value in values.items() if value is not params.BROKEN},
            "inputs": dict(self.inputs or {}),
            "input_names": sorted(names.used_inputs),
            "base_dirs": self.base_dirs(tree),
            **({} if target is None else {"target": target}),
        }
        tree = _with_nodes(tree)
        spec = validate(tree, faults, resolved=resolved)
        return None if spec is None else Loaded(_complete(spec), _sources(tree))

    def check_used(self, names: Names, faults: Faults) -> None:
        """Report inputs that the spec does not use: otherwise a typo would go unnoticed."""
        taken = set(names.used_inputs) | (names.declared or frozenset())
        for name in sorted(set(self.inputs or {}) - taken):
            known = ", ".join(sorted(taken)) or "none"
            text = (
                f"the spec does not use this input (it uses: {known}); write {{{{ inputs.{name:.60} }}}} "
                "where it belongs, or leave it out"
            )
            faults.add("inputs", 0, f"{name!s:.60}", text)

    def declared_parameters(self, target: str | None, faults: Faults) -> dict[str, params.Parameter | None]:
        block: Node | None = None
        for document in self.composition.documents:
            overlay = document.get("targets")
            chosen = overlay.get(target) if overlay is not None and target is not None else None
            for node in (document.get("parameters"), chosen.get("parameters") if chosen else None):
                if node is not None:
                    block = node if block is None else merge(block, node)
        return params.declare(block, faults)

    def declared_inputs(self, faults: Faults) -> frozenset[str] | None:
        """Names under ``inputs``, a list or a map; None when the spec declares none."""
        names: set[str] | None = None
        for document in self.composition.documents:
            node = document.get("inputs")
            if node is None or node.value is None:
                continue
            listed = _listed_names(node)
            if listed is None:
                node.fault("is not a list of names; write inputs: [model]", faults)
                continue
            names = (names or set()) | set(listed)
            for name in sorted(set(listed) - set(self.inputs)) if self.inputs is not None else ():
                known = ", ".join(sorted(self.inputs or ())) or "none"
                missing = f"input {name!r:.60} is missing (known: {known})"
                text = f"{missing}; hand it over: inputs={{...}}, or --input"
                node.fault(text, faults)
        return None if names is None else frozenset(names)

    def base_dirs(self, tree: Node) -> dict[str, str]:
        found = {}
        workdir = tree.get("workdir")
        if workdir is not None:
            found["workdir"] = str(self.composition.folders.get(workdir.file, ""))
        runtimes = tree.get("runtimes")
        for index, runtime in enumerate(runtimes.value if runtimes is not None and runtimes.is_list else ()):
            requirements = runtime.get("requirements")
            if requirements is not None:
                folder = str(self.composition.folders.get(requirements.file, ""))
                found[f"runtimes[{index}].requirements"] = folder
        return found


def _listed_names(node: Node) -> list[str] | None:
    """Names in a list, or the keys of a map; None for anything else."""
    if node.is_map:
        return list(node.value)
    if node.is_list and all(isinstance(item.value, str) for item in node.value):
        return [item.value for item in node.value]
    return None


def _with_gpu_limit(tree: Node) -> Node:
    """Apply Kubernetes' GPU rule: a limit alone is also the request; deleting the request deletes it."""
    resources = tree.get("resources")
    limits = resources.get("limits") if resources is not None else None
    limit = limits.get("gpu") if limits is not None else None
    if resources is None or limits is None or limit is None or limit.value is None:
        return tree
    requests = resources.get("requests")
    asked = requests.get("gpu") if requests is not None else None  # nosec B113  # the resources of a spec
    count = asked.get("count") if asked is not None else None
    if asked is None:
        base = requests if requests is not None else node_of({}, resources, "requests")
        if not base.is_map:
            return tree
        resources = resources.with_value(
            {**resources.value, "requests": base.with_value({**base.value, "gpu": limit})}
        )
    elif asked.value is None or (count is not None and count.value == 0):
        resources = resources.with_value({**resources.value, "limits": limits.without("gpu")})
    return tree.with_value({**tree.value, "resources": resources})


def _expand_alternatives(tree: Node) -> Node:
    """Complete each entry of ``any_of`` and ``ordered`` with the fields next to it."""
    resources = tree.get("resources")
    if resources is None or not resources.is_map:
        return tree
    common = resources.without("any_of", "ordered")
    entries = dict(resources.value)
    for name in ("any_of", "ordered"):
        choices = entries.get(name)
        if choices is not None and choices.is_list:
            full = [prune(merge(common, item)) if item.is_map else item for item in choices.value]
            entries[name] = choices.with_value(full)
    return tree.with_value({**tree.value, "resources": resources.with_value(entries)})


def _with_nodes(tree: Node) -> Node:
    """Use ``distributed.node_count`` as ``num_nodes`` if that is absent."""
    distributed = tree.get("distributed")
    count = distributed.get("node_count") if distributed is not None else None
    if count is None or tree.get("num_nodes") is not None:
        return tree
    return tree.with_value({**tree.value, "num_nodes": count})


def _complete(spec: EnvSpec) -> EnvSpec:
    """Fill in fields that follow from others, and warn about contradictions."""
    update: dict[str, Any] = {"warnings": tuple(_warnings(spec))}
    if spec.scaling is not None:
        bounds = spec.node_bounds
        update["scaling"] = spec.scaling.model_copy(update={"min_nodes": bounds.min, "max_nodes": bounds.max})
    return spec.model_copy(update=update)


def _warnings(spec: EnvSpec) -> list[str]:
    found = []
    distributed = spec.distributed
    for need in spec.resources.alternatives:
        unknown = [
            name
            for name in (need.requests.gpu.type if need.requests.gpu else ())
            if name not in MEMORY_GB and not is_share(name)
        ]
        found += [f"resources: GPU {name} is not in the catalog{_hint(name)}" for name in unknown]
    if distributed is not None:
        nodes = distributed.node_count
        if nodes is not None and not spec.num_nodes.min <= nodes <= spec.num_nodes.max:
            found.append(f"distributed.node_count is {nodes}, num_nodes counts: {spec.num_nodes.min}")
        gpus = spec.resources.alternatives[0].requests.gpu_count
        if distributed.world_size is not None and gpus and spec.processes_per_node != gpus:
            found.append(
                f"distributed: {spec.processes_per_node} processes per node on {gpus} GPUs; "
                f"world_size {distributed.world_size} counts"
            )
    path = spec.checkpoint.path if spec.checkpoint is not None else None
    if path is not None and spec.node_bounds.max > 1 and not _is_on_shared_volume(spec, path):
        found.append(
            f"checkpoint.path: of {path} the files of node 0 alone are kept, unless the training has a "
            "Session: let rank 0 save everything, or put the path on a volume that all nodes share, such as "
            "nfs://"
        )
    return found


def _is_on_shared_volume(spec: EnvSpec, path: str) -> bool:
    """True when every node sees the same files below *path*."""
    return any(
        PurePosixPath(path).is_relative_to(volume.mount_path)
        and (volume.kind == "nfs" or (volume.kind == "pvc" and volume.access_mode == "ReadWriteMany"))
        for volume in spec.volumes
    )


def _hint(gpu: str) -> str:
    near = nearest(gpu)
    return "" if near is None else f"; write {near} if that was meant"


def _sources(tree: Node) -> dict[str, str]:
    found: dict[str, str] = {}
    _add_sources(tree, "", found)
    return found


def _add_sources(node: Node, path: str, found: dict[str, str]) -> None:
    at = replace(node, path=path)
    if node.is_map:
        for key, item in node.value.items():
            _add_sources(item, at.entry_path(key), found)
    elif node.is_list:
        for index, item in enumerate(node.value):
            _add_sources(item, at.entry_path(index), found)
    else:
        found[path] = f"{node.file}:{node.line}"
