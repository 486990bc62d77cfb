"""JSON Schema of a spec document, for editors, and the reference page: both written from the models."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from envscaler_airflow.envspec import fields as kinds
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


SCHEMA_FILE = "envspec.schema.json"
"""The shipped schema, beside this module."""

_HEAD = """\
# Fields of an environment spec

`envscaler schema --markdown` generates this page from the models; a test keeps it current. [spec.md](spec.md)
explains short forms, merge rules, parameters and references to secrets.

Editors complete and check `envscaler.yaml` with the shipped JSON Schema, which `envscaler schema` prints.
Store it beside the spec, and begin the spec with `# yaml-language-server: $schema=./envspec.schema.json`.

Every value may be a template, such as `"{{ parameters.gpu_count }}"`. `null` removes the value of an extended
spec.
"""

_COMPOSITION = f"""\
## Composition

Fields of a document that a resolved spec no longer has.

| field | type | meaning |
|---|---|---|
| `extends` | list of references | specs to merge this one over: `./base.yaml`, `registry://team/name@1.2` |
| `modules` | list of references | modules to merge over what the spec extends |
| `parameters` | map of name to parameter | `type` ({", ".join(TYPES)}), `default`, `minimum`, ... |
| `inputs` | list of names | inputs that the stage takes; `{{{{ inputs.model }}}}` is their URI |
| `targets` | map of target to overlay | what differs on `local`, `docker`, `kubernetes`, `vm` or another |
"""

_UNITS: tuple[tuple[Any, str, str], ...] = (
    (kinds.Cpu, "quantity", "cores"),
    (kinds.Memory, "quantity", "bytes"),
    (kinds.GpuMemory, "quantity", "GB, nominal"),
    (kinds.Duration, "duration", "time"),
    (kinds.Count, "integer", "number"),
    (kinds.Fraction, "number", "share, 0 to 1"),
    (kinds.AbsolutePath, "path", ""),
    (kinds.LocalPath, "path", ""),
    (kinds.WebUrl, "URL", ""),
)
"""Field types that have their own text in the reference: what to write, and its unit."""
_PLAIN = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
_MADE_UP = {"integer": "2", "number": "0.5", "boolean": "true"}

EXAMPLES_FILE = "field_examples.yaml"
"""Examples for fields whose type has no fitting example, beside this module."""


def schema_text() -> str:
    """The JSON Schema, as shipped."""
    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"


def reference_text() -> str:
    """The reference as Markdown: the document, then each part in the order of its first appearance."""
    document, *others = [_section(name, part) for name, part in _parts().items()]
    return "\n".join([_HEAD, document, _COMPOSITION, *others])


@cache
def _parts() -> dict[str, dict[str, Any]]:
    """JSON Schemas of the document and its parts, by model, as pydantic creates them from resolved specs."""
    document = EnvSpec.model_json_schema(mode="serialization")
    document["properties"] = {
        name: field for name, field in document["properties"].items() if name not in RESOLVED_FIELDS
    }
    known = {**document["$defs"], "EnvSpec": document}
    names = ["EnvSpec"]
    for name in names:
        found = re.findall(r'"#/\$defs/(\w+)"', json.dumps(known[name]["properties"]))
        names += [each for each in dict.fromkeys(found) if each not in names]
    return {name: known[name] for name in names}


def _section(model: str, part: dict[str, Any]) -> str:
    text = part["description"].replace("``", "`")
    if model == "EnvSpec":
        text = text.partition("\n")[0]
    lines = ["| field | type | unit | default | example |", "|---|---|---|---|---|"]
    for name, field in part["properties"].items():
        cells = (f"`{name}`", *_kind(field), _default(field), f"`{_example(f'{model}.{name}', field)}`")
        lines.append(f"| {' | '.join(cells)} |")
    title = "The document" if model == "EnvSpec" else model
    return f"## {title}\n\n{text}\n\n" + "\n".join(lines) + "\n"


def _present(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value that is not null."""
    return next((one for one in field.get("anyOf", ()) if one != {"type": "null"}), field)


@cache
def _units() -> list[tuple[dict[str, Any], str, str]]:
    return [(TypeAdapter(hint).json_schema(mode="serialization"), kind, unit) for hint, kind, unit in _UNITS]


def _kind(field: dict[str, Any]) -> tuple[str, str]:
    """What to write, and its unit."""
    field = _present(field)
    bare = {key: item for key, item in field.items() if key not in ("title", "default")}
    for schema, kind, unit in _units():
        if bare == schema:
            return kind, unit
    if "$ref" in field:
        return f"[{_model(field)}](#{_model(field).lower()})", ""
    if choices := _choices(field):
        return " / ".join(f"`{value}`" for value in choices), ""
    if inner := field.get("items") or field.get("additionalProperties"):
        kind, unit = _kind(inner)
        return f"{'list of' if 'items' in field else 'map of name to'} {kind}", unit
    return _PLAIN[field["type"]], ""


def _model(field: dict[str, Any]) -> str:
    return str(field["$ref"].rpartition("/")[2])


def _choices(field: dict[str, Any]) -> list[str]:
    return [field["const"]] if "const" in field else field.get("enum", [])


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if "$ref" in field:
        own = _parts()[_model(field)]["properties"]
        kept = {key: item for key, item in value.items() if item != own[key].get("default")}
        return f"`{_shown(kept)}`" if kept else "its own defaults"
    return "none" if value in (None, "", [], {}) else f"`{_shown(value)}`"


@cache
def _examples() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load(
        Path(__file__).with_name(EXAMPLES_FILE).read_text(encoding="utf-8")
    )
    return found


def _example(name: str, field: dict[str, Any]) -> str:
    """Example of the field *name* or of its type; otherwise the first choice or a plain value."""
    field = _present(field)
    if name in _examples() or "examples" in field:
        return _shown(_examples().get(name) or field["examples"][0])
    if "$ref" in field:
        model = _model(field)
        first, inner = next(iter(_parts()[model]["properties"].items()))
        return f"{{{first}: {_example(f'{model}.{first}', inner)}}}"
    if "items" in field:
        return f"[{_example('', field['items'])}]"
    return _choices(field)[0] if _choices(field) else _MADE_UP.get(field["type"], "")


def _shown(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value)).replace("|", "\\|")
