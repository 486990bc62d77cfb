"""A shell that waits keeps its run while the store or the machines do not answer."""

from __future__ import annotations

import pytest

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.errors import BackendError, StoreError
from envscaler_airflow.owner.foreground import GIVE_UP_S, ForegroundOwner
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Delivered, Waiting, Wake, Watching
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store import check_store, open_store
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import FaultyStore, ManualClock, ScriptedBackend, cpu_offer

WAITING = Waiting(Watching(1, 1), "runs")
DONE = Delivered({}, {})


class Answers:
    """An owner that gives prepared answers."""

    def __init__(self, *answers):
        """Give *answers* one after the other; raise those that are errors."""
        self.answers = list(answers)
        self.owned = OwnedRun(None, ScriptedBackend(), Actor("me"), None)
        self.wakes = []

    def enter(self):
        """Return the first answer."""
        return WAITING

    def resume(self, wake):
        """Return the next answer."""
        self.wakes.append(wake)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def owner_of(store, backend):
    """Return an owner of the run, which is only watched."""
    return Owner(run=Run(store, "p"), backend=backend, actor=Actor("me"), stage=None)


class Hurried(ForegroundOwner):
    """An owner that always has something to do."""

    def _wait(self, waiting):
        return Wake("status", detail="the attempt ended")


def foreground(owner, *, slept, said, store=None):
    """Watch a run in which every check shows something."""
    owner.owned.run = None if store is None else Run(store, "p")
    return Hurried(
        owner,
        on_wait=lambda waiting: said.append(waiting.reason),
        sleep=slept.append,
    )


@pytest.mark.parametrize(
    "error",
    [
        StoreError("read-only file system"),
        StoreError("gone", transient=True),
        BackendError("throttled", transient=True),
    ],
)
def test_an_execution_without_an_answer_is_repeated(tmp_path, error):
    """The same wake, after 2 s and then 4 s; the user sees the reason."""
    slept, said, store = [], [], open_store(f"file://{tmp_path}")
    owner = Answers(error, error, DONE)

    got = foreground(owner, slept=slept, said=said, store=store).own()

    assert got is DONE
    assert slept == [2.0, 4.0]
    assert [wake.detail for wake in owner.wakes] == ["the attempt ended"] * 3
    assert said[1].startswith("no answer, tried again in 2 s: ")


@pytest.mark.parametrize("error", [BackendError("away", transient=True), StoreError("gone", transient=True)])
def test_an_execution_without_an_answer_for_an_hour_loses_no_lease(tmp_path, error):
    """The shell keeps the lease: a sidecar whose lease is not renewed would end its attempt."""
    store, clock = open_store(f"file://{tmp_path}"), ManualClock()
    waiting = foreground(Answers(*[error] * 60, DONE), slept=[], said=[], store=store)
    began, waiting.monotonic, waiting.sleep = clock.monotonic(), clock.monotonic, clock.advance

    got = waiting.own()

    minutes = (clock.monotonic() - began) / 60
    assert (got, minutes > 50) == (DONE, True)
    assert Run(store, "p").lease.read().counter >= minutes / 2


@pytest.mark.parametrize(("owner", "is_begun"), [("me", True), ("me", False), ("another", True)])
def test_an_entry_without_an_answer_is_gone_on_with_once_an_attempt_is_ours(tmp_path, owner, is_begun):
    """The attempt may already run, and a shell that ended would leave it to its lease.

    Without an attempt, a wrong address fails at once.
    """
    store, said, error = open_store(f"file://{tmp_path}"), [], BackendError("away", transient=True)
    log, begun = Run(store, "p").events, {"generation": 1, "reason": "first start", "spec_hash": "0"}
    log.append(0, read_body("generation", begun), actor=Actor(owner))
    if is_begun:
        attempt = {"generation": 1, "attempt": 1, "allocation": Allocation(cpu_offer(1)).to_dict()}
        log.append(1, read_body("attempt-intended", attempt), actor=Actor(owner))
    answers = Answers(error, DONE)
    answers.enter = lambda: answers.resume(Wake("entry"))
    held = foreground(answers, slept=[], said=said, store=store)

    if owner == "another" or not is_begun:
        with pytest.raises(BackendError, match="away"):
            held.own()
    else:
        assert held.own() is DONE
        assert [wake.kind for wake in answers.wakes] == ["entry", "entry"]
        assert said == ["no answer, tried again: away"]


def test_a_stop_without_an_answer_is_asked_for_again(tmp_path):
    """Ctrl-C while the cluster does not answer: the stop is recorded, and the shell has to complete it."""
    slept, store = [], open_store(f"file://{tmp_path}")
    answers = Answers(BackendError("away", transient=True), DONE)

    assert foreground(answers, slept=slept, said=[], store=store).resume() is DONE
    assert slept == [2.0]


def test_a_refusal_for_good_is_not_repeated():
    """Forbidden is permanent."""
    with pytest.raises(BackendError, match="forbidden"):
        foreground(Answers(BackendError("forbidden", status=403)), slept=[], said=[]).own()


def test_what_the_machines_wait_for_is_in_the_lease(tmp_path):
    """From the first check that saw it, for any shell that requests the status."""
    store, backend, slept = open_store(f"file://{tmp_path}"), ScriptedBackend(), []
    allocation = Allocation(cpu_offer(1), nodes=2)
    handle = backend.submit(AttemptRequest(store.url, "p", "dag.train", 1, 1, allocation))
    backend.set_state(handle, "pending", node=0, reason="scheduling", detail="no room")
    backend.set_state(handle, "starting", node=1)

    def sleep(seconds):
        slept.append(Run(store, "p").lease.known().waits)
        if len(slept) == 2:
            backend.end(handle)

    watching = Watching(0, 1, 1, nodes=2, handle=handle)
    waiting = ForegroundOwner(owner_of(store, backend), sleep=sleep)

    assert waiting._wait(Waiting(watching, "starts")).detail == "the attempt ended"
    assert slept == ["", "node 0: scheduling: no room"]


def test_a_shell_that_waits_renews_its_lease_every_minute(tmp_path):
    """Ten minutes in which nothing changes: a sidecar whose lease stands still ends its attempt."""
    store, backend, clock = open_store(f"file://{tmp_path}"), ScriptedBackend(), ManualClock()
    request = AttemptRequest(store.url, "p", "dag.train", 1, 1, Allocation(cpu_offer(1)))
    handle = backend.submit(request)
    began = clock.monotonic()

    def sleep(seconds):
        clock.advance(seconds)
        if clock.monotonic() - began >= 600:
            backend.end(handle)

    waiting = ForegroundOwner(owner_of(store, backend), sleep=sleep, monotonic=clock.monotonic)
    waiting._wait(Waiting(Watching(0, 1, 1, handle=handle), "runs"))

    assert 10 <= Run(store, "p").lease.read().counter <= 13


class TestFullStore:
    """A store that refuses writes while a shell waits (F6)."""

    @pytest.fixture
    def full(self, tmp_path):
        """A watched attempt whose store refuses every write, and the messages that the shell got."""
        store, backend, clock = (
            FaultyStore(open_store(f"file://{tmp_path}")),
            ScriptedBackend(),
            ManualClock(),
        )
        check_store(store)
        request = AttemptRequest(store.url, "p", "dag.train", 1, 1, Allocation(cpu_offer(1)))
        handle = backend.submit(request)
        told = []
        waiting = ForegroundOwner(
            owner_of(store, backend),
            on_trouble=lambda err: told.append(str(err)),
            sleep=clock.advance,
            monotonic=clock.monotonic,
        )
        store.add("refuse", "write", times=None, error=StoreError("No space left on device"))
        return waiting, Waiting(Watching(0, 1, 1, handle=handle), "runs"), backend, handle, told

    def test_the_end_of_the_training_is_still_seen_and_the_error_reported(self, full):
        """The lease cannot be renewed; everything else is still observed."""
        waiting, watching, backend, handle, told = full
        backend.end(handle)

        assert waiting._wait(watching).detail == "the attempt ended"
        assert told == []
        assert waiting._wait(watching).kind == "status"

    def test_it_is_told_at_once_and_given_up_after_an_hour(self, full):
        """The shell never hangs without a message."""
        waiting, watching, _, _, told = full

        with pytest.raises(StoreError, match="No space left on device"):
            waiting._wait(watching)

        assert told[0] == "No space left on device"
        assert GIVE_UP_S <= waiting.monotonic() - 1000.0 < GIVE_UP_S + 60  # the clock began at 1,000 s
