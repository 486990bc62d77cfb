"""Plays the requests of a recording to the fake, at the recorded times, as the recorded callers."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from fakes.kubernetes import CONFIG_MAPS, PODS, REAL_PACE, Cluster, Program
from fakes.kubernetes.store import Change
from fakes.recordings import RANDOM, UID, event_digest, histories, job_digest, pod_digest

Object = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """The fake's answer to one recorded request."""

    step: Object
    status: int
    body: Any
    headers: dict[str, str]


@dataclass(slots=True)
class Replay:
    """A cluster like the recorded one, with its answers and writes."""

    recording: Object
    cluster: Cluster
    answers: list[Answer] = field(default_factory=list)
    changes: list[tuple[str, float, str, Object]] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    uids: dict[str, str] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    is_compacted: bool = False
    early: set[int] = field(default_factory=set)
    began: float = 0.0

    def run(self) -> None:
        """Play all steps, then let the recorded time run out."""
        self.cluster.store.listeners.append(self._hear)
        began = self.cluster.clock.now()
        self.began = began
        for step in self.recording["steps"]:
            if id(step) not in self.early:
                self._play(step)
        self.cluster.advance(max(0.0, began + self.recording["last_s"] + 2 - self.cluster.clock.now()))

    def _play(self, step: Object) -> None:
        self.cluster.advance(max(0.0, self.began + step["t_s"] - self.cluster.clock.now()))
        if "action" in step:
            self._act(step["action"])
        else:
            self._ask(step)

    def _meanwhile(self, step: Object) -> None:
        """While a stream is open: the other requests of that time, then its end."""
        until = step["response"].get("end_t_s", step["t_s"])
        for other in self.recording["steps"]:
            if step["t_s"] < other["t_s"] <= until and "request" in other:
                self.early.add(id(other))
                self._play(other)
        self.cluster.advance(max(0.0, self.began + until - self.cluster.clock.now()))
        self.cluster.end_watches()

    def _hear(self, change: Change) -> None:
        item = json.loads(json.dumps(change.item))
        at = self.cluster.clock.now() - self.began
        self.changes.append((change.resource.plural, at, change.kind, item))

    def histories(self, kind: str) -> dict[str, list[Object]]:
        """Histories of the namespace's objects, in the form of `recordings.reduced`."""
        digest = {"jobs": job_digest, "pods": pod_digest}[kind]
        return histories([one[1:] for one in self.changes if one[0] == kind], digest)

    def events(self) -> set[str]:
        """Digests of all events."""
        return {event_digest(item) for what, _at, _how, item in self.changes if what == "events"}

    def _act(self, action: str) -> None:
        if found := re.match(r"node (\S+) goes silent", action):
            self.cluster.node(found.group(1)).silence()
        elif action.startswith("kubelet of node0 frozen"):
            self.cluster.node("node0").silence()
            self.cluster.node("fake-1").edit(
                lambda node: node["metadata"]["labels"].update({"rec/pool": "p"})
            )
        elif action.startswith("kubelet of node0 runs again"):
            self.cluster.node("node0").revive()
        elif action.startswith("store compacted"):
            self.is_compacted = True
            self.cluster.create(CONFIG_MAPS, {"metadata": {"generateName": "later-"}})
            self.cluster.compact()

    def _ask(self, step: Object) -> None:
        request = step["request"]
        path = self._translated(request["path"])
        if request["method"] == "DELETE" and "/nodes/" in path:
            self.cluster.node(path.rpartition("/")[2]).silence()  # the recorded node had no kubelet
        body = request.get("body")
        text = body if isinstance(body, str) else None if body is None else json.dumps(body)
        data = None if text is None else self._translated(text).encode()
        headers = {"Content-Type": request.get("content_type") or "application/json"}
        if request.get("accept"):
            headers["Accept"] = request["accept"]
        token = self._token(request.get("as"))
        if token:
            headers["Authorization"] = f"Bearer {token}"
        timer = threading.Timer(0.3, self._meanwhile, [step])
        is_stream = "watch=" in path or "follow=" in path
        if is_stream:
            timer.start()
        try:
            status, answered, answer_headers = self._send(request["method"], path, data, headers)
        finally:
            timer.cancel()
            if is_stream:
                timer.join()  # if it has started: its requests end before the cluster does
        self._learn(step, answered)
        self.answers.append(Answer(step, status, answered, answer_headers))

    def _token(self, caller: str | None) -> str:
        if caller is None:
            return self.cluster.access.admin_token
        if caller == "anonymous":
            return ""
        return self.tokens.get(caller, "no-such-token")

    def _translated(self, text: str) -> str:
        """Replace the recorded uids, pod names and versions by this cluster's."""
        text = UID.sub(lambda found: self.uids.get(found.group(0), found.group(0)), text)

        def rename(found: re.Match[str]) -> str:
            name = found.group(1)
            if not RANDOM.search(name):
                return found.group(0)
            pods = [pod["metadata"]["name"] for pod in self.cluster.list(PODS)]
            same = [one for one in pods if one == name or one[:-5] == name[:-5]]
            return found.group(0).replace(name, same[-1]) if same else found.group(0)

        now = "1" if self.is_compacted else str(self.cluster.store.revision)
        text = re.sub(r"resourceVersion=\d{4}\b", f"resourceVersion={now}", text)
        for old, new in self.pages.items():
            text = text.replace(f"continue={old}", f"continue={new}")
        return re.sub(r"(?:/pods/|metadata\.name%3D)([a-z0-9.-]+)", rename, text)

    def _learn(self, step: Object, answered: Any) -> None:
        recorded = step["response"].get("body")
        if not isinstance(recorded, dict) or not isinstance(answered, dict):
            return
        old_token, new_token = (one.get("metadata", {}).get("continue") for one in (recorded, answered))
        if old_token and new_token:
            self.pages[old_token] = new_token
        pairs = [(recorded, answered)]
        if "items" in recorded and "items" in answered:
            pairs = list(zip(recorded["items"] or [], answered["items"] or [], strict=False))
        for old, new in pairs:
            if old.get("metadata", {}).get("uid") and new.get("metadata", {}).get("uid"):
                self.uids[old["metadata"]["uid"]] = new["metadata"]["uid"]
        if answered.get("kind") == "TokenRequest" and answered.get("status"):
            _, _, namespace, _, name, _ = step["request"]["path"].strip("/").split("/")[1:]
            del _
            self.tokens[f"system:serviceaccount:{namespace}:{name}"] = answered["status"]["token"]

    def _send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        request = urllib.request.Request(self.cluster.url + path, data, headers, method=method)

        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, _decoded(answer.read()), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read()), dict(error.headers)


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def cluster_like_recorded() -> Cluster:
    """One node of 2 CPUs with 4 GPUs, four of 64 CPUs with 8; three images that do not exist."""
    cluster = Cluster(nodes=0, speed=0, pace=REAL_PACE)
    cluster.add_node("node0", cpu="2", memory="24Gi", gpus=4, labels={"rec/pool": "p"})
    for number in range(4):
        cluster.add_node(f"fake-{number}", cpu="64", memory="256Gi", gpus=8)
    for image in ("127.0.0.1:5000/team/nope:1", "registry.invalid/*", "registry.local/absent:1"):
        cluster.images.missing(image)
    cluster.script(Program(seconds=0, oom=True), pod="oom*")
    lines = [(float(at), f"line {at + 1}\nerr {at + 1}\n") for at in range(8)]
    cluster.script(Program(seconds=8, prints=(*lines, (8.0, "no-newline-at-end"))), pod="talk")
    cluster.node("node0").refuse_resizes()
    return cluster
