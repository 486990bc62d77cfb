"""The API server as JSON: the official client's connection and credentials, and this package's errors.

Only this module imports the ``kubernetes`` package, and only when a cluster is used.
"""

from __future__ import annotations

import email.utils
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import tenacity

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.errors import BackendError, SpecError

Json = dict[str, Any]

TIMEOUT_S = 30.0
"""Longest wait for an answer. Chosen: the API server itself gives up after 60 s."""
TRIES = 4
"""Number of tries of a call to a busy server. Chosen: waits of 1, 2 and 4 s between them."""
PAGE = 500
"""Objects in one answer of a list. Source: kubectl's default."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest answer read, bytes. Chosen: 500 pods of the largest kind."""

_CONTENT = {
    "json": "application/json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "GET": "get or list"}


class RefusedError(BackendError):
    """The API server refused a call.

    Attributes:
        reason: The Status' reason, such as ``AlreadyExists``; ``""`` without one.
        retry_after_s: Seconds to wait, from the server; None without them.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        reason: str,
        retry_after_s: float | None,
        is_starting: bool = False,
    ) -> None:
        """A busy, broken or unauthenticated call and a write conflict are transient; others are final.

        A 403 of a server that *is_starting*, and does not know its roles yet, is transient too. Source:
        Kubernetes API concepts: a conflict of resource versions is retried; a conflict of uids is not.
        """
        transient = status in (401, 408, 410, 429) or status >= 500
        transient = transient or is_starting or (status == 409 and "has been modified" in message)
        super().__init__(message, status=status, transient=transient)
        self.reason = reason
        self.retry_after_s = retry_after_s


class ForbiddenError(RefusedError):
    """The identity may not make the call, as the server says with its roles read."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        body: JSON.
        server_time: The server's clock, seconds since the epoch; None without one.
    """

    body: Json
    server_time: float | None


def _package(module: str) -> Any:
    try:
        return import_module(f"kubernetes.{module}")
    except ImportError as err:
        raise SpecError(
            f"compute 'kubernetes' needs the extra: install envscaler-airflow[kubernetes] ({err})"
        ) from err


def connect(*, context: str | None = None, kubeconfig: str | None = None, in_cluster: bool = False) -> Any:
    """An ``ApiClient`` of the official package from a kubeconfig, or with the pod's identity.

    Raises:
        SpecError: The package is not installed, or there is no such file or context.
    """
    client, config = _package("client"), _package("config")
    try:
        if in_cluster:
            configuration = client.Configuration()
            config.load_incluster_config(client_configuration=configuration)
            return client.ApiClient(configuration)
        # The package reads the variable when it is imported, which may be much earlier.
        place = kubeconfig or os.environ.get("KUBECONFIG") or None
        return config.new_client_from_config(config_file=place, context=context)
    except config.ConfigException as err:
        where = f"context {context!r} of " if context else ""
        raise SpecError(
            f"kubernetes: {where}{kubeconfig or 'the kubeconfig'}: {err}; `kubectl config get-contexts` "
            "lists the contexts; name the file by KUBECONFIG or --kubeconfig"
        ) from err


def located(*, context: str | None, kubeconfig: str | None, in_cluster: bool) -> dict[str, Any]:
    """Arguments of :func:`connect` for the same cluster from another folder, and at a later time."""
    if in_cluster:
        return {"in_cluster": True}
    config = _package("config")
    place = kubeconfig or os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
    paths = os.pathsep.join(str(Path(path).expanduser().absolute()) for path in place.split(os.pathsep))
    if context is None:
        with suppress(config.ConfigException):  # connect() reports what is wrong with it
            context = config.list_kube_config_contexts(config_file=paths)[1]["name"]
    return {"context": context, "kubeconfig": paths}


@dataclass(frozen=True, slots=True)
class _Call:
    """One request to the server.

    Attributes:
        method, path, query, body: The parts of the HTTP request; the body is sent as JSON.
        content: What kind of JSON the body is, by the names of :data:`_CONTENT`.
        read_timeout_s: Longest time without data from the server, seconds.
    """

    method: str
    path: str
    query: Mapping[str, Any] | None = None
    body: Mapping[str, Any] | None = None
    content: str = "json"
    read_timeout_s: float = TIMEOUT_S


class Cluster:
    """Calls on one API server."""

    def __init__(self, api: Any, *, sleep: Callable[[float], None] | None = None) -> None:
        """Use *api*, an ``ApiClient``; *sleep* waits between two tries of a busy server."""
        self._api = api
        self._sleep = sleep or tenacity.nap.sleep

    @property
    def host(self) -> str:
        """URL of the server."""
        return str(self._api.configuration.host)

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Answer:
        """Read one object. Raises BackendError."""
        return self._call("GET", path, query)

    def find(self, path: str) -> Answer | None:
        """Read one object, None when it does not exist. Raises BackendError for anything else."""
        try:
            return self._call("GET", path)
        except RefusedError as err:
            if err.status == 404:
                return None
            raise

    def list(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        page: int = PAGE,
        each: Callable[[Json], Any] | None = None,
    ) -> Answer:
        """All objects, *page* at a time, or what *each* returns for them; ``metadata`` is the last page's.

        Raises:
            BackendError: No answer.
        """
        shape = None if each is None else partial(_with_items, each)
        items: list[Any] = []
        again = ""
        while True:
            asked = {**(query or {}), "limit": page} | ({"continue": again} if again else {})
            try:
                found = self._call("GET", path, asked, shape=shape)
            except RefusedError as err:
                if err.status != 410 or not again:
                    raise
                items, again = [], ""  # the list expired between two pages: start from the beginning
                continue
            items += found.body.get("items") or []
            again = str((found.body.get("metadata") or {}).get("continue") or "")
            if not again:
                return Answer({**found.body, "items": items}, found.server_time)

    def create(self, path: str, body: Mapping[str, Any]) -> Json:
        """Create an object. Raises RefusedError with status 409 when one of that name exists."""
        return self._call("POST", path, body=body).body

    def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        """Merge *body* into an object; a ``metadata.uid`` in it must match.

        Raises:
            RefusedError: With status 409 if another object has that name now.
        """
        return self._patch(path, body, "merge")

    def patch_strategic(self, path: str, body: Mapping[str, Any]) -> Json:
        """The same as a strategic merge, where lists are merged by the names of their items."""
        return self._patch(path, body, "strategic")

    def _patch(self, path: str, body: Mapping[str, Any], content: str) -> Json:
        try:
            return self._call("PATCH", path, body=body, content=content).body
        except RefusedError as err:
            # For a PATCH, another uid is an immutable field, not the conflict that it is for other calls.
            if err.status != 422 or "metadata.uid" not in str(err):
                raise
            raise RefusedError(str(err), status=409, reason="Conflict", retry_after_s=None) from err

    def delete(self, path: str, *, uid: str, grace_s: int | None = None) -> None:
        """Delete the object of that uid and what it owns; does nothing if it is absent or has another uid."""
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._call("DELETE", path, body=body)
        except RefusedError as err:
            if err.status not in (404, 409):
                raise

    def stream(self, path: str, query: Mapping[str, Any], *, read_timeout_s: float) -> Iterator[bytes]:
        """The answer line by line, as it arrives. Raises BackendError."""
        response = self._send(_Call("GET", path, query, read_timeout_s=read_timeout_s))
        with closing(response):
            self._check("GET", path, response)
            rest = b""
            try:
                for chunk in response.stream(1 << 16, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from (line + b"\n" for line in lines)
            except self._transport_errors() as err:
                raise BackendError(f"{path}: {err}", transient=True) from err
            if rest:
                yield rest

    def execute(self, path: str, container: str, command: Sequence[str]) -> str:
        """Run *command* in a container; returns what it printed, errors too. *path* is a pod's ``exec``.

        Raises:
            BackendError: It could not be run.
        """
        sockets = _package("stream.ws_client")
        query = [("container", container), ("stdout", True), ("stderr", True)]
        try:
            answer = sockets.websocket_call(
                self._api.configuration,
                "GET",
                self.host + quote(path),
                query_params=[*query, *(("command", word) for word in command)],
                headers={name.lower(): value for name, value in self._credentials().items()},
                _request_timeout=TIMEOUT_S,
            )
        except _package("client").ApiException as err:
            raise BackendError(f"{path}, container {container}: {err.reason}") from err
        return str(answer.data)

    def may(self, verb: str, resource: str, subresource: str, namespace: str) -> bool:
        """True if the API server would allow the call. Raises BackendError."""
        of = {"namespace": namespace, "verb": verb, "resource": resource, "subresource": subresource}
        return bool((self.create(_REVIEWS, _review(of)).get("status") or {}).get("allowed"))

    # -- one call

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        content: str = "json",
        shape: Callable[[Json], Json] | None = None,
    ) -> Answer:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_busy),
            wait=_wait,
            stop=tenacity.stop_after_attempt(TRIES),
            sleep=self._sleep,
            reraise=True,
        )
        answer: Answer = retrying(self._once, _Call(method, path, query, body, content), shape)
        return answer

    def _once(self, call: _Call, shape: Callable[[Json], Json] | None) -> Answer:
        method, path = call.method, call.path
        response = self._granted(call)
        with closing(response):
            self._check(method, path, response)
            try:
                text = response.read(MAX_ANSWER_BYTES)
                found = _read(text, shape) if text else {}
            except self._transport_errors() as err:
                raise BackendError(f"{method} {path}: the answer broke off: {err}", transient=True) from err
            except (ValueError, RecursionError) as err:
                raise BackendError(
                    f"{method} {path}: the answer is not valid JSON: {err}", transient=True
                ) from err
            return Answer(found, _date(response.headers.get("Date")))

    def _granted(self, call: _Call) -> Any:
        """The answer; a refusal by RBAC is final only if the server knows its roles.

        Raises:
            RefusedError: It has just started; retry.
        """
        response = self._send(call)
        if int(response.status) != 403:
            return response
        with closing(response):
            refusal = _refusal(call.method, call.path, response)
        if "cannot" in str(refusal) and self._is_starting():
            message = f"{refusal}; the API server has just started and does not know its roles yet"
            raise RefusedError(message, status=403, reason="Forbidden", retry_after_s=None, is_starting=True)
        if "cannot" not in str(refusal):
            raise refusal
        return self._send(call)  # it may have read them since

    def _is_starting(self) -> bool:
        """True while the server has not read its roles: it is not ready, or refuses public requests.

        Source: Kubernetes, API server health endpoints (``informer-sync``); default roles
        ``system:public-info-viewer`` and ``system:basic-user``, of which hardened clusters lack the first.
        """
        ready = self._status_of(_Call("GET", "/readyz"))
        if ready not in (401, 403, 404):
            return ready >= 500
        asked = self._status_of(_Call("POST", _REVIEWS, body=_review({"verb": "get", "resource": "pods"})))
        return asked == 403 or asked >= 500

    def _status_of(self, call: _Call) -> int:
        with closing(self._send(call)) as response:
            response.read(1 << 20)
            return int(response.status)

    def _send(self, call: _Call) -> Any:
        import urllib3  # noqa: PLC0415  # comes with the client

        url = self.host + quote(call.path) + (f"?{urlencode(call.query)}" if call.query else "")
        headers = {"Accept": "application/json", "User-Agent": "envscaler-airflow"}
        if call.body is not None:
            headers["Content-Type"] = _CONTENT[call.content]
        try:
            headers |= self._credentials()
            return self._api.rest_client.pool_manager.request(
                call.method,
                url,
                headers=headers,
                body=None if call.body is None else json.dumps(call.body).encode(),
                timeout=urllib3.Timeout(connect=10.0, read=call.read_timeout_s),
                preload_content=False,
                retries=False,
                redirect=False,
            )
        except self._transport_errors() as err:
            where = f"{call.method} {self.host}{call.path}"
            raise BackendError(f"{where}: no answer: {err}", transient=True) from err

    def _credentials(self) -> dict[str, str]:
        """Headers from the configuration, with a token that it renews by itself."""
        headers = {}
        for entry in self._api.configuration.auth_settings().values():
            if entry.get("in") == "header" and entry.get("value"):
                headers[str(entry["key"])] = str(entry["value"])
        return headers

    @staticmethod
    def _transport_errors() -> tuple[type[Exception], ...]:
        import urllib3  # noqa: PLC0415  # comes with the client

        unreadable: type[Exception] = import_module("kubernetes.config").ConfigException  # for a token
        return (urllib3.exceptions.HTTPError, OSError, unreadable)

    @staticmethod
    def _check(method: str, path: str, response: Any) -> None:
        """Raise unless the answer is a success."""
        if int(response.status) >= 300:
            raise _refusal(method, path, response)


_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def _review(of: Mapping[str, str]) -> Json:
    """The question whether this identity may make a call."""
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": dict(of)},
    }


def _refusal(method: str, path: str, response: Any) -> RefusedError:
    """The error of an answer; its message names the verb that was refused."""
    status, text = int(response.status), response.read(1 << 20)
    try:
        body = json.loads(text)
        reason, message = str(body.get("reason") or ""), str(body.get("message") or "")
    except (ValueError, AttributeError, RecursionError):
        reason, message = "", text.decode("utf-8", errors="replace").strip()[:500]
    if status == 403 and "cannot" in message:
        message += f" (verb {_VERBS[method]}); `envscaler kubernetes rbac` prints the Role that is needed"
    retry_after = response.headers.get("Retry-After", "")
    kind = ForbiddenError if status == 403 else RefusedError
    return kind(
        f"{method} {path}: {status} {message or reason}",
        status=status,
        reason=reason,
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )


def _with_items(each: Callable[[Json], Any], body: Json) -> Json:
    """A list with the result of *each* for its items."""
    return {**body, "items": [each(item) for item in body.get("items") or ()]}


def _read(text: bytes, shape: Callable[[Json], Json] | None) -> Json:
    """Parse JSON into the shape that is kept.

    Garbage collection is off while it parses, and reference counting frees what is not kept. A collection
    would move the parsed objects to the old generation and soon scan all of the process, with every thread
    waiting.
    """
    if shape is None:
        found: Json = json.loads(text)
        return found
    was_on = gc.isenabled()
    gc.disable()
    try:
        return shape(json.loads(text))
    finally:
        if was_on:
            gc.enable()


def _is_busy(err: BaseException) -> bool:
    """True if the same call may be repeated; the caller handles an expired watch or token."""
    return isinstance(err, BackendError) and err.transient and err.status not in (401, 410)


def _wait(state: tenacity.RetryCallState) -> float:
    """The wait that the server requests, else 1, 2, 4 s."""
    err = state.outcome.exception() if state.outcome else None
    asked = err.retry_after_s if isinstance(err, RefusedError) else None
    return min(10.0, asked) if asked is not None else wait_s(state.attempt_number, first_s=1.0, most_s=4.0)


def _date(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
