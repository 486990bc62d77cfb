"""Request bodies."""

from __future__ import annotations

import json
from typing import Any

import yaml
from fakes.kubernetes import errors
from fakes.kubernetes.errors import ApiError
from fakes.kubernetes.routing import Call

WRITABLE = "application/json, application/yaml, application/vnd.kubernetes.protobuf"


def decoded(call: Call, body: bytes) -> Any:
    """The request's object; raises 400 and 415."""
    kind = call.headers.get("content-type", "application/json").partition(";")[0].strip()
    if call.verb != "patch" and kind not in {"application/json", "application/yaml", "*/*"}:
        message = (
            f"the body of the request was in an unknown format - accepted media types include: {WRITABLE}"
        )
        raise ApiError(415, errors.status(415, "UnsupportedMediaType", message))
    try:
        return yaml.safe_load(body) if kind.endswith("yaml") else json.loads(body)
    except (ValueError, yaml.YAMLError) as error:
        text = body.decode(errors="replace")
        message = (
            f"the object provided is unrecognized (must be of type {call.resource.kind}): couldn't "
            "get version/kind; "
            f"json parse error: invalid character '{text[1:2]}' looking for beginning of object key "
            f"string ({text})"
        )
        raise errors.bad_request(message) from error
