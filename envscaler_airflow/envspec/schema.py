"""JSON Schema of a spec document, for completion and validation of ``envscaler.yaml`` in editors."""

from __future__ import annotations

from typing import Any

from envscaler_airflow.envspec.models import RESOLVED_FIELDS, EnvSpec
from envscaler_airflow.envspec.parameters import TYPES

_TEMPLATE = {"type": "string", "pattern": r"\{\{"}
_SCALARS = frozenset({"integer", "number", "boolean"})
_ANYTHING: dict[str, Any] = {}
_SHORT_FORMS: dict[str, Any] = {
    "accelerators": {"description": "A100:8; a list is ordered, a map is any of."},
    "cpus": {"description": "4 or 4+."},
    "memory": {"type": "string", "description": "32Gi or 32Gi+."},
    "gpu": {"description": "A count, A100:8, 24GB, or the map that requests.gpu takes."},
    "infra": {"type": "string", "description": "cloud/region/zone."},
    "use_spot": {"type": "boolean", "description": "Short for capacity: spot."},
}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a spec, a module or an overlay; templates are allowed in every value."""
    schema = EnvSpec.model_json_schema(mode="validation", by_alias=True)
    for name in RESOLVED_FIELDS:
        schema["properties"].pop(name, None)
    overlay = {"type": "object", "description": "What differs on this target; null removes."}
    references = {"type": ["array", "string"], "items": {"type": "string"}}
    schema["properties"] |= {
        "extends": {
            **references,
            "description": "Specs below this one: files beside it, or registry://team/name@1.2.",
        },
        "modules": {**references, "description": "Modules that this spec uses."},
        "parameters": {"type": "object", "additionalProperties": _parameter()},
        "inputs": {"type": ["array", "object"], "description": "Names of inputs that the stage takes."},
        "targets": {"type": "object", "additionalProperties": overlay},
    }
    schema["$defs"]["Resources"]["properties"] |= _SHORT_FORMS
    for name in ("Every", "Hold", "NodeRange", "Gpu", "GpuLimit"):
        schema["$defs"][name] = {"anyOf": [schema["$defs"][name], {"type": ["string", "integer"]}]}
    for name, shorter in (("env", "object"), ("entrypoint", "string")):
        written = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [written, {"type": shorter}]}
    schema["required"] = ["version"]
    schema = _with_templates(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Environment spec of envscaler-airflow",
    }


def _parameter() -> dict[str, Any]:
    text = {"type": "string"}
    properties = {
        "type": {"enum": list(TYPES)},
        "default": _ANYTHING,
        "minimum": _ANYTHING,
        "maximum": _ANYTHING,
        "values": {"type": "array"},
        "required": {"type": "boolean"},
        "title": text,
        "description": text,
        "pattern": text,
    }
    return {
        "anyOf": [{"type": "object", "properties": properties}, {"type": ["string", "number", "boolean"]}]
    }


def _with_templates(node: Any) -> Any:
    """Allow a template and ``null`` (which deletes) for every scalar or choice."""
    if isinstance(node, list):
        return [_with_templates(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _with_templates(item) for key, item in node.items() if key not in ("examples", "default")}
    made |= {key: node[key] for key in ("examples", "default") if key in node}
    if "properties" in made:
        made["properties"] = {key: _or_template(item) for key, item in made["properties"].items()}
    return made


def _or_template(node: dict[str, Any]) -> dict[str, Any]:
    kind = node.get("type")
    if (isinstance(kind, str) and kind in _SCALARS) or "enum" in node or "const" in node:
        outer: dict[str, Any] = {
            key: node[key] for key in ("description", "title", "default", "examples") if key in node
        }
        inner = {key: item for key, item in node.items() if key not in outer}
        return {**outer, "anyOf": [inner, _TEMPLATE]}
    return node
