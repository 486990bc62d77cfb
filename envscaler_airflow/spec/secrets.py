"""Secrets only by reference: what looks like a literal one is a fault, and references are read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from envscaler_airflow.spec.faults import Faults
from envscaler_airflow.spec.yaml import Node

ReferenceKind = Literal["secret", "env", "connection", "variable"]

REFERENCE_FORMS = "secret:NAME/key, env:NAME, connection:ID/field or variable:NAME"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    {
        "apikey",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "pwd",
        "secret",
        "secrets",
        "token",
    }
)
_SECRET_PAIRS = frozenset(
    {
        ("api", "key"),
        ("access", "key"),
        ("private", "key"),
        ("account", "key"),
        ("auth", "key"),
        ("secret", "key"),
    }
)
_HARMLESS_BEFORE_TOKEN = frozenset(
    {
        "begin",
        "bos",
        "cls",
        "end",
        "eos",
        "mask",
        "pad",
        "prompt",
        "sep",
        "special",
        "start",
        "stop",
        "unk",
        "unknown",
    }
)
"""Words before TOKEN that make it a token of text."""
_HARMLESS_LAST = frozenset(
    {"dir", "file", "name", "path", "ttl", "type", "url", "id", "count", "limit", "length"}
)
"""Last words that make it no secret itself. Access key ids are told by their shape."""

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{30,}"
    r"|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\bAIza[0-9A-Za-z_-]{35}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}"
)
_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}):(?://|\\\\)([^\s/?#'\"@]*)@")
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?\Z", re.DOTALL)
_ASSIGNED = re.compile(r"\b([A-Za-z][A-Za-z0-9_]*)=(\S+)")
_TAKEN_FROM_ELSEWHERE = re.compile(r"(\$\{?[A-Za-z_][A-Za-z0-9_]*\}?|\{\{.*\}\}|<[^>]*>|/\S*)\Z", re.DOTALL)
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


def is_secret_name(name: str) -> bool:
    """True for WANDB_API_KEY, db_password and authToken; not for TOKENIZERS_PARALLELISM or PAD_TOKEN."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _HARMLESS_LAST:
        return False
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word == "token" and before in _HARMLESS_BEFORE_TOKEN:
            continue
        if word in _SECRET_WORDS or (before, word) in _SECRET_PAIRS:
            return True
    return False


def has_secret_shape(text: str) -> bool:
    """True when *text* holds a key of a known form: AWS, GitHub, Hugging Face, a private key, a JWT."""
    return bool(_SHAPES.search(text))


def has_userinfo(text: str) -> bool:
    """True when *text* holds a URL with a user or password; ``ssh://git@host`` alone is none."""
    for scheme, userinfo in _USERINFO.findall(text):
        if not (userinfo == "git" and "ssh" in scheme.lower()):
            return True
    return False


def is_literal(value: object) -> bool:
    """True for a value that could be a secret: text, or a number; not a switch, a path or ``$NAME``."""
    if value is None or isinstance(value, bool):
        return False
    text = str(value).strip()
    return bool(text) and not _TAKEN_FROM_ELSEWHERE.match(text)


def looks_secret(name: str, value: object) -> bool:
    """True when *value* under *name* must not be shown."""
    if isinstance(value, str) and (has_secret_shape(value) or has_userinfo(value)):
        return True
    return is_secret_name(name) and is_literal(value)


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
    if has_secret_shape(node.value):
        _fault(
            node, f"holds what looks like a secret; write a reference: value_from: {REFERENCE_FORMS}", faults
        )
    elif has_userinfo(node.value):
        fix = "leave user and password out and write credentials: or value_from: connection:ID/password"
        _fault(node, f"is a URL with a user or password; {fix}", faults)
    elif any(is_secret_name(name) and is_literal(value) for name, value in _ASSIGNED.findall(node.value)):
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
