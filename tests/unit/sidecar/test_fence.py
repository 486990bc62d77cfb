"""A checkpoint promised to the next attempt stays, wherever the older sidecar was cut off."""

import contextlib
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow.errors import StoreError
from envscaler_airflow.owner import start
from envscaler_airflow.sidecar.setup import first_control, lay_out
from envscaler_airflow.sidecar.uploads import Checkpoints, Outputs
from envscaler_airflow.store.checkpoints import complete_checkpoints, looks_good
from tests.unit.sidecar.conftest import CALLS, Bench

SAVES = (300, 400, 500)


class Memory:
    """A store in a dict: as atomic as an object store, and fast."""

    url = "memory://run"
    at_once = 1

    def __init__(self):
        """Begin empty."""
        self.held = {}

    def read(self, name, *, max_bytes=0):
        """Return the bytes, or None."""
        return self.held.get(name)

    def write(self, name, data):
        """Replace the bytes."""
        self.held[name] = data

    def create(self, name, data):
        """Return True for the first call only."""
        return self.held.setdefault(name, data) is data

    def delete(self, name):
        """Do nothing when it is absent."""
        self.held.pop(name, None)

    def delete_tree(self, prefix):
        """Delete everything below."""
        for name in self.names(prefix):
            self.held.pop(name)

    def names(self, prefix):
        """Return all names below, sorted."""
        return sorted(name for name in self.held if name.startswith(f"{prefix}/"))

    def children(self, prefix):
        """Return the first parts below, sorted."""
        return sorted({name[len(prefix) + 1 :].split("/")[0] for name in self.names(prefix)})

    def size(self, name):
        """Return the size in bytes, or None."""
        return len(self.held[name]) if name in self.held else None

    def sizes(self, prefix):
        """Return the sizes of everything below, in bytes."""
        return {name: len(self.held[name]) for name in self.names(prefix)}

    def put_file(self, name, source):
        """Copy an open file in."""
        source.seek(0)
        self.held[name] = source.read()

    def uri(self, name):
        """Return the URL."""
        return f"{self.url}/{name}"


class Actor:
    """A thread that makes one call to the store for each :meth:`advance`."""

    def __init__(self, store, work):
        """Start *work*, which stops before its first call."""
        self._store, self._may_go, self._has_stopped = store, threading.Semaphore(0), threading.Semaphore(0)
        self.is_done, self.error = False, None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._has_stopped.acquire()

    def _run(self, work):
        try:
            work(self)
        except Exception as err:  # noqa: BLE001 - raised again by advance()
            self.error = err
        self.is_done = True
        self._has_stopped.release()

    def __getattr__(self, name):
        """Return the store's attribute, which allows one call at a time."""
        call = getattr(self._store, name)
        if name not in CALLS:
            return call

        def gated(*args, **kwargs):
            self._has_stopped.release()
            self._may_go.acquire()
            return call(*args, **kwargs)

        return gated

    def advance(self, calls=10**6):
        """Make *calls* calls, or all the remaining ones."""
        while calls and not self.is_done:
            self._may_go.release()
            self._has_stopped.acquire()
            calls -= 1
        if self.error is not None:
            raise self.error


def old_sidecar(root, keep):
    """Let attempt 1 save three more times and prune, as if no attempt came after it."""

    def work(store):
        bench = Bench(root, store=store, attempt=1)
        for step in SAVES:
            bench.session_saves(f"g1-step-{step:08d}-a1", step=step)
            checkpoints = Checkpoints(bench.context, keep)
            with contextlib.suppress(StoreError):
                checkpoints.step()

    return work


def owner(store):
    """Prepare attempt 2 as its owner does."""
    control = Control()
    start.fence_older(store, control, generation=1, attempt=2)
    found = start.list_candidates(store, generation=1, attempt=2)
    start.write_candidates(store, control, found, generation=1, attempt=2)


@pytest.fixture(scope="module")
def folders_of_runs(tmp_path_factory):
    """Return a new folder for each run."""
    return lambda: tmp_path_factory.mktemp("run")


@given(
    before=st.integers(0, 90),
    of_owner=st.integers(0, 14),
    between=st.integers(0, 90),
    keep=st.integers(1, 3),
)
@settings(max_examples=120)
def test_what_is_promised_stays_wherever_the_older_sidecar_was(
    folders_of_runs, before, of_owner, between, keep
):
    """The older sidecar is cut off at any call, and so is the owner; both resume at any time (A5)."""
    root, store = folders_of_runs(), Memory()
    first = Bench(root, store=store, attempt=1)
    for step in (100, 200):
        first.in_store(f"g1-step-{step:08d}-a1")
    first.owner_asks(candidates=())

    zombie, acting = Actor(store, old_sidecar(root, keep)), Actor(store, owner)
    zombie.advance(before)
    acting.advance(of_owner)
    zombie.advance(between)
    acting.advance()
    promised = Control.from_json(store.read(control_name(1, 2)), where="t").candidates
    zombie.advance()

    assert len(promised) >= 2
    assert all(looks_good(store, name) for name in promised[:2])
    assert set(complete_checkpoints(store, 1)) >= set(promised[:2])


def test_on_hold_the_older_attempt_trains_on_and_publishes_nothing(make_bench, store, tmp_path):
    """Its checkpoint and its output wait; once the later attempt runs they are void (A5)."""
    path = tmp_path / "model"
    path.write_text("weights")
    bench = make_bench(attempt=1, layout={"outputs": {"model": str(path)}})
    bench.owner_asks(candidates=())
    start.fence_older(store, Control(), generation=1, attempt=2)
    name = "g1-step-00000300-a1"
    bench.session_saves(name, step=300)
    checkpoints, outputs = Checkpoints(bench.context, 3), Outputs(bench.context)

    assert not checkpoints.step()
    assert not outputs.step()
    assert complete_checkpoints(store, 1) == ()
    assert "the owner prepares a later attempt" in bench.context.messages.text()

    bench.clock.now += 60
    start.write_candidates(store, Control(), (), generation=1, attempt=2)
    assert checkpoints.step()
    assert outputs.step()
    assert complete_checkpoints(store, 1) == ()
    assert "a later attempt has begun" in bench.state.failed


def test_an_attempt_that_starts_after_a_later_one_does_not_train(bench, store):
    """Its owner slept before it submitted it; the next try has long gone on (A4)."""
    start.write_candidates(store, Control(), (), generation=1, attempt=2)
    start.write_candidates(store, Control(), (), generation=1, attempt=3)

    lay_out(bench.context)

    said = json.loads(bench.context.spool.start.read_text())
    assert said["reason"] == "stopped"
    assert said["failed"] == "orphaned: a later attempt has begun; what this one writes is void"


def test_a_start_waits_until_the_owner_has_listed(bench, store):
    """On hold the sidecar restores nothing; later it uses the candidates of the run (A5)."""
    known = "g1-step-00000100-a1"
    start.fence_older(store, Control(), generation=1, attempt=2)
    said = []

    def wait(_seconds):
        said.append(bench.context.messages.text())
        start.write_candidates(store, Control(), (known,), generation=1, attempt=2)

    bench.context.ending.wait = wait

    assert first_control(bench.context).candidates == (known,)
    assert said == ["waits until the owner has listed the checkpoints to resume from"]


def test_a_stop_that_came_first_stands_and_keeps_what_was_allowed(store):
    """A stop between the hold and the list is not revoked, and the next attempt still finds its past (A5)."""
    start.fence_older(store, Control(), generation=1, attempt=2)
    store.write(control_name(1, 2), Control(sequence=9, action="drain").to_json())

    start.write_candidates(store, Control(), ("g1-step-00000100-a1",), generation=1, attempt=2)

    control = Control.from_json(store.read(control_name(1, 2)), where="t")
    assert (control.action, control.sequence, control.candidates) == ("drain", 9, ("g1-step-00000100-a1",))
    assert start.list_candidates(store, generation=1, attempt=3) == ("g1-step-00000100-a1",)


def test_an_attempt_without_a_list_does_not_end_the_past(bench, store):
    """The owner died after its hold for attempt 2: attempt 3 may resume from attempt 1's checkpoints (A5)."""
    made = bench.in_store("g1-step-00000200-a1")
    store.write(control_name(1, 1), Control(candidates=()).to_json())
    start.fence_older(store, Control(), generation=1, attempt=2)

    assert start.list_candidates(store, generation=1, attempt=3) == (made,)
