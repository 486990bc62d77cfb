"""``pods/NAME/exec`` over a WebSocket: a command in a container that really runs, and its output."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import psutil
from fakes.kubernetes.access import Question
from fakes.kubernetes.errors import ApiError, bad_request
from fakes.kubernetes.processes import Process
from fakes.kubernetes.resources import PODS

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

PROTOCOL = "v4.channel.k8s.io"
STDOUT, STDERR, ERROR = b"\x01", b"\x02", b"\x03"
"""Channels of the protocol: the first byte of each message."""

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def answer(cluster: Cluster, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Serve one exec: the command's output, its end as a Status, and the end of the connection."""
    await receive()
    try:
        process, command = _asked(cluster, scope)
    except ApiError:
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "websocket.accept", "subprotocol": PROTOCOL})
    inside = psutil.Process(process.pid).children()
    enter = [
        "nsenter",
        "--target",
        str(inside[0].pid if inside else process.pid),
        "--mount",
        "--pid",
        "--root",
    ]
    ran = await asyncio.create_subprocess_exec(
        *enter,
        *command,
        env=process.environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, faults = await ran.communicate()
    status = {"metadata": {}, "status": "Failure" if ran.returncode else "Success"}
    for channel, data in ((STDOUT, printed), (STDERR, faults), (ERROR, json.dumps(status).encode())):
        if data:
            await send({"type": "websocket.send", "bytes": channel + data})
    await send({"type": "websocket.close", "code": 1000})


def _asked(cluster: Cluster, scope: MutableMapping[str, Any]) -> tuple[Process, list[str]]:
    """The container's process and the command; raises ApiError."""
    headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
    query = urllib.parse.parse_qs(scope["query_string"].decode())
    parts = scope["path"].strip("/").split("/")
    if len(parts) != 7 or parts[6] != "exec":
        raise bad_request("no such stream")
    namespace, name = parts[3], parts[5]
    user = cluster.access.who(headers.get("authorization"))
    cluster.access.check(user, PODS, Question("create", "", "pods/exec", namespace, name))
    pod = cluster.api.read(PODS, namespace, name)
    run = cluster.kubelets[pod["spec"]["nodeName"]].runs.get(pod["metadata"]["uid"])
    wanted = (query.get("container") or [pod["spec"]["containers"][0]["name"]])[0]
    found = [one.execution for one in (run.containers if run else ()) if one.name == wanted]
    if not found or not isinstance(found[0], Process) or found[0].pid == 0:
        raise bad_request(f"container {wanted} is not running")
    return found[0], query["command"]
