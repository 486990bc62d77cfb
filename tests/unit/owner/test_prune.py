"""Old runs are removed whole, live ones never, and a removal may be killed at any point."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
from fakes.run_events import (
    ACCEPTED,
    DELIVERED,
    FIRST,
    SUCCEEDED,
    begun,
    ended,
    intended,
    life,
    requested,
    started,
)

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.errors import BackendError, StoreError
from envscaler_airflow.owner import prune as module
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.prune import OldRun, prune
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.run import Event
from envscaler_airflow.run.event_bodies import NewGeneration, PruneIntended, read_body
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import StoreView
from envscaler_airflow.testing import FaultyStore

DAY_S = 86_400.0
MONTH_S = 30 * DAY_S
DONE = [begun(), *life("succeeded"), SUCCEEDED, DELIVERED, ACCEPTED]
KEY = RunKey("dep", "dag", "old", "train")


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    """No test needs its files after a power cut, and each of their thousands would wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return FileStore(tmp_path / "store")


def make(store, key=KEY, steps=DONE, *, days=40.0, inputs=None):
    """A run of that key with a checkpoint and an output, last written so many days ago."""
    run = Run(store, key)
    for number, step in enumerate(steps, start=1):
        actor = step[2] if len(step) > 2 else FIRST
        event = Event(number, read_body(step[0], step[1]), "w", 0.0, actor)
        run.create(event_name(number), event.to_json())
    run.write("run.json", json.dumps({"schema": SCHEMA, "key": key.to_dict()}).encode())
    run.write("spec-A.json", json.dumps({"inputs": inputs or {}}).encode())
    run.write("lease/run.json", b"{}")
    run.write("outputs/g1-a1-c1/model/weights", b"12345")
    run.write("outputs/g1-a1-c1/model/manifest.json", b"{}")
    run.write("checkpoints/g1-step-00000001-a1/manifest-c1.json", b"{}")
    run.write("logs/g1-a1-n0-000001.log", b"hello")
    age(store, key.prefix, days)
    return run


def age(store, below, days):
    """Set the dates of all files."""
    then = store.now() - days * DAY_S
    for path in (store.root / below).rglob("*"):
        os.utime(path, (then, then))


def removed(store, **more):
    """Names of the DAG runs whose run is removed, and why others are kept."""
    found = list(prune(store, older_than_s=MONTH_S, **({"sleep": lambda _s: None} | more)))
    return {one.prefix.split("/")[2]: one.kept for one in found}


def test_a_run_that_ended_long_ago_is_removed_and_the_others_stay(store):
    """Forty days and five of thirty: nothing is left of the first, and the second is as it was."""
    make(store)
    make(store, replace(KEY, run_id="new"), days=5)
    before = store.sizes("dep/dag/new")

    found = list(prune(store, older_than_s=MONTH_S))

    events = sum(
        len(Event(n, read_body(s[0], s[1]), "w", 0.0, FIRST).to_json()) for n, s in enumerate(DONE, 1)
    )
    spec, key = len(b'{"inputs": {}}'), len(json.dumps({"schema": SCHEMA, "key": KEY.to_dict()}))
    size = events + spec + key + len(b"{}" * 3) + 5 + 5
    assert found == [OldRun(KEY.prefix, "succeeded 40 d ago", "", len(DONE) + 7, size, ("model",))]
    assert store.names("dep/dag/old") == []
    assert store.sizes("") == before


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (("failed", {"generation": 1, "reason": "r"}), "failed 40 d ago"),
        (("stopped", {"generation": 1, "reason": "r"}), "was stopped 40 d ago"),
        (None, "left by its owner 40 d ago"),
    ],
)
def test_the_list_says_how_a_run_ended(store, end, words):
    """A person decides by it."""
    make(store, steps=[begun(), *life("failed"), *([] if end is None else [end])])

    assert [one.reason for one in prune(store, older_than_s=MONTH_S, dry_run=True)] == [words]


def test_a_dry_run_removes_nothing(store):
    """It finds the same run."""
    make(store)
    before = store.sizes("")

    assert removed(store, dry_run=True) == {"old": ""}
    assert store.sizes("") == before


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([begun(), intended()], "attempt 1 may still run"),
        ([begun(), intended(), started()], "attempt 1 may still run"),
        (
            [*DONE, ("release-failed", {"generation": 1, "attempt": 1, "detail": "403"})],
            "not known to be released",
        ),
        ([*DONE, ("revived", {})], "newer version"),
    ],
)
def test_what_may_still_run_is_kept(store, steps, words):
    """However old: `reap` and `cancel` end it first."""
    make(store, steps=steps, days=400)
    before = store.sizes("")

    assert words in removed(store)["old"]
    assert store.sizes("") == before


def test_a_run_whose_owner_waits_is_not_old(store):
    """Its last attempt ended forty days ago, and its lease was renewed today: it waits for a machine."""
    run = make(store, steps=[begun(), *life("lost")])
    run.write("lease/run.json", b"{}")

    assert removed(store) == {}


def test_an_output_that_another_run_reads_is_kept(store):
    """The run of this week names it as an input; a checkpoint named by ``restore_from`` counts too."""
    named, restored = make(store), make(store, replace(KEY, run_id="base"))
    reader = replace(KEY, run_id="new", task_id="score")
    begins = (
        "generation",
        {"generation": 1, "spec_hash": "A", "restore_from": restored.uri("checkpoints/c")},
        FIRST,
    )
    make(store, reader, [begins], days=5, inputs={"model": named.uri("outputs/g1-a1-c1/model")})

    kept = f"the run {reader.prefix} names its outputs or checkpoints"
    assert removed(store) == {"old": kept, "base": kept}


def test_an_old_reader_protects_nothing(store):
    """Otherwise a chain of trainings that each continue the last one would be kept for ever."""
    named = make(store)
    make(store, replace(KEY, run_id="next"), inputs={"model": named.uri("outputs/g1-a1-c1/model")})

    assert removed(store) == {"old": "", "next": ""}
    assert store.names("") == []


def test_the_run_of_a_deleted_dag_run_goes_at_once(store):
    """Its age does not matter, except in the first fifteen minutes; and only the gone one goes."""
    keys = [replace(KEY, run_id=name) for name in ("gone", "young", "there")]
    for key, days in zip(keys, (1, 0, 1), strict=True):
        make(store, key, days=days)

    found = list(
        prune(store, older_than_s=MONTH_S, why_gone=lambda key: None if key.run_id == "there" else "deleted")
    )

    assert [(one.prefix, one.reason) for one in found] == [(keys[0].prefix, "deleted")]


def test_an_airflow_that_does_not_answer_for_one_task_stops_no_other(store):
    """The young run is kept, the old one and the deleted one go, and the error comes at the end (A8)."""
    for name, days in (("a-young", 1), ("b-old", 40), ("c-gone", 1)):
        make(store, replace(KEY, run_id=name), days=days)

    def why_gone(key):
        if key.run_id == "a-young":
            raise BackendError("Airflow does not answer", transient=True)
        return "deleted"

    found = []
    with pytest.raises(BackendError, match="Airflow does not answer"):
        found.extend(one.prefix for one in prune(store, older_than_s=MONTH_S, why_gone=why_gone))

    assert [prefix.split("/")[2] for prefix in found] == ["b-old", "c-gone"]
    assert {name.split("/")[2] for name in store.names("")} == {"a-young"}


def test_a_run_that_cannot_be_removed_stops_no_other(store):
    """A store policy forbids one prefix; the error comes at the end (A8)."""
    for name in ("a", "b"):
        make(store, replace(KEY, run_id=name))
    faulty = FaultyStore(store)
    faulty.add("refuse", "delete", "dep/dag/a/*", times=None, error=StoreError("access denied"))

    with pytest.raises(StoreError, match="access denied"):
        removed(faulty)

    assert {name.split("/")[2] for name in store.names("")} == {"a"}


def test_a_run_that_never_began_goes_too(store):
    """Its owner died after it froze the spec; without any dated file the age is unknown, and it stays."""
    run, odd = Run(store, KEY), Run(store, replace(KEY, run_id="odd"))
    run.write("run.json", b"{}")
    odd.write("logs/g1-a1-n0-000001.log", b"late")
    age(store, "dep", 40)

    assert removed(store) == {"old": ""}
    assert store.names("") == [f"{odd.prefix}/logs/g1-a1-n0-000001.log"]


def test_only_what_the_caller_means_is_removed(store):
    """By its folder."""
    for name in ("one", "two"):
        make(store, replace(KEY, run_id=name))

    assert removed(store, applies_to=lambda prefix: "/two/" in prefix) == {"two": ""}


class _Killed(BaseException):
    """SIGKILL."""


class Dying(StoreView):
    """A store whose process is killed before or after its change number *at*."""

    def __init__(self, store, at, *, after):
        """Count the changes of *store*."""
        super().__init__(store, "")
        self.at, self.after = at, after

    def _pass(self, act):
        self.at -= 1
        if self.at == 0 and not self.after:
            raise _Killed
        found = act()
        if self.at == 0:
            raise _Killed
        return found

    def create(self, name, data):
        """Count it."""
        return self._pass(lambda: self.store.create(name, data))

    def delete(self, name):
        """Count it."""
        return self._pass(lambda: self.store.delete(name))

    def delete_tree(self, prefix):
        """Count it."""
        return self._pass(lambda: self.store.delete_tree(prefix))


class Sending(Dying):
    """A store whose process is killed after it sent a delete, which takes effect only later."""

    def delete(self, name):
        """Send it, and die with the one of an event."""
        if name.endswith("/events/000001.json"):
            self.lands = lambda: self.store.delete(name)
            raise _Killed
        return self.store.delete(name)


def test_a_delete_in_flight_meets_no_new_run_of_the_same_name(store):
    """The next call waits for the deletes of the killed one before it frees the names, once for all runs."""
    make(store)
    make(store, replace(KEY, run_id="other"))
    sending = Sending(store, 0, after=False)
    with pytest.raises(_Killed):
        removed(sending)
    waits = []

    def sleep(seconds):
        waits.append((seconds, len(store.children(f"{KEY.prefix}/events")) > 0))
        sending.lands()

    assert removed(store, sleep=sleep) == {"other": "", "old": ""}
    assert waits == [(module.IN_FLIGHT_S, True)]
    assert store.names("") == []


def owner_of(store, actor=FIRST):
    """An owner that wants to begin or to go on; it has no machines."""
    return Owner(run=Run(store, KEY), backend=None, actor=actor, stage=Stage(None, "train.yaml"))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_killed_prune_leaves_a_whole_run_or_one_that_the_next_prune_finishes(tmp_path, after):
    """At each change: no owner acts on what is left, and the next call leaves nothing (feature C6)."""
    make(FileStore(tmp_path / "whole"))
    whole = FileStore(tmp_path / "whole").sizes("")
    for at in range(1, 200):
        shutil.copytree(tmp_path / "whole", tmp_path / str(at))
        store = FileStore(tmp_path / str(at))
        try:
            removed(Dying(store, at, after=after))
        except _Killed:
            pass
        else:
            break
        left = store.sizes("")
        if left and left != whole:
            with pytest.raises(StoreError, match="is being removed") as caught:
                owner_of(store).check_newest()
            assert caught.value.transient
        if left:
            assert removed(store) == {"old": ""}
        assert store.names("") == []
    assert at > len(DONE) + 10


def test_a_call_that_is_overtaken_leaves_the_run_alone(store, monkeypatch):
    """The second call appends an event after that of the first, removes the run, and the first notices."""
    make(store)
    first = prune(store, older_than_s=MONTH_S)
    found = []
    real = module._check

    def check(run, fence):
        if not found:
            found.append(None)
            found.extend(prune(FileStore(store.root), older_than_s=MONTH_S, sleep=lambda _s: None))
            new = Run(store, KEY)
            new.events.append(0, NewGeneration(generation=1, spec_hash="B"), actor=FIRST)
        real(run, fence)

    monkeypatch.setattr(module, "_check", check)

    (late,) = list(first)

    assert (found[1].reason, found[1].kept) == ("its removal was interrupted", "")
    assert late.kept == "another process removes it"
    assert store.names("") == [f"{KEY.prefix}/events/000001.json"]


def test_a_run_that_an_owner_takes_up_meanwhile_stays(store):
    """A person clears the task between the look and the removal: the owner's event wins the number."""
    run = make(store)
    store_that_waits = _Clearing(store, run)

    assert removed(store_that_waits) == {"old": "it changed meanwhile"}
    assert run.events.load().status == "succeeded"


class _Clearing(StoreView):
    """A store in which a person clears the task just before the run is removed."""

    def __init__(self, store, run):
        """See *store*; the person clears the task of *run*."""
        super().__init__(store, "")
        self.run = run

    def create(self, name, data):
        """Let the person be faster."""
        if b"prune-intended" in data:
            self.run.events.append_request(read_body("owner", {"reason": "cleared"}), actor=FIRST)
        return self.store.create(name, data)


def test_an_owner_that_meets_a_removal_retries(store):
    """Before it writes anything: what it began would be deleted."""
    run = make(store)
    run.events.append(len(DONE), PruneIntended(reason="old"))
    before = store.sizes("")

    with pytest.raises(StoreError, match="envscaler prune --yes") as caught:
        owner_of(store).check_newest()
    with pytest.raises(StoreError, match="is being removed"):
        OwnedRun(run, None, FIRST, Stage(None, "x")).check_whole(run.events.load())

    assert caught.value.transient
    assert store.sizes("") == before


def test_nothing_counts_after_the_removal_was_begun(store):
    """A late request, or an old owner's event, revives no run."""
    run = make(store)
    run.events.append(len(DONE), PruneIntended(reason="old"))
    run.events.append_request(read_body(*requested()[:2]))
    run.events.append_request(read_body("generation", {"generation": 2, "spec_hash": "B"}), actor=FIRST)

    assert (run.events.load().status, run.events.load().pending) == ("pruned", ())
    assert removed(store) == {"old": ""}
    assert store.names("") == []


def test_events_that_something_else_deleted_are_not_taken_for_a_removal(store):
    """A rule of the bucket deleted the first event of a run that may still train: it is kept, and named."""
    run = make(store, steps=[begun(), intended(), started(), ended("lost"), intended(2), started(2)])
    run.delete(event_name(1))

    assert "first events are missing" in removed(store)["old"]
    assert store.size(f"{KEY.prefix}/{event_name(2)}") is not None
