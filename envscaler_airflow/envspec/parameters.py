"""Typed parameters: their definitions, their values, and the form that Airflow shows for them.

This module imports neither pydantic nor Jinja2, because DAG files call it.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.envspec import patterns
from envscaler_airflow.envspec.compose import Registry, gather, merge
from envscaler_airflow.envspec.documents import Faults, Node
from envscaler_airflow.envspec.quantities import cpu_cores, duration_s, memory_bytes
from envscaler_airflow.envspec.secret_forms import (
    has_secret_shape,
    has_userinfo,
    is_secret_name,
)
from envscaler_airflow.envspec.secrets import REFERENCE_FORMS, check_secrets

TYPES = ("integer", "number", "string", "boolean", "enum", "duration", "quantity")
MAX_TEXT = 4096
"""Longest text value, characters. Chosen: a command line."""
MAX_NUMBER = 1e15
"""Larger numbers lose precision as JSON doubles."""

BROKEN: Any = object()
"""Value of an invalid parameter: expressions that use it are not checked further."""

_FIELDS = (
    "type", "default", "minimum", "maximum", "exclusive_minimum", "exclusive_maximum",
    "values", "required", "title", "description", "pattern",
)  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusive_minimum", "exclusive_maximum")
_SYNONYMS = {
    "enum": "values",
    "choices": "values",
    "min": "minimum",
    "max": "maximum",
    "exclusiveMinimum": "exclusive_minimum",
    "exclusiveMaximum": "exclusive_maximum",
    "help": "description",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}\Z")
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"
_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared parameter.

    Attributes:
        name: Name in templates.
        type: One of :data:`TYPES`.
        default: Default value; None if a value is required.
        minimum, maximum: Bounds of numbers, durations and quantities, as written; None if unbounded.
        exclusive_minimum, exclusive_maximum: The same, but the bound itself is not allowed.
        values: The allowed values of an enum.
        title, description: Shown in the form.
        pattern: Regular expression (RE2) that a string must match completely; None if absent.
        node: Node of the declaration.
    """

    name: str
    type: str
    node: Node
    default: Any = None
    minimum: Any = None
    maximum: Any = None
    exclusive_minimum: Any = None
    exclusive_maximum: Any = None
    values: tuple[Any, ...] = ()
    title: str | None = None
    description: str | None = None
    pattern: str | None = None

    def read(self, value: Any) -> Any:
        """Convert *value* (or its text, from ``--set``) to this parameter's type.

        Raises:
            ValueError: The type is wrong or the value is out of bounds; says what to write.
        """
        found = _READERS[self.type](self, value)
        self._check_bounds(found, value)
        return found

    def _check_bounds(self, found: Any, value: Any) -> None:
        size = None
        for name, (outside, words) in _OUTSIDE.items():
            bound = getattr(self, name)
            if bound is None:
                continue
            size = _size(self.type, found) if size is None else size
            if outside(size, _size(self.type, bound)):
                raise ValueError(f"{value!r:.60} is out of bounds; write {words} {bound}")

    def to_json_schema(self) -> dict[str, Any]:
        """JSON schema of the parameter with its default, as Airflow's ``Param`` accepts it."""
        schema: dict[str, Any] = {"type": _SCHEMA_TYPES[self.type]}
        if self.type == "enum":
            schema = {"enum": list(self.values)}
            kinds = {_json_type(item) for item in self.values}
            if len(kinds) == 1:
                schema["type"] = kinds.pop()
        if self.type in ("integer", "number"):
            schema |= {_camel(name): bound for name in _BOUNDS if (bound := getattr(self, name)) is not None}
        pattern = {"duration": _DURATION_PATTERN, "quantity": _QUANTITY_PATTERN}.get(self.type)
        if self.type == "string" and self.pattern is not None:
            pattern = f"^(?:{self.pattern})$" if patterns.is_safe_elsewhere(self.pattern) else None
            schema["maxLength"] = MAX_TEXT
        schema |= {"pattern": pattern} if pattern else {}
        schema |= {"title": self.title} if self.title else {}
        schema |= {"description": self.description} if self.description else {}
        return schema if self.default is None else {"default": self.default, **schema}


_OUTSIDE: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "minimum": (operator.lt, "at least"),
    "maximum": (operator.gt, "at most"),
    "exclusive_minimum": (operator.le, "more than"),
    "exclusive_maximum": (operator.ge, "less than"),
}


def _camel(name: str) -> str:
    first, _, second = name.partition("_")
    return first + second.capitalize()


def declare(root: Node | None, faults: Faults) -> dict[str, Parameter | None]:
    """Read the ``parameters`` block; *root* is None if there is none. An invalid parameter is None."""
    if root is None or root.value is None:
        return {}
    if not root.is_map:
        root.fault("got no map; write parameters: {gpu_count: {type: integer}}", faults)
        return {}
    check_secrets(root, faults)
    declared: dict[str, Parameter | None] = {}
    for name, node in root.value.items():
        if node.value is not None or node.is_broken:
            declared[name] = _declare_one(name, node, faults)
    return declared


def _declare_one(name: str, node: Node, faults: Faults) -> Parameter | None:
    def fault(text: str, at: Node = node) -> None:
        at.fault(text, faults)

    if not _NAME.match(name):
        fault(f"{name!r:.60} is not a valid parameter name; write letters, digits and _, such as gpu_count")
        return None
    if is_secret_name(name):
        fault(f"a parameter is stored and shown, a secret must not be; write value_from: {REFERENCE_FORMS}")
        return None
    if not node.is_map:
        node = node.with_value({"default": node})
    body = {_SYNONYMS.get(key, key): item for key, item in node.value.items()}
    if not _check_fields(body, fault):
        return None
    return _build(name, node, {key: item for key, item in body.items() if item.value is not None}, fault)


def _check_fields(body: dict[str, Node], fault: Callable[..., None]) -> bool:
    is_good = True
    for key, item in body.items():
        texts = [below.value for below in item.walk() if isinstance(below.value, str)]
        if any(below.is_broken for below in item.walk()):
            is_good = False
        elif key not in _FIELDS:
            fault(_unknown(key, item), item)
            is_good = False
        elif any("{{" in text for text in texts):
            fault("a template in a parameter's declaration; write the value itself", item)
            is_good = False
    return is_good


def _unknown(key: str, item: Node) -> str:
    if item.value is None and " " in key:
        return (
            "unknown field; if it belongs to the text before it, quote that text: a comma in braces ends it"
        )
    near = difflib.get_close_matches(key, _FIELDS, n=1)
    return f"unknown field; write {near[0]}" if near else f"unknown field; write one of {', '.join(_FIELDS)}"


def _build(name: str, node: Node, body: dict[str, Node], fault: Callable[..., None]) -> Parameter | None:
    plain = {key: item.plain() for key, item in body.items()}
    kind = plain.get("type", _inferred_type(plain))
    if "values" in plain and kind in ("integer", "number", "string", "boolean"):
        kind = "enum"
    if kind not in TYPES:
        fault(f"{kind!r:.60} is not a type; write one of {', '.join(TYPES)}", body["type"])
        return None
    for key in ("title", "description", "pattern"):
        if key in plain and not isinstance(plain[key], str):
            fault("is not a string; write it in quotes", body[key])
            return None
    if not _check_definition(kind, plain, body, fault):
        return None
    values = tuple(plain["values"]) if kind == "enum" else ()
    draft = Parameter(
        name, kind, node,
        **{name: plain.get(name) for name in _BOUNDS}, values=values,
        title=plain.get("title"), description=plain.get("description"), pattern=plain.get("pattern"),
    )  # fmt: skip
    if "default" not in plain or plain.get("required") is True:
        return draft
    try:
        default = draft.read(plain["default"])
    except ValueError as err:
        fault(f"default: {err}", body["default"])
        return None
    return replace(draft, default=default)


def _check_definition(
    kind: str, plain: dict[str, Any], body: dict[str, Node], fault: Callable[..., None]
) -> bool:
    if kind == "enum":
        values = plain.get("values")
        scalars = (
            isinstance(values, list)
            and values
            and all(isinstance(item, (str, int, float)) for item in values)
        )
        if not scalars:
            fault(
                "an enum without values; write values: [small, large]", body.get("values", body.get("type"))
            )
            return False
    for key in _BOUNDS:
        if key not in plain:
            continue
        if kind in ("string", "boolean", "enum"):
            fault(f"a {kind} has no {key}; leave it out", body[key])
            return False
        try:
            _READERS[kind](None, plain[key])
        except ValueError as err:
            fault(str(err), body[key])
            return False
    if (
        "minimum" in plain
        and "maximum" in plain
        and _size(kind, plain["minimum"]) > _size(kind, plain["maximum"])
    ):
        fault(
            f"minimum {plain['minimum']} is above maximum {plain['maximum']}; write them in order",
            body["minimum"],
        )
        return False
    if "required" in plain and not isinstance(plain["required"], bool):
        fault("is not a boolean; write required: true", body["required"])
        return False
    return _check_pattern(kind, plain, body, fault)


def _check_pattern(
    kind: str, plain: dict[str, Any], body: dict[str, Node], fault: Callable[..., None]
) -> bool:
    if "pattern" not in plain:
        return True
    if kind != "string":
        fault(f"a {kind} has no pattern; leave it out", body["pattern"])
        return False
    try:
        patterns.compiled(plain["pattern"])
    except ValueError as err:
        fault(str(err), body["pattern"])
        return False
    return True


def _inferred_type(plain: Mapping[str, Any]) -> str:
    if "values" in plain:
        return "enum"
    default = plain.get("default")
    return _json_type(default) if isinstance(default, (str, int, float)) else "string"


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "integer" if isinstance(value, int) else "number" if isinstance(value, float) else "string"


def resolve(
    declared: Mapping[str, Parameter | None], given: Mapping[str, Any], faults: Faults
) -> dict[str, Any]:
    """Return the values of all parameters; *given* values override defaults; None means the default.

    An invalid parameter is :data:`BROKEN`, so that its uses do not report a second fault.
    """
    for name in given:
        if name not in declared:
            faults.add("parameters", 0, f"{name!s:.60}", _undeclared(str(name), declared))
    return {
        name: BROKEN if parameter is None else _value(parameter, given.get(name), faults)
        for name, parameter in declared.items()
    }


def _undeclared(name: str, declared: Mapping[str, Parameter | None]) -> str:
    near = difflib.get_close_matches(name, declared, n=1)
    if near:
        return f"is not declared by the spec; write {near[0]}"
    return f"is not declared by the spec; write one of {', '.join(declared) or '(it declares none)'}"


def _value(parameter: Parameter, given: Any, faults: Faults) -> Any:
    if given is None and parameter.default is not None:
        return parameter.default
    node = parameter.node
    if given is None:
        text = f"has no value and no default; give one: --set {parameter.name}=..., or parameters={{...}}"
        node.fault(text, faults)
        return BROKEN
    if isinstance(given, str) and (has_secret_shape(given) or has_userinfo(given)):
        text = f"the value given looks like a secret; write value_from: {REFERENCE_FORMS} in the spec"
        node.fault(text, faults)
        return BROKEN
    try:
        return parameter.read(given)
    except ValueError as err:
        node.fault(str(err), faults)
        return BROKEN


def _read_integer(_: Parameter | None, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,15}", value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_NUMBER:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.60} is not a whole number; write one such as 4")  # noqa: TRY004 (one kind for all)
    if abs(value) >= MAX_NUMBER:
        raise ValueError("is too large a number; write at most 15 digits")
    return value


def _read_number(_: Parameter | None, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value[:100])
        except ValueError:
            raise ValueError(f"{value!r:.60} is not a number; write one such as 0.1") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r:.60} is not a number; write one such as 0.1")  # noqa: TRY004 (one kind for all)
    if not abs(value) < MAX_NUMBER:  # also NaN
        raise ValueError("is not a finite number below 1e15; write one such as 0.1")
    return value


def _read_string(parameter: Parameter | None, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r:.60} is not a string; write it in quotes")  # noqa: TRY004 (one kind for all)
    text = value if isinstance(value, str) else f"{value!r:.60}"
    if len(text) > MAX_TEXT or "\0" in text or not _is_utf8(text):
        raise ValueError(f"is not a string of at most {MAX_TEXT} characters; write plain text")
    if parameter is not None and parameter.pattern and not patterns.matches(parameter.pattern, text):
        raise ValueError(f"{text!r:.60} does not match {parameter.pattern}; write text that does")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_boolean(_: Parameter | None, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{value!r:.60} is not a boolean; write true or false")


def _read_enum(parameter: Parameter | None, value: Any) -> Any:
    values = parameter.values if parameter is not None else ()
    for item in values:
        if type(item) is type(value) and item == value:
            return item
    for item in values:
        if isinstance(value, (str, int, float)) and _said(item) == _said(value):
            return item
    listed = ", ".join(_said(item) for item in values)
    raise ValueError(f"{value!r:.60} is not one of the values; write one of {listed:.300}")


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value!s:.100}"


def _read_duration(_: Parameter | None, value: Any) -> str:
    duration_s(value)
    return str(value)


def _read_quantity(_: Parameter | None, value: Any) -> Any:
    _quantity_size(value)
    return value


def _quantity_size(value: Any) -> float:
    """A cpu quantity if it has no unit or ``m``, otherwise memory."""
    text = str(value)
    is_cpu = not isinstance(value, str) or text.endswith("m") or text[-1:].isdigit()
    return cpu_cores(value) if is_cpu else float(memory_bytes(value))


def _size(kind: str, value: Any) -> float:
    if kind == "duration":
        return duration_s(value)
    return _quantity_size(value) if kind == "quantity" else float(value)


_READERS: dict[str, Callable[[Parameter | None, Any], Any]] = {
    "integer": _read_integer,
    "number": _read_number,
    "string": _read_string,
    "boolean": _read_boolean,
    "enum": _read_enum,
    "duration": _read_duration,
    "quantity": _read_quantity,
}
_SCHEMA_TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "string",
    "boolean": "boolean",
    "enum": "string",
    "duration": "string",
    "quantity": "string",
}


def spec_params(
    path: str | os.PathLike[str], *, registry: Registry | None = None
) -> dict[str, dict[str, Any]]:
    """Return each parameter of the spec in *path* as a JSON schema; a required one has no ``default``.

    Raises:
        SpecError: The spec cannot be read, or its parameters are invalid.
    """
    faults = Faults()
    block: Node | None = None
    for document in gather(path, faults, registry=registry).documents:
        node = document.get("parameters")
        if node is not None:
            block = node if block is None else merge(block, node)
    declared = declare(block, faults)
    faults.raise_if_any()
    return {name: parameter.to_json_schema() for name, parameter in declared.items() if parameter is not None}
