"""The fake API server answers and acts as the recorded Kubernetes 1.36.2 did, in some thirty situations.

Every recorded request is sent again, at its recorded time and by its recorded caller. The tests compare the
answer's code; reason, message, details and Retry-After of refusals; the fields of an object; the history of
every Job and pod; and the events. Differences on purpose, or due to the recorded cluster's own circumstances,
are listed below.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.recordings import bare, load
from fakes.replay import Replay, cluster_like_recorded

FOLDER = Path(__file__).parents[1] / "data" / "kubernetes"
NOT_PLAYED = {
    "22b-device-plugin": "its device plugin is outside the API",
    "31-evicted-local-storage": "its containers fill a disk",
    "32-too-many-requests": "priority and fairness is outside the fake; faults stand for it",
}
SCENARIOS = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))

OTHER_ANSWER = {
    "02": {"/endpoints/": "the legacy kind is not served"},
    "25": {"fieldManager=m2": "nobody keeps account of field managers"},
    "26": {
        "/onfake/log": "the recorded node has no kubelet",
        "/again/log": "a clock in the text",
        "/prev/log": "a clock in the text",
        "sinceTime=2026": "the recorded clock",
    },
    "30": {"/livez?verbose": "no parts to list"},
}
"""Requests whose answers are not compared, by a part of the path."""

OTHER_HISTORY = {
    "04": {"oops": "the fake restarts faster than the controller looks"},
    "17": {"a": "RestartContainer takes no time here", "shrink": "the fake has no use to compare with"},
    "23": {"crashside": "CrashLoopBackOff is shown at once here"},
    "26": {"again": "the same", "onfake": "no kubelet", "prev": "the same", "talk": "read before its end"},
    "29": {"train-j9lv4": "a random name", "y" * 58 + "9dc8x": "a random name"},
}
FAKE_NODES = {"08", "08b", "09", "13", "14"}
"""Nodes without a kubelet: their pods are Running at once, without events."""

TOLERANCE_S = 4.0
"""Tolerance between recorded and played times: real controllers check every second or two."""

SLOWER_S = {"06": 12, "08b": 20, "10": 18, "21": 12, "22": 12, "23": 5, "26": 16}
"""More tolerance where the recorded kubelet checked every 10 s, or a controller freed a pod later."""

OTHER_EVENTS = {
    "06": r"PodDisruptionBudget",
    "08b": r"Scheduled",
    "09": r"FailedScheduling",
    "10": r"Pod unreachable .*Failed to pull",
    "17": r"shrink",
    "22": r"OutOfnvidia",
    "23": r"crashside",
    "29": r"train|yyyy",
}
"""Events not compared: node choices, texts of a container runtime, random names."""


@pytest.fixture(scope="module", params=[one for one in SCENARIOS if one not in NOT_PLAYED])
def replay(request):
    """One recording, played to a cluster like the recorded one."""
    with cluster_like_recorded() as cluster:
        replay = Replay(load(FOLDER / f"{request.param}.json.gz"), cluster)
        replay.run()
        yield replay


def number(replay):
    """``08b`` of ``08b-node-silent-real``."""
    return replay.recording["scenario"].partition("-")[0].removeprefix("rec")


def compared(replay):
    """Answers that must be the same."""
    skipped = OTHER_ANSWER.get(number(replay), {})
    return [one for one in replay.answers if not any(part in one.step["request"]["path"] for part in skipped)]


def shown(text):
    """A message without random parts, revisions, and dumps of Go structures."""
    text = re.sub(r"Invalid value: \{.*\}: ", "Invalid value: DUMP: ", bare(text), flags=re.DOTALL)
    text = re.sub(r"(?<=negative\))\n@@.*", "", text, flags=re.DOTALL)
    return re.sub(r"current: \d+|ResourceVersion in record \(\d+\)", "REVISION", text)


def test_every_recording_is_here():
    """Each recording has a reduced copy, and every omission has a reason."""
    assert len(SCENARIOS) == 35
    assert set(NOT_PLAYED) <= set(SCENARIOS)


def test_answers_have_the_recorded_codes(replay):
    """The HTTP status of every request."""
    wanted = [(one.step["request"]["path"], one.step["response"]["status"]) for one in compared(replay)]

    assert [(one.step["request"]["path"], one.status) for one in compared(replay)] == wanted


def test_refusals_have_the_recorded_words(replay):
    """Reason, message, details and Retry-After of every Status of failure."""
    for one in compared(replay):
        recorded = one.step["response"].get("body")
        if (
            not isinstance(recorded, dict)
            or recorded.get("kind") != "Status"
            or recorded["status"] == "Success"
        ):
            continue
        assert one.body.get("reason") == recorded.get("reason")
        assert shown(one.body["message"]) == shown(recorded["message"])
        assert _details(one.body) == _details(recorded)
        assert one.headers.get("retry-after") == one.step["response"]["headers"].get("Retry-After")


def _details(status):
    details = {key: value for key, value in status.get("details", {}).items() if key not in {"uid", "causes"}}
    causes = [(one["reason"], one.get("field")) for one in status.get("details", {}).get("causes", [])]
    return details, causes


def test_texts_are_the_recorded_ones(replay):
    """Plain text answers: logs, health, refusals outside the API."""
    for one in compared(replay):
        recorded = one.step["response"].get("body")
        if isinstance(recorded, str) and "timestamps" not in one.step["request"]["path"]:
            assert sorted(one.body.split("\n")) == sorted(recorded.split("\n"))


def test_warnings_are_the_recorded_ones(replay):
    """The Warning header of unknown fields and of Jobs deleted without a policy."""
    for one in compared(replay):
        assert one.headers.get("warning") == one.step["response"]["headers"].get("Warning")


def test_objects_have_the_recorded_fields(replay):
    """Metadata and spec of created objects: the same fields, and the same values if not random."""
    for one in compared(replay):
        recorded = one.step["response"].get("body")
        is_made = one.step["request"]["method"] == "POST" and isinstance(recorded, dict)
        if is_made and one.status == 201 and recorded.get("kind") in {"Job", "Pod", "ConfigMap"}:
            assert _flat(one.body.get("spec", {})) == _flat(recorded.get("spec") or {})
            assert set(one.body["metadata"]) == set(recorded["metadata"]) - {"managedFields"}
            assert one.body.get("status") == recorded.get("status") or "conditions" in one.body["status"]


def _flat(value, path=""):
    """Leaves by path, without random values."""
    if isinstance(value, dict):
        return {
            key: text for name, inner in value.items() for key, text in _flat(inner, f"{path}.{name}").items()
        }
    if isinstance(value, list):
        return {
            key: text for at, inner in enumerate(value) for key, text in _flat(inner, f"{path}[{at}]").items()
        }
    text = bare(str(value))
    return {path: re.sub(r"kube-api-access-\w+", "kube-api-access", text)}


@pytest.mark.parametrize("kind", ["jobs", "pods"])
def test_histories_are_the_recorded_ones(replay, kind):
    """Each object went through the recorded states in the recorded order, up to the end of the recording."""
    skipped = OTHER_HISTORY.get(number(replay), {})
    found = replay.histories(kind)
    for name, recorded in replay.recording[kind].items():
        if name in skipped:
            continue
        assert len(found.get(name, [])) >= len(recorded), name
        # In 08b the later part ran on a node without a kubelet.
        count = 1 if number(replay) == "08b" else len(recorded)
        for mine, theirs in zip(found[name], recorded[:count], strict=False):
            wanted = _without_start(theirs) if number(replay) in FAKE_NODES else theirs
            got = (_without_start(mine) if number(replay) in FAKE_NODES else mine)[: len(wanted)]
            assert _timeless(got) == _timeless(wanted), name
            late = [(one["at"], other["at"]) for one, other in zip(got, wanted, strict=True)]
            most = SLOWER_S.get(number(replay), TOLERANCE_S)
            assert [pair for pair in late if abs(pair[0] - pair[1]) > most] == [], name


def _timeless(history):
    """The states of a history without their times."""
    return [{key: value for key, value in one.items() if key != "at"} for one in history]


def _without_start(history):
    """A pod's history without the moment in which a kubelet prepares it."""
    return [
        one for one in history if not any("ContainerCreating" in text for text in one.get("containers", ()))
    ]


def test_events_are_the_recorded_ones(replay):
    """The fake's components report the same events as the recorded ones."""
    skipped = OTHER_EVENTS.get(number(replay))
    recorded = {text for text in replay.recording["events"] if not (skipped and re.search(skipped, text))}

    assert recorded - replay.events() == set()
