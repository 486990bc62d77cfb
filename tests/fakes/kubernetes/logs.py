"""What containers print, and the log endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fakes.kubernetes import errors
from fakes.kubernetes.errors import ApiError, bad_request, cause, invalid
from fakes.kubernetes.objects import Object, nano_stamp, seconds_of
from fakes.kubernetes.resources import PODS
from fakes.kubernetes.routing import TRUE, Call

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Log:
    """The output of a container between two starts: (time, text) by line; the last may lack its newline."""

    cluster: Cluster
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, _stream: str, text: bytes) -> None:
        """Add output, cut into lines."""
        now = self.cluster.clock.now()
        for line in text.splitlines(keepends=True):
            if self.lines and not self.lines[-1][1].endswith(b"\n"):
                self.lines[-1] = (self.lines[-1][0], self.lines[-1][1] + line)
            else:
                self.lines.append((now, line))
        self._wake()

    def close(self) -> None:
        """End the output."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Logs:
    """Logs of all containers, by pod uid and container name, those before the last restart too."""

    def __init__(self, cluster: Cluster) -> None:
        """Start empty."""
        self._cluster = cluster
        self._kept: dict[tuple[str, str], list[Log]] = {}
        self.lost: set[tuple[str, str]] = set()
        """Logs that the kubelet no longer finds, by pod uid and container."""

    def begin(self, uid: str, container: str) -> Log:
        """A container starts, or restarts."""
        log = Log(self._cluster)
        lives = self._kept.setdefault((uid, container), [])
        lives.append(log)
        del lives[:-2]
        return log

    def end(self, uid: str, container: str) -> None:
        """A container ended."""
        for log in self._kept.get((uid, container), [])[-1:]:
            log.close()

    def forget(self, uid: str) -> None:
        """The pod is gone: end the open readers."""
        for key in [key for key in self._kept if key[0] == uid]:
            for log in self._kept.pop(key):
                log.close()

    def text(self, uid: str, container: str) -> bytes:
        """Everything that a container has printed since its last start."""
        lives = self._kept.get((uid, container)) or []
        return b"".join(line for _at, line in lives[-1].lines) if lives else b""

    async def answer(self, call: Call, send: Send, hanging_up: asyncio.Future[None]) -> None:
        """Serve ``pods/NAME/log``."""
        pod = self._cluster.api.read(PODS, call.namespace, call.name)
        options = _checked(call)
        name = _container(pod, options.get("container", ""))
        if not pod["spec"].get("nodeName"):
            await _begin(send, 204)
            await send({"type": "http.response.body", "body": b""})
            return
        self._check_node(pod, name)
        if (pod["metadata"]["uid"], name) in self.lost:
            await _begin(send, 200)
            await send({"type": "http.response.body", "body": _lost_text(pod, name).encode()})
            return
        log = self._pick(pod, name, previous=options.get("previous") in TRUE)
        shown = _Reader(log, options, self._cluster.clock.now())
        await _begin(send, 200)
        await send({"type": "http.response.body", "body": shown.next(), "more_body": True})
        follow = options.get("follow") in TRUE
        while follow and not (log.is_over or hanging_up.done() or self._cluster.stopped.is_set()):
            try:
                await asyncio.wait_for(log.changed.wait(), 0.5)
            except TimeoutError:
                continue
            await send({"type": "http.response.body", "body": shown.next(), "more_body": True})
        await send({"type": "http.response.body", "body": shown.next()})

    def _check_node(self, pod: Object, name: str) -> None:
        node = pod["spec"]["nodeName"]
        kubelet = self._cluster.kubelets.get(node)
        if kubelet is not None and kubelet.is_alive:
            return
        place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}/{name}"
        message = f'Get "https://{node}:10250/containerLogs/{place}": dial tcp: lookup {node}: no such host'
        raise ApiError(500, errors.status(500, None, message))

    def _pick(self, pod: Object, name: str, *, previous: bool) -> Log:
        lives = self._kept.get((pod["metadata"]["uid"], name)) or []
        title = pod["metadata"]["name"]
        if previous:
            if len(lives) < 2:
                raise bad_request(f'previous terminated container "{name}" in pod "{title}" not found')
            return lives[-2]
        if lives:
            return lives[-1]
        shown = [
            *(pod["status"].get("containerStatuses") or ()),
            *(pod["status"].get("initContainerStatuses") or ()),
        ]
        found = next((one for one in shown if one["name"] == name), None)
        reason = ((found or {}).get("state", {}).get("waiting") or {}).get("reason", "ContainerCreating")
        if reason in {"ErrImagePull", "ImagePullBackOff"}:
            raise bad_request(
                f'container "{name}" in pod "{title}" is waiting to start: image can\'t be pulled'
            )
        raise bad_request(f'container "{name}" in pod "{title}" is waiting to start: {reason}')


def _lost_text(pod: Object, container: str) -> str:
    """The kubelet's answer, with status 200, where the runtime has removed the file."""
    meta = pod["metadata"]
    path = f"/var/log/pods/{meta['namespace']}_{meta['name']}_{meta['uid']}/{container}/0.log"
    return f'failed to try resolving symlinks in path "{path}": lstat {path}: no such file or directory'


async def _begin(send: Send, code: int) -> None:
    headers = [(b"content-type", b"text/plain")] if code == 200 else []
    await send({"type": "http.response.start", "status": code, "headers": headers})


class _Reader:
    """The requested part of a log."""

    def __init__(self, log: Log, options: dict[str, str], now: float) -> None:
        since = 0.0
        if "sinceSeconds" in options:
            since = now - int(options["sinceSeconds"])
        elif "sinceTime" in options:
            since = seconds_of(options["sinceTime"])
        self._log = log
        self._stamped = options.get("timestamps") in TRUE
        self._room = int(options["limitBytes"]) if "limitBytes" in options else None
        first = next((at for at, line in enumerate(log.lines) if line[0] >= since), len(log.lines))
        if "tailLines" in options:
            first = max(first, len(log.lines) - int(options["tailLines"]))
        self._at = first
        self._part = 0

    def next(self) -> bytes:
        """New text since the last call."""
        parts: list[bytes] = []
        while self._at < len(self._log.lines):
            at, line = self._log.lines[self._at]
            prefix = nano_stamp(at).encode() + b" " if self._stamped and not self._part else b""
            parts.append(prefix + line[self._part :])
            if not line.endswith(b"\n"):
                self._part = len(line)
                break
            self._at, self._part = self._at + 1, 0
        data = b"".join(parts)
        if self._room is not None:
            data = data[: self._room]
            self._room -= len(data)
        return data


def _checked(call: Call) -> dict[str, str]:
    options, name = call.query, call.name

    def refuse(field_name: str, reason: str, message: str, value: str | None = None) -> ApiError:
        return invalid("PodLogOptions", name, [cause(field_name, reason, message, value)])

    if "sinceSeconds" in options and "sinceTime" in options:
        text = "at most one of `sinceTime` or `sinceSeconds` may be specified"
        raise refuse("[]", "FieldValueForbidden", text)
    if "sinceSeconds" in options and int(options["sinceSeconds"]) < 1:
        raise refuse("sinceSeconds", "FieldValueInvalid", "must be greater than 0", options["sinceSeconds"])
    if "tailLines" in options and int(options["tailLines"]) < 0:
        text = "must be greater than or equal to 0"
        raise refuse("tailLines", "FieldValueInvalid", text, options["tailLines"])
    if "stream" in options:
        raise refuse("stream", "FieldValueForbidden", "may not be specified")
    if "sinceTime" in options:
        try:
            seconds_of(options["sinceTime"])
        except ValueError:
            text = options["sinceTime"]
            message = f'parsing time "{text}" as "2006-01-02T15:04:05Z07:00": cannot parse "{text}" as "2006"'
            raise bad_request(message) from None
    return options


def _container(pod: Object, asked: str) -> str:
    mains = [one["name"] for one in pod["spec"]["containers"]]
    inits = [one["name"] for one in pod["spec"].get("initContainers") or ()]
    title = pod["metadata"]["name"]
    if asked:
        if asked not in [*mains, *inits]:
            raise bad_request(f"container {asked} is not valid for pod {title}")
        return asked
    sidecars = [
        one["name"] for one in pod["spec"].get("initContainers") or () if one.get("restartPolicy") == "Always"
    ]
    default = (pod["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
    if default:
        return str(default)
    if len(mains) > 1:
        raise bad_request(
            f"a container name must be specified for pod {title}, choose one of: [{' '.join(mains)}]"
            + (f" or one of the init containers: [{' '.join([*inits])}]" if inits or sidecars else "")
        )
    return str(mains[0])
