"""Refusals, with the wording and the fields of a Kubernetes 1.36.2 API server."""

from __future__ import annotations

from typing import Any

from fakes.kubernetes.resources import Resource


class ApiError(Exception):
    """A failure as an answer; `body` is a Status, or plain text."""

    def __init__(self, code: int, body: dict[str, Any] | str, headers: dict[str, str] | None = None) -> None:
        """Keep the answer to send."""
        super().__init__(body if isinstance(body, str) else body["message"])
        self.code = code
        self.body = body
        self.headers = headers or {}


def status(
    code: int, reason: str | None, message: str, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Build a Status of failure."""
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
    }
    if reason:
        body["reason"] = reason
    if details is not None:
        body["details"] = details
    return body | {"code": code}


def _named(resource: Resource, name: str) -> dict[str, Any]:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in details.items() if value}


def bad_request(message: str) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, status(400, "BadRequest", message))


def unauthorized() -> ApiError:
    """401: the token is unknown or expired."""
    return ApiError(401, status(401, "Unauthorized", "Unauthorized"))


def forbidden(
    resource: Resource, name: str, why: str, causes: list[dict[str, Any]] | None = None
) -> ApiError:
    """403 of admission or authorization, with *why*."""
    subject = f'{resource.full} "{name}"' if name else resource.full
    details = _named(resource, name) | ({"causes": causes} if causes else {})
    return ApiError(403, status(403, "Forbidden", f"{subject} is forbidden: {why}", details))


def denied(why: str) -> ApiError:
    """400 of a validating webhook. Source: apiserver, webhook/errors, ToStatusErr."""
    message = f'admission webhook "policy.example.com" denied the request: {why}'
    return ApiError(400, status(400, None, message))


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for an object."""
    return ApiError(
        404, status(404, "NotFound", f'{resource.full} "{name}" not found', _named(resource, name))
    )


def no_such_path() -> ApiError:
    """404 for a resource that is not served."""
    return ApiError(404, status(404, "NotFound", "the server could not find the requested resource", {}))


def plain_not_found() -> ApiError:
    """404 for a path outside the API."""
    return ApiError(404, "404 page not found\n")


def no_such_method() -> ApiError:
    """405."""
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, status(405, "MethodNotAllowed", message, {}))


def exists(resource: Resource, name: str) -> ApiError:
    """409 AlreadyExists."""
    return ApiError(
        409, status(409, "AlreadyExists", f'{resource.full} "{name}" already exists', _named(resource, name))
    )


def stale(resource: Resource, name: str) -> ApiError:
    """409 Conflict of an update with an old resourceVersion."""
    message = (
        f'Operation cannot be fulfilled on {resource.full} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return ApiError(409, status(409, "Conflict", message, _named(resource, name)))


def precondition(resource: Resource, name: str, what: str, wanted: str, found: str) -> ApiError:
    """409 Conflict of a delete whose precondition does not hold; *what* is UID or ResourceVersion."""
    hint = "deleted and then recreated" if what == "UID" else "modified"
    message = (
        f'Operation cannot be fulfilled on {resource.full_kind} "{name}": the {what} in the '
        f"precondition ({wanted}) "
        f"does not match the {what} in record ({found}). The object might have been {hint}"
    )
    details = _named(resource, name) | {"kind": resource.kind}
    return ApiError(409, status(409, "Conflict", message, details))


_VERDICTS = {
    "FieldValueInvalid": "Invalid value",
    "FieldValueRequired": "Required value",
    "FieldValueForbidden": "Forbidden",
    "FieldValueNotSupported": "Unsupported value",
}


def cause(field: str, reason: str, message: str, value: str | None = None) -> dict[str, Any]:
    """One cause of a 422: *reason* is FieldValueInvalid, ...Required, ...Forbidden or ...NotSupported."""
    words = _VERDICTS[reason]
    shown = (
        f"{words}: {value}: {message}" if value is not None else f"{words}: {message}" if message else words
    )
    return {"reason": reason, "message": shown, "field": field}


def invalid(full_kind: str, name: str, causes: list[dict[str, Any]]) -> ApiError:
    """422 with its causes; a single one has no brackets."""
    each = list(dict.fromkeys(f"{one['field']}: {one['message']}" for one in causes))
    text = each[0] if len(each) == 1 else "[" + ", ".join(each) + "]"
    kind, _, group = full_kind.partition(".")
    details: dict[str, Any] = {"name": name, "group": group, "kind": kind}
    details = {key: value for key, value in details.items() if value} | {"causes": causes}
    return ApiError(422, status(422, "Invalid", f'{full_kind} "{name}" is invalid: {text}', details))


def unprocessable() -> ApiError:
    """422 without causes: a JSON patch whose test fails."""
    return ApiError(
        422, status(422, "Invalid", "the server rejected our request due to an error in our request", {})
    )


def expired(message: str = "The resourceVersion for the provided list is too old.") -> ApiError:
    """410 of a list or of a continue token."""
    return ApiError(410, status(410, "Expired", message))


def too_large(wanted: int, current: int) -> ApiError:
    """504: a resourceVersion of the future."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Timeout: Too large resource version: {wanted}, current: {current}"
    body = status(504, "Timeout", message, {"causes": causes, "retryAfterSeconds": 1})
    return ApiError(504, body, {"Retry-After": "1"})


def too_many(retry_after: int = 2) -> ApiError:
    """429 of priority and fairness: plain text."""
    return ApiError(429, "Too many requests, please try again later.\n", {"Retry-After": str(retry_after)})


def unavailable(code: int = 500) -> ApiError:
    """5xx as from a broken etcd."""
    return ApiError(
        code, status(code, "InternalError", "Internal error occurred: etcdserver: request timed out", {})
    )
