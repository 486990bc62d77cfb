"""Convert a tree of nodes, or plain JSON, to an EnvSpec; pydantic's errors become faults with places."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from envscaler_airflow.envspec.documents import MAX_DEPTH, Faults, Node, node_of
from envscaler_airflow.envspec.models import RESOLVED_FIELDS, EnvSpec
from envscaler_airflow.envspec.secret_forms import looks_secret
from envscaler_airflow.errors import SpecError

_FOREIGN = {
    "command": "entrypoint",
    "args": "entrypoint",
    "run": "entrypoint",
    "cmd": "entrypoint",
    "envs": "env",
    "environment": "env",
    "image": "base: {image: ...}",
    "docker": "base: {image: ...}",
    "nodes": "num_nodes",
    "replicas": "num_nodes",
    "gpus": "gpu: {count: ...}",
    "nvidia.com/gpu": "gpu: {count: ...}",
    "packages": "system_packages, or packages of a runtime",
    "pip": "runtimes: [{type: python, packages: [...]}]",
    "file_mounts": "volumes",
    "mounts": "volumes",
    "mountPath": "mount_path",
    "accessMode": "access_mode",
    "valueFrom": "value_from",
    "working_dir": "workdir",
    "interval": "every",
    "policies": "policy",
}
"""Names that other tools use for our fields."""
_HIDDEN = "a hidden value"
_DOCUMENT_FIELDS = ("extends", "modules", "parameters", "targets", "inputs")
_SHORT_FORMS = ("accelerators", "cpus", "memory", "gpu", "infra", "use_spot")


def validate(tree: Node, faults: Faults, *, resolved: Mapping[str, Any]) -> EnvSpec | None:
    """Validate *tree* with the *resolved* fields; None if it has faults."""
    for name in RESOLVED_FIELDS:
        item = tree.get(name)
        if item is not None and name not in _DOCUMENT_FIELDS:
            item.fault(_unknown_field(name, [], is_document=True), faults)
    body = {**tree.plain(), **resolved}
    try:
        return EnvSpec.model_validate(body)
    except ValidationError as err:
        for error in err.errors(include_url=False):
            _note(error, tree, faults)
    except RecursionError:
        faults.add(tree.file, tree.line, "", "is nested too deeply; write it flatter")
    return None


def from_dict(body: Mapping[str, Any]) -> EnvSpec:
    """Read a frozen spec; unknown fields are ignored.

    Raises:
        SpecError: The spec has faults; reports all of them.
    """
    _check_plain(body, 0)
    tree = node_of(dict(body), Node(None))
    faults = Faults()
    for _ in range(MAX_DEPTH):
        try:
            return EnvSpec.model_validate(tree.plain())
        except ValidationError as err:
            errors = err.errors(include_url=False)
        unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
        if not unknown:
            break
        for location in unknown:
            holder, _rest = _find(tree, list(location[:-1]))
            holder.value.pop(location[-1], None)
    for error in errors:
        _note(error, tree, faults, is_document=False)
    faults.raise_if_any()
    raise SpecError("spec: cannot be read; rewrite the spec")


def _check_plain(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH * 2:
        raise SpecError(f"spec: nested deeper than {MAX_DEPTH * 2}; write it flatter")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise SpecError(f"spec: key {ascii(key)[:60]} is not a string; write a name")
            _check_plain(item, depth + 1)
    elif depth == 0:
        raise SpecError(f"spec: got {type(value).__name__}; write a map that begins with version: v1")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, depth + 1)


def _note(error: Any, tree: Node, faults: Faults, *, is_document: bool = True) -> None:
    location = [part for part in error["loc"] if part != "[key]"]
    context = error.get("ctx", {})
    location += _parts(context.get("at", "")) if error["type"] == "spec" else []
    node, rest = _find(tree, location)
    if _is_in_broken(tree, location) or any(item.is_broken for item in ([] if rest else node.walk())):
        return
    path = node.path
    for part in rest:
        path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}" if path else str(part)
    name = str(location[-1]) if location else ""
    text = _explain(error, node if not rest else None, location, is_document=is_document)
    if rest and error["type"] != "missing" and name in RESOLVED_FIELDS:
        path = name
    faults.add(node.file, node.line, path, text)


def _parts(at: str) -> list[str | int]:
    words = [word for word in at.replace("[", ".[").split(".") if word]
    return [int(word[1:-1]) if word.startswith("[") else word for word in words]


def _find(tree: Node, location: list[Any]) -> tuple[Node, list[Any]]:
    """Deepest existing node of *location*, and the absent parts below it."""
    node = tree
    for index, part in enumerate(location):
        below = node.get(part) if isinstance(part, str) else None
        if isinstance(part, int) and node.is_list and part < len(node.value):
            below = node.value[part]
        if below is None:
            return node, location[index:]
        node = below
    return node, []


def _is_in_broken(tree: Node, location: list[Any]) -> bool:
    return any(_find(tree, location[:length])[0].is_broken for length in range(len(location) + 1))


def _explain(error: Any, node: Node | None, location: list[Any], *, is_document: bool) -> str:
    kind, context = error["type"], error.get("ctx", {})
    name = str(location[-1]) if location else ""
    got = _shown(error["input"], name, node)
    if kind == "spec":
        return str(context["text"])
    if kind == "value_error":
        return _hidden_if_secret(str(context["error"]), error["input"], name)
    if kind == "extra_forbidden":
        return _unknown_field(name, location[:-1], is_document=is_document)
    example = _example(location)
    if kind == "missing":
        return f"is missing; write {name}: {example or '...'}"
    if kind == "string_type" and isinstance(error["input"], (bool, int, float)):
        raw = node.raw if node is not None and node.raw is not None else str(error["input"])
        raw = "..." if got == _HIDDEN else raw
        return f'got {got}, which is not a string; write it in quotes: "{raw:.60}"'
    if kind == "literal_error":
        return f"{got} is not known here; write {str(context['expected']).replace(' or ', ', ')}"
    wanted = _wanted(kind, context)
    fits = bool(example) and (wanted not in ("write a list", "write a map") or example[0] in "[{")
    if not fits and wanted == "write a map":
        is_top = all(isinstance(part, int) for part in location[1:])
        example = _MAPS.get(str(location[0]), "") if is_top else ""
        fits = bool(example)
    return f"got {got}; {wanted}" + (f", such as {example}" if fits else "")


_MAPS = {
    "env": '{name: EPOCHS, value: "3"}',
    "outputs": "{model: /output/model}",
    "parameters": "{epochs: {type: integer, default: 3}}",
    "runtimes": '{type: python, version: "3.11", requirements: requirements.txt}',
    "volumes": "{name: data, source: s3://bucket/data, mount_path: /data}",
    "resources": "{requests: {cpu: 1, memory: 1Gi}}",
    "checkpoint": "{path: /output/checkpoints, every: 10m}",
    "scaling": "{policy: cost-to-finish}",
    "base": '{image: "python:3.11-slim"}',
}
"""Examples of fields that are maps, for users who wrote another type."""


def _wanted(kind: str, context: Mapping[str, Any]) -> str:
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    for key, words in bounds.items():
        if key in context:
            return f"write {words} {context[key]}"
    if "max_length" in context:
        return f"write at most {context['max_length']} entries or characters"
    if "min_length" in context:
        return "write at least one character or entry"
    wanted = {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "string": "text",
        "tuple": "a list",
        "list": "a list",
        "dict": "a map",
        "mapping": "a map",
        "model": "a map",
    }
    return "write " + next(
        (words for start, words in wanted.items() if kind.startswith(start)), "what it takes"
    )


def _unknown_field(name: str, above: list[Any], *, is_document: bool) -> str:
    model = _model_at(above)
    known = [] if model is None else [field.alias or key for key, field in model.model_fields.items()]
    if not above and is_document:
        known = [key for key in known if key not in RESOLVED_FIELDS] + list(_DOCUMENT_FIELDS)
    if above == ["resources"]:
        known += _SHORT_FORMS
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return f"unknown field; write {near[0]}"
    if name in _FOREIGN:
        return f"unknown field; write {_FOREIGN[name]}"
    return f"unknown field; write one of {', '.join(known)}"


def _shown(value: Any, name: str, node: Node | None) -> str:
    if looks_secret(name, value):
        return _HIDDEN
    if isinstance(value, (dict, BaseModel)):
        return "a map"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, (bool, int, float)):
        return (
            node.raw if node is not None and node.raw is not None and len(node.raw) < 60 else f"{value!r:.60}"
        )
    return f"{value!r:.60}"


def _hidden_if_secret(text: str, value: Any, name: str) -> str:
    if isinstance(value, str) and len(value) > 3 and looks_secret(name, value):
        return text.replace(repr(value), _HIDDEN).replace(value, _HIDDEN)
    return text


def _example(location: list[Any]) -> str:
    """An example of the field at *location*, in YAML's flow style; ``""`` when there is none."""
    model = _model_at(location[:-1])
    field = model.model_fields.get(str(location[-1])) if model is not None and location else None
    if field is None:
        return ""
    examples = list(field.examples or [])
    for part in (field.annotation, *field.metadata):
        examples += getattr(part, "examples", None) or []
    for item in _annotated_metadata(field.annotation):
        examples += getattr(item, "examples", None) or []
    return "" if not examples else examples[0] if isinstance(examples[0], str) else json.dumps(examples[0])


def _annotated_metadata(hint: Any) -> list[Any]:
    found: list[Any] = []
    for part in typing.get_args(hint):
        found.extend(getattr(part, "__metadata__", ()))
    return found


def _model_at(location: list[Any]) -> type[BaseModel] | None:
    """The model that contains the fields at *location*."""
    hint: Any = EnvSpec
    for part in location:
        if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
            return None
        if isinstance(part, int):
            continue
        field = hint.model_fields.get(str(part))
        if field is None:
            return None
        hint = _innermost_model(field.annotation)
    return hint if isinstance(hint, type) and issubclass(hint, BaseModel) else None


def _innermost_model(hint: Any) -> Any:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, BaseModel):
        return hint
    for part in typing.get_args(hint):
        found = _innermost_model(part)
        if found is not None:
            return found
    return None
