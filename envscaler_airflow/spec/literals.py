"""What looks like a secret, told from names and text alone."""

from __future__ import annotations

import re

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
        "each",
        "first",
        "last",
        "max",
        "min",
        "new",
        "next",
        "num",
        "per",
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
_TAKEN_FROM_ELSEWHERE = re.compile(r"[\"']?(\$.*|\{\{.*\}\}|<[^>]*>|/\S*)\Z", re.DOTALL)
_NO_SECRET_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Schemes that write ``container@account``."""


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
    return any(not _is_plain_user(scheme, userinfo) for scheme, userinfo in _USERINFO.findall(text))


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


def mask(text: str) -> str:
    """*text* with secrets of a known shape and users of URLs starred out."""
    return _USERINFO.sub(_mask_userinfo, _SHAPES.sub("***", text))


def _mask_userinfo(match: re.Match[str]) -> str:
    return match[0] if _is_plain_user(match[1], match[2]) else f"{match[1]}://***@"


def _is_plain_user(scheme: str, userinfo: str) -> bool:
    scheme = scheme.lower()
    return scheme in _NO_SECRET_SCHEMES or (userinfo == "git" and "ssh" in scheme)
