"""Detect secrets by their name, their form, or the place where they are written.

``secret_forms.txt`` beside this module has the forms of known providers, with their sources.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any


@cache
def _shapes() -> Any:
    """All patterns of ``secret_forms.txt``; RE2 searches them in linear time in any text."""
    import re2  # noqa: PLC0415  (10 ms that most DAG files do without)

    lines = Path(__file__).with_name("secret_forms.txt").read_text(encoding="utf-8").splitlines()
    return re2.compile("|".join(line for line in lines if line and not line.startswith("#")))


def has_known_form(text: str) -> bool:
    """True when *text* contains a secret of a known form."""
    return _shapes().search(_encodable(text)) is not None


def blank(text: str) -> str:
    """Replace each secret of a known form in *text* with ``***``."""
    return str(_shapes().sub("***", _encodable(text)))


def _encodable(text: str) -> str:
    """Remove lone surrogates, which RE2 does not accept."""
    return text.encode("utf-8", "replace").decode()


_BARE = re.compile(r"[A-Za-z0-9/+]{40}")
_KINDS = (str.islower, str.isupper, str.isdigit)
_MIN_TURNS = 14
"""Changes between lower case, upper case, digits and signs in 40 characters. Chosen: words and paths
have fewer than ten; keys have 22 to 32, and the key in AWS' own examples has 16.
"""


def is_bare_aws_key(text: str) -> bool:
    """True for 40 characters in the form of AWS secret access keys; not for a hash, a path or base64 text.

    Source: the form of detect-secrets' AWS rule, ``[0-9a-zA-Z/+]{40}``.
    """
    if not _BARE.fullmatch(text) or not all(any(map(is_kind, text)) for is_kind in _KINDS):
        return False
    turns = sum(_kind(left) != _kind(right) for left, right in pairwise(text))
    return turns >= _MIN_TURNS and not _is_encoded_text(text)


def _kind(char: str) -> int:
    return next((index for index, is_kind in enumerate(_KINDS) if is_kind(char)), len(_KINDS))


def _is_encoded_text(text: str) -> bool:
    try:
        return base64.b64decode(text, validate=True).decode().isprintable()
    except (binascii.Error, ValueError):
        return False


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    {
        "apikey", "credential", "credentials", "passphrase", "passwd", "password", "passwords", "pwd",
        "secret", "secrets", "token",
    }
)  # fmt: skip
_SECRET_AFTER: dict[str, frozenset[str]] = {
    "key": frozenset({
        "api", "access", "private", "account", "auth", "secret", "signing", "encryption", "master", "storage",
        "subscription", "kaggle", "license", "ssh",
    }),
    "pass": frozenset({
        "db", "user", "default", "smtp", "mail", "redis", "mysql", "postgres", "pg", "admin", "root", "proxy",
        "registry",
    }),
    "string": frozenset({"connection"}),
    "url": frozenset({"sas"}),
}  # fmt: skip
"""Words that are secret after another word: API_KEY, DB_PASS."""
_SECRET_ENDS = (
    "password", "passwd", "passphrase", "apikey", "secretkey", "accesskey", "authtoken", "accesstoken",
)  # fmt: skip
"""Ends of compound words such as PGPASSWORD."""
_HARMLESS_BEFORE_TOKEN = frozenset(
    {
        "each", "first", "last", "max", "min", "new", "next", "num", "per", "begin", "bos", "cls", "end",
        "eos", "mask", "pad", "prompt", "sep", "special", "start", "stop", "unk", "unknown",
    }
)  # fmt: skip
"""Words before TOKEN that mark it as a token of text."""
_HARMLESS_LAST = frozenset(
    {
        "dir", "file", "name", "path", "ttl", "type", "url", "id", "count", "limit", "length", "env", "var",
        "stdin", "prompt", "ref", "policy", "expiry", "version", "endpoint", "provider", "size", "index",
        "enabled", "required",
    }
)  # fmt: skip
"""Last words that mark a name as not secret. Access key ids are recognised by their form."""
_SWITCHES = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null", "auto"})
_HEADER = re.compile(r"([A-Za-z][A-Za-z-]{1,60}):\s+(?:[A-Za-z]+\s+)?(\S{6,})\Z")
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_PART = re.compile(r"(?:^|[;&])\s*([A-Za-z][A-Za-z0-9_ -]{1,60}?)\s*=\s*([^;&]{1,500})")
_PAIR = re.compile(r"[\"']([A-Za-z][A-Za-z0-9_.-]{1,60})[\"']\s*:\s*[\"']([^\"']{1,500})[\"']")
_QUERY = re.compile(r"[?&]([A-Za-z_][A-Za-z0-9_.-]{0,60})=([^\s&#\"']+)")
_MAX_JSON = 100_000
"""Longest text that is parsed as JSON, characters. Chosen: longer than an environment variable can be."""

_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}):(?://|\\\\)([^\s/?#'\"@]{0,4096})@")
_TAKEN_FROM_ELSEWHERE = re.compile(r"[\"']?(\$.*|`.*|\{\{.*\}\}|<[^>]*>|/\S*)\Z", re.DOTALL)
_NO_SECRET_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Schemes whose URLs contain ``container@account``."""


def is_secret_name(name: str) -> bool:
    """True for WANDB_API_KEY, db_password and authToken; not for TOKENIZERS_PARALLELISM or PAD_TOKEN."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _HARMLESS_LAST:
        return False
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word == "token" and before in _HARMLESS_BEFORE_TOKEN:
            continue
        if word in _SECRET_WORDS or before in _SECRET_AFTER.get(word, ()) or word.endswith(_SECRET_ENDS):
            return True
    return words == ["pass"]


def has_secret_shape(text: str) -> bool:
    """True when *text* contains a key of a known form, also in JSON, a connection string or a header."""
    text = text.strip()
    return (
        has_known_form(text)
        or is_bare_aws_key(text.strip("\"'"))
        or any(is_secret_name(name) and is_literal(value) for name, value in _named_values(text))
    )


def _named_values(text: str) -> Iterator[tuple[str, object]]:
    """Yield names and values in JSON, ``Server=x;Password=y``, query strings, and ``X-Auth-Token: x``."""
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
            else:  # "auth" in Docker's config.json is user and password
                yield ("password" if key == "auth" and isinstance(item, str) else str(key)), item
    elif isinstance(value, list) and depth < 40:
        for item in value:
            yield from _json_values(item, depth + 1)


def has_userinfo(text: str) -> bool:
    """True when *text* contains a URL with a user or password; ``ssh://git@host`` does not count."""
    return any(not _is_plain_user(scheme, userinfo) for scheme, userinfo in _USERINFO.findall(text))


def is_literal(value: object) -> bool:
    """True for a value that could be a secret: a text or number, but not a boolean, a path or ``$NAME``."""
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
    """Mask secrets of a known form and the user part of URLs in *text*."""
    return _USERINFO.sub(_mask_userinfo, blank(text))


def _mask_userinfo(match: re.Match[str]) -> str:
    return match[0] if _is_plain_user(match[1], match[2]) else f"{match[1]}://***@"


def _is_plain_user(scheme: str, userinfo: str) -> bool:
    scheme = scheme.lower()
    return scheme in _NO_SECRET_SCHEMES or (userinfo == "git" and ("ssh" in scheme or "git" in scheme))
