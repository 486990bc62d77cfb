"""Unit tests of the shared view of list and watch results, without a server."""

import json
from types import SimpleNamespace

import pytest
from kubernetes.config import ConfigException

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Answer, Cluster, RefusedError
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_reader import (
    ExpiredError,
    Kept,
    Table,
    View,
    look_at,
)
from envscaler_airflow.errors import BackendError


def body(name, version, *, job=None):
    """Return an object; *job* makes it a pod of that Job."""
    return {
        "metadata": {
            "name": name,
            "resourceVersion": str(version),
            "labels": {names.JOB_NAME: job} if job else {},
        }
    }


def event(kind, item):
    """Return one line of a watch."""
    return {"type": kind, "object": item}


class Server:
    """A stand-in for the cluster: lists and watches from a script."""

    host = "test"

    def __init__(self, lists, watches):
        """Take these answers, in order."""
        self.lists, self.watches = list(lists), list(watches)
        self.asked = []

    def list(self, path, query, *, page, each):
        """Return the next list."""
        self.asked.append(("list", path))
        items = list(map(each, self.lists.pop(0)))
        return Answer({"metadata": {"resourceVersion": "10"}, "items": items}, 1000.0)

    def stream(self, path, query, *, read_timeout_s):
        """Yield the next watch, line by line; raise an exception in it."""
        self.asked.append(("watch", query["resourceVersion"]))
        for line in self.watches.pop(0):
            if isinstance(line, Exception):
                raise line
            yield line if isinstance(line, bytes) else json.dumps(line).encode()


def test_a_table_follows_what_the_watch_says():
    """Added, changed, deleted; bookmarks only advance the version."""
    table = Table("/pods")
    table.fill({"metadata": {"resourceVersion": "1"}, "items": [Kept.of(body(n, 1, job="j")) for n in "ab"]})

    table.take(event("MODIFIED", body("a", 2, job="j")))
    table.take(event("DELETED", body("b", 3, job="j")))
    table.take(event("ADDED", body("c", 4, job="k")))
    table.take(event("BOOKMARK", {"metadata": {"resourceVersion": "9"}, "spec": {"containers": None}}))

    assert set(table.items) == {"a", "c"}
    assert {job: set(pods) for job, pods in table.by_job.items()} == {"j": {"a"}, "k": {"c"}}
    assert table.version == "9"


def test_an_old_version_is_listed_again():
    """HTTP 200 and one ERROR event, as a real server sends it."""
    expired = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
    server = Server([[body("a", 1)], [body("b", 2)]], [[expired], []])
    view = View(server, "ns")

    with pytest.raises(ExpiredError, match="410 Expired"):
        view.round("jobs")
    view.round("jobs")

    assert [what for what, _ in server.asked] == ["list", "watch", "list", "watch"]
    assert set(view._tables["jobs"].items) == {"b"}


def test_a_watch_that_breaks_off_goes_on_from_where_it_was():
    """In the middle of a line, or of the connection: no list is needed."""
    half = b'{"type": "ADD'
    server = Server(
        [[]], [[event("ADDED", body("a", 11)), half], [BackendError("reset", transient=True)], []]
    )
    view = View(server, "ns")

    for _ in range(2):
        with pytest.raises(BackendError):
            view.round("jobs")
    view.round("jobs")

    assert server.asked[1:] == [("watch", "10"), ("watch", "11"), ("watch", "11")]


def test_the_servers_clock_goes_on_between_two_lists():
    """By the elapsed time of this process since the list."""
    now = [5.0]
    server = Server([[], []], [[], []])
    view = View(server, "ns", monotonic=lambda: now[0])
    view.round("jobs")
    view.round("pods")
    now[0] = 65.0

    assert view.attempt("j") == (None, [], 1060.0)


def test_a_pod_that_runs_on_beside_its_ended_job_is_asked_for():
    """The watch of pods may be behind that of Jobs: the server, not a guess, has the node's end."""
    owner = [{"uid": "u"}]
    job = {"metadata": {"name": "j", "uid": "u"}, "spec": {}, "status": {"conditions": []}}
    over = {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "x"}]}}
    runs = {"metadata": {"name": "p", "ownerReferences": owner}, "spec": {}, "status": {"phase": "Running"}}
    failed = {**runs, "status": {"phase": "Failed"}}

    class Behind:
        """A view that is behind a server."""

        def __init__(self, job, pods):
            self.answer, self.asked = (job, pods, 1.0), 0

        def attempt(self, _name):
            return self.answer

        def find(self, _path):
            self.asked += 1
            return Answer(over, 2.0)

        def list(self, _path, _query):
            return Answer({"items": [failed]}, 2.0)

    def look(*shown):
        behind = Behind(*shown)
        seen = look_at(Part("default", "j", "u", 1), behind, behind, Settings())
        return seen.pods, behind.asked

    assert look(over, [runs]) == ((failed,), 1)
    assert look(over, []) == ((failed,), 1)
    assert look(over, [failed]) == ((failed,), 0)
    assert look(job, [runs]) == ((runs,), 0)


class Waits:
    """A replacement of a view's event: records how long each wait was, and ends after *times*."""

    def __init__(self, times):
        """Start without any wait."""
        self.times, self.asked_s = times, []

    def is_set(self):
        """Return True after that many waits."""
        return len(self.asked_s) >= self.times

    def wait(self, seconds):
        """Take no time."""
        self.asked_s.append(seconds)

    def set(self):
        """End the threads."""


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (BackendError("gone", transient=True), [1, 2, 4, 8, 16, 30, 30]),
        (RefusedError("busy", status=429, reason="TooManyRequests", retry_after_s=20), [20] * 5 + [30] * 2),
        (RefusedError("broken", status=500, reason="", retry_after_s=None), [1, 2, 4, 8, 16, 30, 30]),
        (RefusedError("expired", status=401, reason="", retry_after_s=None), [1, 2, 4, 8, 16, 30, 30]),
    ],
    ids=["gone", "busy", "broken", "expired-token"],
)
def test_a_server_in_trouble_is_asked_less_and_less(monkeypatch, error, waits):
    """The wait grows with each failure in a row, and follows the server's Retry-After."""
    view = View(Server([], []), "default", monotonic=lambda: 0.0)
    monkeypatch.setattr(view, "_ending", ended := Waits(len(waits)))
    monkeypatch.setattr(view, "round", fail := Failing(error))

    view._keep("pods")

    assert ended.asked_s == waits
    assert fail.times == len(waits)


def test_a_watch_that_ends_in_a_way_nobody_foresaw_is_begun_again(monkeypatch):
    """Its view is closed, so that the next check makes another; otherwise no stage would get news again."""
    view = View(Server([], []), "default", monotonic=lambda: 0.0)
    monkeypatch.setattr(view, "round", Failing(KeyError("resourceVersion")))

    with pytest.raises(KeyError):
        view._keep("pods")

    assert view.is_closed


@pytest.mark.parametrize("error", [OSError(24, "too many files"), ConfigException("token file is empty")])
def test_a_token_that_cannot_be_read_now_is_no_answer(error):
    """The file is being replaced, or a helper failed: the same as a server that does not answer."""

    def auth_settings():
        raise error

    api = SimpleNamespace(configuration=SimpleNamespace(host="http://h", auth_settings=auth_settings))

    with pytest.raises(BackendError, match=r"too many files|is empty") as caught:
        Cluster(api, sleep=lambda _s: None).get("/api")

    assert caught.value.transient


class Failing:
    """A round that fails each time."""

    def __init__(self, error):
        """Start without a call."""
        self.error, self.times = error, 0

    def __call__(self, _name):
        """Raise the error."""
        self.times += 1
        raise self.error
