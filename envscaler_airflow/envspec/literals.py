"""Detect secrets by their name, their form, or the place where they are written."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

_PREFIXES = (
    r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",  # aws-access-token
    r"\bLTAI[A-Za-z0-9]{16,24}\b",  # alibaba-access-key-id
    r"\bAKID[A-Za-z0-9]{32}\b",  # Tencent Cloud, cloud.tencent.com/document/product/598/40488
    r"\bgh[pousr]_[A-Za-z0-9]{30,}",  # github-pat, -oauth, -app-token, -refresh-token
    r"\bgithub_pat_[A-Za-z0-9_]{30,}",  # github-fine-grained-pat
    r"\bgl(?:pat|dt|rt|rtr|cbt|ptt|ft|soat|imt|agent|oas)-[A-Za-z0-9_=-]{20,}",  # gitlab-*
    r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",  # huggingface-access-token, -organization-api-token
    r"\bsk-[A-Za-z0-9_-]{20,}",  # openai-api-key, anthropic-api-key
    r"\b(?:gsk_|pplx-|xai-|r8_|fw_|tgp_v1_|nvapi-|rpa_|lsv2_[ps][tk]_|sk-lf-)[A-Za-z0-9_-]{20,}",
    # Groq, Perplexity, xAI, Replicate, Fireworks, Together, NVIDIA, RunPod, LangSmith: their API key pages
    r"\bwandb_v1_[A-Za-z0-9_]{20,}",  # Weights & Biases, docs.wandb.ai, API keys
    r"\bKGAT_[A-Za-z0-9]{20,}",  # Kaggle, kaggle.com/docs/api
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[0-9]-[A-Za-z0-9-]{10,}",  # slack-*-token
    r"\bAIza[0-9A-Za-z_-]{35}|\bGOCSPX-[A-Za-z0-9_-]{20,}|\bya29\.[A-Za-z0-9_-]{20,}",  # gcp-api-key
    r"\b(?:sk|rk)_(?:test|live|prod)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/]{20,}",  # stripe-access-token
    r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",  # sendgrid-api-token
    r"\bkey-[0-9a-f]{32}\b|\b[0-9a-f]{32}-us[0-9]{1,2}\b",  # mailgun-private-api-token, mailchimp-api-key
    r"\bSK[0-9a-f]{32}\b",  # twilio-api-key
    r"\bnpm_[A-Za-z0-9]{30,}|\brubygems_[a-f0-9]{48}\b",  # npm-access-token, rubygems-api-token
    r"\bpypi-AgE[A-Za-z0-9_-]{40,}",  # pypi-upload-token
    r"\bdo[opr]_v1_[a-f0-9]{64}\b|\bdckr_[a-z]+_[A-Za-z0-9_-]{20,}",  # digitalocean-*, Docker Hub
    r"\bdapi[a-f0-9]{32}(?:-[0-9])?\b",  # databricks-api-token
    r"\bhv[bs]\.[A-Za-z0-9_-]{20,}|\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}",  # vault-*, hashicorp-tf
    r"\bgl(?:c|sa)_[A-Za-z0-9+/=]{32,}",  # grafana-cloud-api-token, -service-account-token
    r"\bNR(?:AK|II|JS|RA)-[A-Za-z0-9_-]{15,}",  # new-relic-*
    r"\blin_api_[A-Za-z0-9]{30,}|\bntn_[A-Za-z0-9]{40,}|\bsecret_[A-Za-z0-9]{43}\b",  # linear, notion
    r"\bPMAK-[a-f0-9]{24}-[a-f0-9]{34}\b|\bpul-[a-f0-9]{40}\b",  # postman-api-token, pulumi-api-token
    r"\bdp\.(?:pt|st|ct|sa)\.[A-Za-z0-9._-]{20,}|\bsbp_[a-f0-9]{40}\b",  # doppler-api-token, Supabase
    r"\bpscale_(?:tkn|pw|oauth)_[A-Za-z0-9=._-]{32,}|\bsntry[su]_[A-Za-z0-9+/=_-]{40,}",  # planetscale-*
    r"\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}\b|\bATATT3[A-Za-z0-9_=-]{50,}",  # shopify-*, atlassian-api-token
    r"\bAKCp[A-Za-z0-9]{60,}|\bHRKU-[A-Za-z0-9_-]{36,}",  # artifactory-api-key, heroku-api-key-v2
    r"(?:^|[^A-Za-z0-9_~.-])[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}",  # azure-ad-client-secret
    r"\bv1\.0-[a-f0-9]{24}-[a-f0-9]{146}\b|\bops_eyJ[A-Za-z0-9+/]{100,}",  # cloudflare-origin-ca, 1password
    r"\bAGE-SECRET-KEY-1[A-Z0-9]{58}\b|\bfo1_[A-Za-z0-9_-]{43}",  # age-secret-key, flyio-access-token
    r"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b",  # telegram-bot-api-token
    r"\b[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",  # discord-api-token
    r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}",  # jwt
    r"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/_=-]{20,}",  # Neptune: base64 of {"api_address":
)
_BLOCKS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",  # private-key
    r"\bPuTTY-User-Key-File-[0-9]",
)
_ADDRESSES = (
    r"\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{20,}",  # slack-webhook-url
    r"\bdiscord(?:app)?\.com/api/webhooks/[0-9]{10,}/[A-Za-z0-9_-]{20,}",  # Discord, "Webhook Resource"
    r"\b(?:webhook\.office\.com/webhookb2|outlook\.office(?:365)?\.com/webhook)/[^\s\"']{30,}",
    r"\bapi\.telegram\.org/bot[0-9]+:[A-Za-z0-9_-]{20,}",
    r"\bhooks\.zapier\.com/hooks/catch/[0-9]+/[A-Za-z0-9]{5,}",
    r"\b(?:open\.feishu\.cn|open\.larksuite\.com)/open-apis/bot/v2/hook/[A-Za-z0-9-]{20,}",
    # SAS of Azure, presigned URLs of AWS and Google, keys of Azure functions
    r"(?i:[?&;](?:sig|x-(?:amz|goog)-signature|x-amz-security-token|signature|code)=)[A-Za-z0-9%/+_~.-]{32,}",
)
_FIELDS = (
    # learn.microsoft.com/azure/storage/common/storage-configure-connection-string
    r"(?i:\b(?:account|sharedaccess|shared_access)_?key\s*=\s*)[A-Za-z0-9+/]{20,}={0,2}",
    r"(?i:\bsharedaccesssignature\s*=\s*)\S{20,}",
    # RFC 9110, section 11.6.2; a word in lower case is prose
    (
        r"(?i:\b(?:bearer|authorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token|apikey))\s+)"
        r"(?:[A-Za-z._~+/-]{0,100}[0-9]|[a-z]{1,100}[A-Z])[A-Za-z0-9._~+/=-]{6,}"
    ),
    (
        r"(?i:\baws[a-z_ ]{0,20}(?:secret|key)[a-z_ ]{0,20}[\"']?\s*[:= ]\s*[\"']?)"
        r"[A-Za-z0-9/+]{40}(?:[^A-Za-z0-9/+=]|$)"
    ),
)


@cache
def _shapes() -> Any:
    """All patterns; RE2 searches them in linear time in any text."""
    import re2  # noqa: PLC0415  (10 ms that most DAG files do without)

    return re2.compile("|".join((*_BLOCKS, *_PREFIXES, *_ADDRESSES, *_FIELDS)))


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
