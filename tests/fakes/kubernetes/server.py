"""HTTP: the ASGI application that serves the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from fakes.kubernetes import deletion, discovery, errors, execs, watching
from fakes.kubernetes.access import PUBLIC, Question, User
from fakes.kubernetes.api import Options
from fakes.kubernetes.bodies import decoded
from fakes.kubernetes.clock import Clock
from fakes.kubernetes.errors import ApiError
from fakes.kubernetes.faults import DroppedError
from fakes.kubernetes.objects import Object
from fakes.kubernetes.resources import JOBS
from fakes.kubernetes.routing import Call, parse
from fakes.kubernetes.subresources import special

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Server:
    """One ASGI application for a cluster; runs in the cluster's own thread."""

    def __init__(self, cluster: Cluster) -> None:
        """Serve *cluster*."""
        self.cluster = cluster
        self.watches: set[watching.Watch] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await execs.answer(self.cluster, scope, receive, send)
        if scope["type"] != "http":
            return
        send = _Dated(send, self.cluster.clock)
        self.cluster.requests.append((scope["method"], scope["path"] + "?" + scope["query_string"].decode()))
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            await _send(send, error.code, error.body, error.headers)
        except DroppedError:
            await _drop(send)
        except OSError:
            return  # the caller hung up
        except Exception as error:  # noqa: BLE001 - a fault of the fake: the cluster raises it at its end
            self.cluster.trouble.append(error)
            await _drop(send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.cluster.faults.down:
            raise DroppedError
        path = scope["path"]
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        user = self.cluster.access.who(headers.get("authorization"))
        if path.rstrip("/") == "/readyz":
            self.cluster.access.readiness(user)
        found = discovery.answer(path, self.cluster.resources, self.cluster.minor)
        if found is not None:
            if user.name == "system:anonymous" and not path.startswith(PUBLIC):
                why = f'forbidden: User "{user.name}" cannot get path "{path}"'
                raise ApiError(403, errors.status(403, "Forbidden", why, {}))
            await _send(send, 200, found)
            return
        query = dict(urllib.parse.parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
        call = parse(self.cluster.resources, scope["method"], path, query, headers)
        question = Question(call.verb, call.resource.group, call.what, call.namespace, call.name)
        self.cluster.access.check(user, call.resource, question)
        body = await _read(receive)
        await self._trouble(call, "before")
        await self._dispatch(call, user, body, receive, send)

    async def _trouble(self, call: Call, when: Any) -> None:
        fault = self.cluster.faults.take(call.verb, call.what, call.name, when)
        if fault is None:
            return
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.drop:
            raise DroppedError
        if fault.status:
            raise fault.answer()

    async def _dispatch(self, call: Call, user: User, body: bytes, receive: Receive, send: Send) -> None:
        if call.verb == "watch":
            await self._watch(call, receive, send)
            return
        if call.what == "pods/log":
            hanging_up = asyncio.ensure_future(_hang_up(receive))
            try:
                await self.cluster.logs.answer(call, send, hanging_up)
            finally:
                hanging_up.cancel()
            return
        handler = _HANDLERS.get(call.verb)
        if handler is None:
            raise errors.no_such_method()
        answered = special(self.cluster, call, user, body)
        code, answer, headers = answered if answered is not None else handler(self.cluster, call, body)
        await self._trouble(call, "after")
        await _send(send, code, shaped(answer, call.headers.get("accept", "")), headers)

    async def _watch(self, call: Call, receive: Receive, send: Send) -> None:
        selection = watching.select(call.resource, call.namespace, call.query, call.name)
        wants_partial = "PartialObjectMetadata" in call.headers.get("accept", "")
        watch = watching.Watch(self.cluster.store, selection, call.query, as_partial=wants_partial)
        if call.query.get("resourceVersion", "0").isdigit() is False:
            watching.list_items(self.cluster.store, selection, call.query)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        self.cluster.watches.append(watch)
        hanging_up = asyncio.ensure_future(_hang_up(receive))
        hanging_up.add_done_callback(lambda _task: watch.queue.put_nowait("close"))
        try:
            async for frame in watch.frames(self.cluster.stopped):
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            hanging_up.cancel()
            self.cluster.watches.remove(watch)


class _Dated:
    """Sends answers with the cluster's own time as ``Date``, like the times of the objects."""

    def __init__(self, send: Send, clock: Clock) -> None:
        """Send with *send*, dated by *clock*."""
        self.send, self._clock = send, clock

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Date the head of an answer; a body is unchanged."""
        if message["type"] == "http.response.start":
            date = formatdate(self._clock.now(), usegmt=True).encode()
            message = {**message, "headers": [*message.get("headers", ()), (b"date", date)]}
        await self.send(message)


async def _drop(send: Send) -> None:
    """Close the connection at once; uvicorn's cycle behind *send* knows it."""
    cycle: Any = getattr(getattr(send, "send", send), "__self__", None)
    cycle.transport.abort()
    while not cycle.disconnected:  # noqa: ASYNC110 - a flag, and no event
        await asyncio.sleep(0)


async def _hang_up(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def shaped(answer: Any, accept: str) -> Any:
    """Reduce objects to their metadata if the caller accepts PartialObjectMetadata."""
    if "PartialObjectMetadata" not in accept or not isinstance(answer, dict):
        return answer
    if "items" in answer:
        items = [{"metadata": item["metadata"]} for item in answer["items"]] or None
        return {
            "kind": "PartialObjectMetadataList",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": answer["metadata"],
            "items": items,
        }
    return watching.partial(answer) if answer.get("kind") != "Status" else answer


async def _send(send: Send, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
    text = isinstance(body, str)
    data = body.encode() if isinstance(body, str) else json.dumps(body, separators=(",", ":")).encode()
    kind = "text/plain; charset=utf-8" if text else "application/json"
    listed = {"Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-cache, private"}
    pairs = [(key.lower().encode(), value.encode()) for key, value in (listed | (headers or {})).items()]
    await send({"type": "http.response.start", "status": code, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


Answer = tuple[int, Any, dict[str, str]]


def _options(call: Call) -> Options:
    dry = call.query.get("dryRun", "")
    if dry not in {"", "All"}:
        fault = {"reason": "FieldValueNotSupported", "field": "dryRun",
                 "message": f'Unsupported value: ["{dry}"]: supported values: "All"'}  # fmt: skip
        raise errors.invalid("CreateOptions.meta.k8s.io", "", [fault])
    strict = call.query.get("fieldValidation") == "Strict"
    return Options(dry_run=dry == "All", strict=strict, field_manager=call.query.get("fieldManager", ""))


def _warned(options: Options) -> dict[str, str]:
    return {"Warning": ", ".join(options.warnings)} if options.warnings else {}


def _get(cluster: Cluster, call: Call, _body: bytes) -> Answer:
    return 200, cluster.api.read(call.resource, call.namespace, call.name), {}


def _list(cluster: Cluster, call: Call, _body: bytes) -> Answer:
    selection = watching.select(call.resource, call.namespace, call.query)
    return 200, watching.list_items(cluster.store, selection, call.query), {}


def _create(cluster: Cluster, call: Call, body: bytes) -> Answer:
    options = _options(call)
    item = decoded(call, body)
    return 201, cluster.api.create(call.resource, call.namespace, item, options), _warned(options)


def _update(cluster: Cluster, call: Call, body: bytes) -> Answer:
    options = _options(call)
    item = decoded(call, body)
    fresh = cluster.api.update(call.resource, call.namespace, call.name, item, call.subresource, options)
    return 200, fresh, _warned(options)


def _patch(cluster: Cluster, call: Call, body: bytes) -> Answer:
    options = _options(call)
    kind = call.headers.get("content-type", "").partition(";")[0].strip()
    item = decoded(call, body)
    where = (call.resource, call.namespace, call.name)
    if kind == "application/apply-patch+yaml":
        return 200, cluster.api.apply(*where, item, options), _warned(options)
    return 200, cluster.api.patch(*where, kind, item, call.subresource, options), _warned(options)


def _delete_options(call: Call, body: bytes) -> Object:
    options: Object = json.loads(body) if body.strip() else {}
    if "propagationPolicy" in call.query:
        options.setdefault("propagationPolicy", call.query["propagationPolicy"])
    if "gracePeriodSeconds" in call.query:
        options.setdefault("gracePeriodSeconds", int(call.query["gracePeriodSeconds"]))
    if call.query.get("dryRun"):
        options["dryRun"] = ["All"]
    return options


def _delete(cluster: Cluster, call: Call, body: bytes) -> Answer:
    options = _delete_options(call, body)
    headers = {}
    if call.resource is JOBS and not options.get("propagationPolicy"):
        headers["Warning"] = deletion.WARNING
    try:
        if options.get("propagationPolicy") not in {None, *deletion.POLICIES}:
            nobody: Object = {"metadata": {"name": call.name, "uid": ""}}
            deletion.check_options(call.resource, nobody, options)
        return 200, cluster.api.delete(call.resource, call.namespace, call.name, options), headers
    except ApiError as error:
        error.headers |= headers
        raise


def _delete_all(cluster: Cluster, call: Call, body: bytes) -> Answer:
    options = _delete_options(call, body)
    selection = watching.select(call.resource, call.namespace, call.query)
    listed = watching.list_items(cluster.store, selection, {})
    for item in [one for one in cluster.store.all(call.resource, call.namespace) if selection.has(one)]:
        cluster.api.delete(
            call.resource, item["metadata"].get("namespace", ""), item["metadata"]["name"], options
        )
    return 200, listed, {}


_HANDLERS: dict[str, Callable[[Cluster, Call, bytes], Answer]] = {
    "get": _get,
    "list": _list,
    "create": _create,
    "update": _update,
    "patch": _patch,
    "delete": _delete,
    "deletecollection": _delete_all,
}
