"""Secrets only by reference: what looks like a literal one is a fault, and references are read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from envscaler_airflow.spec.faults import Faults
from envscaler_airflow.spec.literals import has_secret_shape, has_userinfo, is_literal, is_secret_name
from envscaler_airflow.spec.yaml import Node

ReferenceKind = Literal["secret", "env", "connection", "variable"]

REFERENCE_FORMS = "secret:NAME/key, env:NAME, connection:ID/field or variable:NAME"

_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?\Z", re.DOTALL)
_ASSIGNED = re.compile(r"(?:\b([A-Z][A-Z0-9_]*)|[?&]([A-Za-z_]+))=(\S+)")
"""``NAME=value`` of a shell and ``?name=value`` of a URL; not ``token=f(x)`` of a program."""
_SAFE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_REFERENCE = re.compile(
    rf"(secret|env|connection|variable):({_SAFE}|_[A-Za-z0-9_]{{0,252}})(?:/({_SAFE}))?\Z"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a secret is taken from, never the secret.

    Attributes:
        kind: ``secret`` (Kubernetes), ``env`` (of the worker), ``connection`` or ``variable`` (Airflow).
        name: Name of the secret, variable or connection.
        key: Key within a secret, or field of a connection; None otherwise.
    """

    kind: ReferenceKind
    name: str
    key: str | None = None

    def __str__(self) -> str:
        """``secret:wandb/api-key``."""
        return f"{self.kind}:{self.name}" + (f"/{self.key}" if self.key else "")


def parse_reference(text: str, *, variable: str | None = None) -> Reference:
    """Read ``secret:NAME/key``, ``env:NAME``, ``connection:ID/field`` or ``variable:NAME``.

    ``secret:NAME`` without a key takes *variable* in lower kebab case less the words that it shares
    with NAME: WANDB_API_KEY of wandb-secret is ``api-key``.

    Raises:
        ValueError: Another form; the text is not repeated, it may be a secret.
    """
    match = _REFERENCE.match(text)
    if match is None:
        raise ValueError(f"is no reference; write {REFERENCE_FORMS}")
    kind, name, key = match[1], match[2], match[3]
    if kind == "connection" and key is None:
        raise ValueError(f"names a connection without a field; write connection:{name}/password")
    if kind in ("env", "variable") and key is not None:
        raise ValueError(f"has a key after {kind}:{name}; write {kind}:{name}")
    if kind == "secret" and key is None and variable is not None:
        key = secret_key(variable, name)
    return Reference(kind, name, key)  # type: ignore[arg-type]  # the pattern admits the four kinds only


def secret_key(variable: str, secret: str) -> str:
    """Key of *secret* that *variable* takes when none is named: ``api-key`` of wandb for WANDB_API_KEY."""
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", variable) if word]
    shared = set(re.split(r"[^a-z0-9]+", secret.lower()))
    kept = list(words)
    while kept and kept[0] in shared:
        kept.pop(0)
    return "-".join(kept or words) or "value"


def check_secrets(root: Node, faults: Faults) -> None:
    """Note a fault for every literal that looks like a secret; its text is in no message."""
    for node in root.walk():
        if isinstance(node.value, str):
            _check_text(node, faults)
        elif node.is_map:
            _check_map(node, faults)
        elif node.is_list:
            _check_arguments(node, faults)


def _check_text(node: Node, faults: Faults) -> None:
    assigned = _ASSIGNED.findall(node.value)
    if has_secret_shape(node.value):
        _fault(
            node, f"holds what looks like a secret; write a reference: value_from: {REFERENCE_FORMS}", faults
        )
    elif has_userinfo(node.value):
        fix = "leave user and password out and write credentials: or value_from: connection:ID/password"
        _fault(node, f"is a URL with a user or password; {fix}", faults)
    elif any(is_secret_name(upper or query) and is_literal(value) for upper, query, value in assigned):
        _fault(
            node, f"sets a secret by a literal; write an env entry with value_from: {REFERENCE_FORMS}", faults
        )


def _check_map(node: Node, faults: Faults) -> None:
    name, value = node.get("name"), node.get("value")
    if name is not None and value is not None and is_secret_name(str(name.value)) and is_literal(value.value):
        reference = f"secret:NAME/{secret_key(str(name.value), '')}"
        fix = f"value_from: {reference} (or env:NAME, connection:ID/field, variable:NAME)"
        _fault(value, f"a literal under the secret's name {name.value!r:.60}; write {fix}", faults)
    for key, item in node.value.items():
        if key in ("credentials", "value_from") or item.is_map or item.is_list:
            continue
        if is_secret_name(key) and is_literal(item.value):
            _fault(item, f"a literal under a secret's name; write value_from: {REFERENCE_FORMS}", faults)


def _check_arguments(node: Node, faults: Faults) -> None:
    """``--api-key abc`` and ``--api-key=abc`` in a list of arguments."""
    for index, item in enumerate(node.value):
        match = _FLAG.match(item.value) if isinstance(item.value, str) else None
        if match is None or not is_secret_name(match[1]):
            continue
        literal = match[2]
        if literal is None and index + 1 < len(node.value):
            literal = node.value[index + 1].value
            if isinstance(literal, str) and literal.startswith("-"):
                continue
        if is_literal(literal):
            fix = f"write an env entry with value_from: {REFERENCE_FORMS}, and let the program read it"
            _fault(item, f"gives a secret as an argument; {fix}", faults)


def _fault(node: Node, text: str, faults: Faults) -> None:
    if not node.is_broken:
        faults.add(node.file, node.line, node.path, text)
