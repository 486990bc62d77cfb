"""Recordings of a real API server: digests of them, and their replay against the fake.

Run as ``python tests/fakes/recordings.py RECORDINGS FOLDER`` it writes reduced copies of *RECORDINGS* into
*FOLDER*:
complete requests and answers, watch streams as digests.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

Object = dict[str, Any]

RANDOM = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}$")
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NAME_INSIDE = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}(?=$|[\s\"/_,])")


def load(path: Path) -> Object:
    """Read a recording, packed or not."""
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def bare(text: str) -> str:
    """Remove random names, uids and addresses from a message."""
    text = UID.sub("UID", text)
    text = _NAME_INSIDE.sub("-RANDOM", text)
    return re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "ADDRESS", text)


def stem(name: str) -> str:
    """Name without the random end."""
    return RANDOM.sub("", name)


def job_digest(item: Object) -> Object:
    """The relevant part of a Job's status; `ready` and uids depend on the moment."""
    status = item["status"]
    numbers = ("active", "failed", "succeeded", "completedIndexes", "failedIndexes")
    kept: Object = {name: status[name] for name in numbers if name in status}
    kept["conditions"] = [
        [one["type"], one["status"], one.get("reason", ""), bare(one.get("message", ""))]
        for one in status.get("conditions") or ()
    ]
    return kept


def pod_digest(item: Object) -> Object:
    """The relevant part of a pod: phase, reason, disruption, the states of containers."""
    status, meta = item["status"], item["metadata"]
    kept: Object = {"phase": status.get("phase"), "reason": status.get("reason", "")}
    kept["conditions"] = sorted(
        f"{one['type']}={one['status']} {one.get('reason', '')}".strip()
        for one in status.get("conditions") or ()
        if one["type"] != "PodReadyToStartContainers"
    )
    kept["containers"] = [
        _state(one)
        for one in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    ]
    kept["grace"] = meta.get("deletionGracePeriodSeconds")
    return kept


def _state(one: Object) -> str:
    (kind, state), *_ = one["state"].items()
    parts = [
        one["name"],
        kind,
        state.get("reason", ""),
        str(state.get("exitCode", "")),
        f"#{one['restartCount']}",
    ]
    return " ".join(part for part in parts if part)


def event_digest(item: Object) -> str:
    """Reporter, reason and object of an event."""
    about = item["involvedObject"]
    who = item.get("reportingComponent", "")
    what = f"{about['kind']} {stem(about['name'])} {item['type']} {item['reason']}"
    return f"{what} [{who}] {bare(item['message'])}"


def histories(changes: list[tuple[float, str, Object]], digest: Any) -> dict[str, list[list[Object]]]:
    """By name without its random end: digests without repeats of each object, oldest first.

    `at` says when a digest was first true, in seconds since the start.
    """
    by_uid: dict[str, tuple[str, list[Object]]] = {}
    for at, kind, item in changes:
        meta = item["metadata"]
        _name, seen = by_uid.setdefault(meta["uid"], (stem(meta["name"]), []))
        fresh = digest(item) if kind != "DELETED" else {"gone": True}
        if not seen or {**seen[-1], "at": 0} != {**fresh, "at": 0}:
            seen.append({**fresh, "at": round(at, 1)})
    found: dict[str, list[list[Object]]] = {}
    for name, seen in by_uid.values():
        found.setdefault(name, []).append(seen)
    return found


def reduced(recording: Object) -> Object:
    """A recording with its watch streams as digests."""
    streams = recording.get("watch") or {}

    def changes(kind: str) -> list[tuple[float, str, Object]]:
        return [(one["t_s"], one["type"], one["object"]) for one in streams.get(kind) or ()]

    last = max([one["t_s"] for stream in streams.values() for one in stream] or [0.0])
    return {
        "scenario": recording["scenario"],
        "title": recording["title"],
        "kubernetes_version": recording["kubernetes_version"],
        "steps": recording["steps"],
        "last_s": last,
        "jobs": histories(changes("jobs"), job_digest),
        "pods": histories(changes("pods"), pod_digest),
        "events": sorted({event_digest(item) for _at, _kind, item in changes("events")}),
    }


def main(source: str, target: str) -> None:
    """Reduce all recordings of a folder."""
    for path in sorted(Path(source).glob("*.json*")):
        recording = reduced(load(path))
        data = json.dumps(recording, separators=(",", ":"), sort_keys=True).encode()
        name = path.name.removesuffix(".gz").removesuffix(".json")
        (Path(target) / f"{name}.json.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
