"""What looks like a secret, by its name, its form, or the place where it stands."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from envscaler_airflow.spec.shapes import blank, has_known_form, is_bare_aws_key

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
        ("signing", "key"),
        ("encryption", "key"),
        ("master", "key"),
        ("storage", "key"),
        ("subscription", "key"),
        ("kaggle", "key"),
        ("license", "key"),
        ("ssh", "key"),
        ("db", "pass"),
        ("user", "pass"),
        ("default", "pass"),
        ("smtp", "pass"),
        ("mail", "pass"),
        ("redis", "pass"),
        ("mysql", "pass"),
        ("postgres", "pass"),
        ("pg", "pass"),
        ("admin", "pass"),
        ("root", "pass"),
        ("proxy", "pass"),
        ("registry", "pass"),
        ("connection", "string"),
        ("sas", "url"),
    }
)
_SECRET_ENDS = (
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "secretkey",
    "accesskey",
    "authtoken",
    "accesstoken",
)
"""Ends of words that are written together, such as PGPASSWORD."""
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
    {
        "dir", "file", "name", "path", "ttl", "type", "url", "id", "count", "limit", "length", "env", "var",
        "stdin", "prompt", "ref", "policy", "expiry", "version", "endpoint", "provider", "size", "index",
        "enabled", "required",
    }
)  # fmt: skip
"""Last words that make it no secret itself. Access key ids are recognised by their shape."""
_SWITCHES = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null", "auto"})
_HEADER = re.compile(r"([A-Za-z][A-Za-z-]{1,60}):\s+(?:[A-Za-z]+\s+)?(\S{6,})\Z")
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_PART = re.compile(r"(?:^|[;&])\s*([A-Za-z][A-Za-z0-9_ -]{1,60}?)\s*=\s*([^;&]{1,500})")
_PAIR = re.compile(r"[\"']([A-Za-z][A-Za-z0-9_.-]{1,60})[\"']\s*:\s*[\"']([^\"']{1,500})[\"']")
_QUERY = re.compile(r"[?&]([A-Za-z_][A-Za-z0-9_.-]{0,60})=([^\s&#\"']+)")
_MAX_JSON = 100_000
"""Longest text that is read as JSON, characters. Chosen: more than an environment can hold."""

_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}):(?://|\\\\)([^\s/?#'\"@]{0,4096})@")
_TAKEN_FROM_ELSEWHERE = re.compile(r"[\"']?(\$.*|`.*|\{\{.*\}\}|<[^>]*>|/\S*)\Z", re.DOTALL)
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
        if word in _SECRET_WORDS or (before, word) in _SECRET_PAIRS or word.endswith(_SECRET_ENDS):
            return True
    return words == ["pass"]


def has_secret_shape(text: str) -> bool:
    """True when *text* is or contains a key of a known form: in JSON, a connection string, a header."""
    text = text.strip()
    return (
        has_known_form(text)
        or is_bare_aws_key(text.strip("\"'"))
        or any(is_secret_name(name) and is_literal(value) for name, value in _named_values(text))
    )


def _named_values(text: str) -> Iterator[tuple[str, object]]:
    """Names with their values in JSON, ``Server=x;Password=y``, URLs' queries, and ``X-Auth-Token: x``."""
    if text[:1] in ("{", "[") and len(text) <= _MAX_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            yield from _json_values(json.loads(text), 0)
    yield from _PAIR.findall(text)
    yield from _QUERY.findall(text)
    if ";" in text:
        yield from _PART.findall(text)
    header = _HEADER.match(text)
    if header is not None:
        name = header[1].lower()
        yield ("password" if name in _HEADERS else name), header[2]


def _json_values(value: Any, depth: int) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and depth < 40:
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from _json_values(item, depth + 1)
            else:  # "auth" of Docker's config.json is user and password
                yield ("password" if key == "auth" and isinstance(item, str) else str(key)), item
    elif isinstance(value, list) and depth < 40:
        for item in value:
            yield from _json_values(item, depth + 1)


def has_userinfo(text: str) -> bool:
    """True when *text* holds a URL with a user or password; ``ssh://git@host`` alone is none."""
    return any(not _is_plain_user(scheme, userinfo) for scheme, userinfo in _USERINFO.findall(text))


def is_literal(value: object) -> bool:
    """True for a value that could be a secret: text, or a number; not a switch, a path or ``$NAME``."""
    if value is None or isinstance(value, bool):
        return False
    text = str(value).strip()
    return bool(text) and text.lower() not in _SWITCHES and not _TAKEN_FROM_ELSEWHERE.match(text)


def looks_secret(name: str, value: object) -> bool:
    """True when *value* under *name* must not be shown."""
    if isinstance(value, str) and (has_secret_shape(value) or has_userinfo(value)):
        return True
    return is_secret_name(name) and is_literal(value)


def mask(text: str) -> str:
    """*text* with secrets of a known shape and users of URLs starred out."""
    return _USERINFO.sub(_mask_userinfo, blank(text))


def _mask_userinfo(match: re.Match[str]) -> str:
    return match[0] if _is_plain_user(match[1], match[2]) else f"{match[1]}://***@"


def _is_plain_user(scheme: str, userinfo: str) -> bool:
    scheme = scheme.lower()
    return scheme in _NO_SECRET_SCHEMES or (userinfo == "git" and ("ssh" in scheme or "git" in scheme))
