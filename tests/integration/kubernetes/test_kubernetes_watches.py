"""The single watch that a process keeps on a namespace."""

import time
from dataclasses import replace

import pytest
from fakes.kubernetes import JOBS, QUOTAS
from integration.kubernetes.rig import KEY, OFFER, eventually, over, request_for, running

from envscaler_airflow.backends.kubernetes import job_reader
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.job_reader import Kept, View
from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner.limits import BUDGET_EVERY_S
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Watching
from envscaler_airflow.owner.usage import Span
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Handle
from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.triggers import scaling_checks


def test_one_watch_serves_every_attempt_of_a_namespace(cluster, connect):
    """Two lists and two watches for any number of readers; a cut watch and an old version cost one more.

    A Job that the watch has not shown yet is requested by its own name, so calls are counted from then on.
    """
    backend = connect(watches=True)
    handles = [backend.submit(request_for(attempt=number)) for number in range(1, 6)]
    view = backend._view("default")
    for handle in handles:
        eventually(lambda handle=handle: view.shown(handle.name)[0], lambda job: job is not None)
    before = len(cluster.requests)
    for handle in handles:
        running(backend, handle)
    assert "GET" not in [method for method, _ in list(cluster.requests)[before:]]
    shared = [path for method, path in cluster.requests if method == "GET" and "managed-by" in path]
    assert sorted((path.split("?")[0].split("/")[-1], "watch=true" in path) for path in shared) == [
        ("jobs", False),
        ("jobs", True),
        ("pods", False),
        ("pods", True),
    ]

    cluster.cut_watches()
    cluster.pod(f"{handles[0].name}-0-").exit(3)
    cluster.compact()

    assert over(backend, handles[0]) == [("ended", "failed")]
    running(backend, handles[1])


def test_what_runs_on_is_read_once_and_every_change_is_seen(cluster, connect, monkeypatch):
    """An unchanged status costs no read; a terminating pod is read each time."""
    read = []
    whole = Kept.body
    monkeypatch.setattr(Kept, "body", lambda kept: read.append(kept.name) or whole(kept))
    backend = connect(watches=True)
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=2)))
    running(backend, handle)
    first = backend.observe(handle)
    view = backend._view("default")
    eventually(lambda: backend.observe(handle) and view.results.get(handle.name), lambda got: got is not None)
    read.clear()

    assert [backend.observe(handle) for _ in range(5)] == [first] * 5
    assert read == []

    cluster.node("node-0").silence()
    cluster.pod(f"{handle.name}-1-").delete()
    eventually(lambda: backend.pods(handle)[1][1]["metadata"], lambda found: "deletionTimestamp" in found)
    eventually(lambda: backend.observe(handle) and read, lambda names: len(names) > 6)
    read.clear()
    backend.observe(handle)
    assert len(read) == 3
    assert backend.observe(replace_uid(handle)).nodes[0].state == "lost"

    job = cluster.get(JOBS, handle.name)
    cluster.api.delete(JOBS, "default", handle.name, {"propagationPolicy": "Background"})
    eventually(lambda: view.shown(job["metadata"]["name"])[0], lambda kept: kept is None)
    assert view.results == {}


def replace_uid(handle):
    """The handle of another Job of that name."""
    body = handle.to_dict()
    return Handle.from_dict({**body, "details": {**body["details"], "uid": "other"}})


def test_a_view_that_is_too_old_shows_nothing(cluster, connect):
    """The API server is gone: unknown, and afterwards everything is found again."""
    backend = connect()
    handle = backend.submit(request_for())
    now = [0.0]
    view = View(backend.cluster, "default", monotonic=lambda: now[0])
    view._list("jobs", view._tables["jobs"])
    view._list("pods", view._tables["pods"])

    assert view.attempt(handle.name)[0]["metadata"]["uid"] == handle.details["uid"]
    now[0] = 121.0
    with pytest.raises(BackendError, match="received nothing for 121 s"):
        view.attempt(handle.name)


def test_a_thousand_stages_cost_one_list_and_one_watch_of_each_kind(cluster, connect):
    """Any number of backends, one per trigger as in a triggerer; reading a status takes no call."""
    maker = connect()
    handles = []
    for number in range(1000):
        job = maker.render(request_for(run_prefix=f"dep/dag/run/train/{number}"))["job"]
        handles.append(handle_of([cluster.create(JOBS, job)]))
    backend = connect(watches=True)
    backend.observe(handles[0])
    before = len(cluster.requests)

    states = {backend.observe(handle).nodes[0].state for handle in handles}

    assert states == {"pending"}
    assert len(cluster.requests) - before <= 2
    watched = [path for method, path in cluster.requests if "watch=true" in path]
    assert len(watched) == 2


def test_a_watch_backs_off_while_the_server_is_busy(cluster, connect):
    """No call for the requested time; then the view is complete again."""
    backend = connect(watches=True)
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.next_error("watch", "pods", 429, retry_after=2, times=1)
    cluster.next_error("list", "pods", 500, times=2)

    cluster.cut_watches()
    cluster.pod(f"{handle.name}-0-").exit(0)

    assert over(backend, handle) == [("ended", "succeeded")]
    calls = [path for method, path in cluster.requests if "/pods?" in path]
    assert len(calls) < 12


def test_a_job_that_the_view_has_not_seen_is_not_lost(cluster, connect):
    """The watch lags: the backend asks the server itself before it counts an object as gone."""
    backend = connect(watches=True)
    first = backend.submit(request_for())
    running(backend, first)
    cluster.next_error("watch", "*", 503, times=100)
    cluster.next_error("list", "jobs", 503, times=100)
    cluster.cut_watches()

    second = connect().submit(request_for(attempt=2))

    assert backend.observe(second).nodes[0].state != "lost"
    cluster.do(cluster.faults.clear)


def test_why_pods_are_missing_is_listed_once_for_all_who_look(cluster, connect):
    """Only events report a quota: a triggerer reads them every half minute for all waiting stages."""
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    maker, backend = connect(), connect(watches=True)
    handles = [maker.submit(request_for(attempt=number)) for number in range(1, 4)]
    eventually(lambda: maker.observe(handles[2]).nodes[0].reason, lambda reason: reason == "quota")
    before = len(cluster.requests)

    shown = [backend.observe(handle).nodes[0] for handle in handles * 5]

    assert {node.reason for node in shown} == {"quota"}
    assert all("exceeded quota: cpus" in node.detail for node in shown)
    listed = [path for _, path in list(cluster.requests)[before:] if "/events" in path]
    assert len(listed) == 1


def test_warnings_that_may_not_be_read_hide_nothing_else(cluster, connect):
    """The status says that the pod is being created."""
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    rules = [
        {"apiGroups": ["", "batch"], "resources": ["jobs", "pods"], "verbs": ["get", "list", "watch"]},
    ]
    handle = connect().submit(request_for())

    [node] = connect(token=cluster.user("few", rules), watches=True).observe(handle).nodes

    assert (node.state, node.reason, node.detail) == ("pending", "", "its pod is being made")


def test_stages_that_train_ask_the_api_server_twice_in_five_minutes_together(
    cluster, connect, tmp_path, monkeypatch
):
    """Five minutes are a second here. Three triggers that also check a budget share these two calls (C6).

    So one stage costs 0.4 requests a minute, and each further one of its namespace nothing.
    """
    assert 2 * 60 / job_reader.WATCH_S <= 0.5
    monkeypatch.setattr(job_reader, "WATCH_S", 1)
    maker, store, now = connect(), open_store(f"file://{tmp_path}/store"), [0.0]
    watchers = []
    for number in range(3):
        handle = maker.submit(request_for(run_prefix=f"dep/dag/run/train/{number}"))
        running(maker, handle)
        run = Run(store, f"dep/dag/run/train/{number}")
        run.events.append(0, NewGeneration(generation=1, spec_hash="A"))
        spans = (Span(0.0, Allocation(replace(OFFER, usd_per_hour=0.01))),)
        watching = Watching(1, 1, 1, handle=handle, usd_left=1e6, spans=spans, started_at=run.now())
        backend = connect(watches=True)
        watchers.append(AttemptWatcher(run=run, backend=backend, watching=watching, monotonic=lambda: now[0]))
    assert [watcher.poll() for watcher in watchers] == [None] * 3
    before, began = len(cluster.requests), time.monotonic()

    while time.monotonic() - began < 4.5:
        now[0] += BUDGET_EVERY_S
        assert [watcher.poll() for watcher in watchers] == [None] * 3
        time.sleep(0.05)

    calls = [path for _, path in list(cluster.requests)[before:]]
    assert {"watch=true" in path for path in calls} == {True}, calls
    assert 2 <= len(calls) <= 2 * (time.monotonic() - began + 1)


def test_the_checks_of_a_sensor_read_the_shared_watch(cluster, connect, stage, monkeypatch):
    """Each check looks at what the attempt has cost. Twenty of them need no request but the watch."""
    begun = stage(scaling={"policy": "cost-to-finish"}, checkpoint={"path": "/output"})
    begun.begin()
    place = type("Place", (), {"open": lambda _self: begun.store})()
    monkeypatch.setattr(scaling_checks, "store_place", lambda *_: place)
    monkeypatch.setattr(scaling_checks, "open_backend", lambda _name: connect())
    where = {"map_index": -1, "writer": "sensor", "store_url": None, "store_conn_id": None}
    checks = scaling_checks.Checks.open(KEY.prefix.rpartition("/")[0], compute="kubernetes", **where)
    checks.once({"-1": "deferred"})
    before = len(cluster.requests)

    for _ in range(20):
        checks.once({"-1": "deferred"})

    assert checks.news() != []
    calls = [path for _, path in list(cluster.requests)[before:]]
    assert [path for path in calls if "watch=true" not in path] == []
