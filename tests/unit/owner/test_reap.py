"""``reap`` and one orphan that cannot be judged, released or removed."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from envscaler_airflow.backends.base import Leftover
from envscaler_airflow.errors import BackendError, StoreError
from envscaler_airflow.hooks.states import why_gone, why_over
from envscaler_airflow.owner.owner import Releaser
from envscaler_airflow.owner.reap import YOUNG_S, reap
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.run import Handle
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.testing import FaultyStore, ScriptedBackend

AWAY = BackendError("the API server does not answer", transient=True)


class Listing:
    """A backend on which attempts of three runs are left, and that refuses to remove some."""

    name = "listing"

    def __init__(self, refuses=()):
        """Refuse to remove the attempts of these names."""
        self.refuses, self.removed = refuses, []

    def leftovers(self, store_url):
        """The three attempts, which have ended."""
        del store_url
        for name in ("a", "b", "c"):
            yield Leftover(Handle(self.name, name), f"deployment/dag/{name}/t/-1", 1, 1, YOUNG_S, runs=False)

    def remove(self, handle):
        """Remove an attempt."""
        if handle.name in self.refuses:
            raise BackendError(f"{handle.name}: forbidden", status=403)
        self.removed.append(handle.name)


@pytest.mark.parametrize(("refuses", "message"), [(("a",), "a: forbidden"), (("a", "b"), "a: forbidden")])
def test_an_orphan_that_cannot_be_removed_stops_no_other(world, caplog, refuses, message):
    """The rest goes, each error is in the log, and the first ends the call (A8)."""
    world.store.write("deployment/dag/other/t/-1/run.json", b"{}")
    backend, found = Listing(refuses), []

    with pytest.raises(BackendError, match=message):
        found.extend(orphan.handle.name for orphan in reap(world.store, backend))

    assert backend.removed == [name for name in "abc" if name not in refuses]
    assert caplog.text.count("left alone") == len(refuses)


def test_a_run_that_cannot_be_read_stops_no_other(world):
    """It may be of a store policy that forbids one prefix (A8)."""
    world.store.write("deployment/dag/other/t/-1/run.json", b"{}")
    backend, store = Listing(), FaultyStore(world.store)
    store.add("refuse", "read", "deployment/dag/a/*", times=None, error=StoreError("access denied"))

    with pytest.raises(StoreError, match="access denied"):
        list(reap(store, backend))

    assert backend.removed == ["b", "c"]


def no_answer(**_asked):
    """Airflow's API server does not answer."""
    raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 503}))


@pytest.mark.parametrize("why", [why_over, why_gone])
def test_an_airflow_that_does_not_answer_is_a_passing_error(monkeypatch, why):
    """Its own error type would end `reap` and `prune` at the first task (A8)."""
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(no_answer))

    with pytest.raises(
        BackendError, match="task train of dag, run monday: Airflow does not report"
    ) as caught:
        why(RunKey("deployment", "dag", "monday", "train"))

    assert caught.value.transient


class Leaves(ScriptedBackend):
    """A scripted backend that lists its attempts until they are removed."""

    def __init__(self, *args, **more):
        """Nothing is removed yet."""
        super().__init__(*args, **more)
        self.removed = []

    def leftovers(self, store_url):
        """Every attempt that is not removed."""
        for name, life in list(self._lives.items()):
            _, prefix, last = name.split("|")
            attempt = int(last.partition("-a")[2])
            runs = life.handle in self.live
            if life.handle not in self.removed:
                yield Leftover(life.handle, prefix, 1, attempt, YOUNG_S, runs=runs)

    def remove(self, handle):
        """Remove it, though its owner has not released it."""
        self._enter("remove", handle.name)
        self._life(handle).is_released = True
        self.removed.append(handle)


@pytest.fixture
def world(new_world):
    """A run on such a backend, that has not begun."""
    return new_world(backend=Leaves)


def is_over(_key):
    """Airflow has the task as failed."""
    return "its task is failed in Airflow"


def passes(world, **more):
    """Attempts that one call reports, and the first error that ends it; None without one."""
    found = []
    try:
        found += [one.part.attempt for one in reap(world.store, world.backend, **more)]
    except BackendError as err:
        return found, str(err)
    return found, None


def test_a_task_that_airflow_cannot_judge_stops_no_other(world):
    """Two attempts end, and the error comes after them (A8)."""
    world.owner().enter()
    backend = Listing()
    alive = Leftover(Handle("listing", "alive"), world.prefix, 1, 1, YOUNG_S, runs=True)
    others = list(backend.leftovers(""))
    backend.leftovers = lambda _url: iter([alive, *others])

    def unknown(_key):
        raise AWAY

    with pytest.raises(BackendError, match="does not answer"):
        list(reap(world.store, backend, task_is_over=unknown))

    assert backend.removed == ["a", "b", "c"]


def die(*_args):
    """End the owner's process."""
    raise SystemExit


def unknown(*_args):
    """Answer nothing."""
    raise AWAY


def ended_unreleased(world):
    """A failed run whose last machine is lost and was never released."""
    owner = world.owner()
    owner.enter()
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    assert world.state.attempts[0].unreleased


def test_an_attempt_that_its_owner_could_not_release_is_recorded_as_released(world):
    """Otherwise its run says for ever that its machines may run, and is never pruned (A8)."""
    ended_unreleased(world)

    assert passes(world) == ([1], None)
    assert (world.state.attempts[0].unreleased, len(world.backend.removed)) == ("", 1)


@pytest.mark.parametrize("method", ["observe", "remove"])
def test_a_release_that_failed_is_repeated_by_the_next_reap(world, method):
    """First no answer, then it is removed, and the run's events record it (A8)."""
    ended_unreleased(world)
    world.backend.fail_next(method, AWAY)

    assert passes(world) == ([], str(AWAY))
    assert world.backend.removed == []
    assert passes(world) == ([1], None)
    assert (world.state.attempts[0].unreleased, len(world.backend.removed)) == ("", 1)


def test_a_store_that_fails_at_the_record_keeps_the_attempt_for_the_next_reap(world):
    """It is removed only after its release is recorded (A8)."""
    ended_unreleased(world)
    store = FaultyStore(world.store)
    store.add("refuse", "create", f"{world.prefix}/events/*", times=None, error=StoreError("away"))

    with pytest.raises(StoreError, match="away"):
        list(reap(store, world.backend))

    assert world.backend.removed == []
    assert passes(world) == ([1], None)


def test_a_lost_machine_that_runs_on_is_stopped_first_and_billed_whole(world):
    """The first call stops it, the second records two hours and removes it (A8)."""
    owner = world.owner()
    owner.enter()
    world.clock.advance(3600)
    handle = world.handle
    world.backend.hide(handle)
    owner.resume(Wake("silent", silent_s=1e6))
    world.backend.show(handle)
    world.clock.advance(3600)
    world.backend._ends_on_stop = True

    first, kept = passes(world), list(world.backend.removed)
    second = passes(world)

    assert (first, kept, second) == (([1], None), [], ([1], None))
    assert world.state.attempts[0].end.usd == pytest.approx(2 * 0.05)


def test_a_machine_whose_owner_died_before_the_release_is_billed_to_its_end(world, monkeypatch):
    """The event of the loss has an open bill, and nothing says that the release failed (A8)."""
    owner = world.owner()
    owner.enter()
    world.clock.advance(3600)
    handle = world.handle
    world.backend.hide(handle)

    monkeypatch.setattr(Releaser, "_release", die)
    with pytest.raises(SystemExit):
        owner.resume(Wake("silent", silent_s=1e6))
    monkeypatch.undo()
    world.clock.advance(3600)
    world.backend.show(handle)
    world.backend.lose(handle)

    assert passes(world) == ([1], None)
    assert world.state.attempts[0].end.usd == pytest.approx(2 * 0.05)
    assert world.state.attempts[0].released_at is not None


def test_a_release_is_recorded_for_the_try_that_owns_the_run_by_then(world, monkeypatch):
    """The next try takes over between the look of ``reap`` and its event (A4)."""
    ended_unreleased(world)
    append = EventLog.append

    def late(log, after, body, **named):
        monkeypatch.setattr(EventLog, "append", append)
        world.backend.fail_next("release", AWAY)
        world.owner().enter()
        return append(log, after, body, **named)

    monkeypatch.setattr(EventLog, "append", late)
    assert passes(world) == ([1], None)

    [released] = [event for event in world.log.read() if event.type == "attempt-released"]
    assert released.actor.is_try_of(world.state.owner)


def test_a_machine_whose_bill_was_unknown_at_its_loss_is_billed_by_the_reap(world, monkeypatch):
    """The backend did not answer then, and the owner died before the release (A8)."""
    owner = world.owner()
    owner.enter()
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    monkeypatch.setattr(world.backend, "usage", unknown)
    monkeypatch.setattr(Releaser, "_release", die)
    with pytest.raises(SystemExit):
        owner.resume(Wake("status"))
    assert world.state.attempts[0].end.usd is None
    monkeypatch.undo()

    assert passes(world) == ([1], None)
    assert world.state.attempts[0].end.usd == pytest.approx(0.05)


def test_a_run_whose_stop_waits_for_a_release_gets_its_end_from_a_later_call(world):
    """Its task was marked failed; the first calls get no answer from the backend (A8)."""
    world.owner().enter()
    world.clock.advance(3600)
    assert passes(world, task_is_over=is_over) == ([1], None)
    world.leave()
    for _ in range(2):
        world.backend.fail_next("release", AWAY)
    world.backend.fail_next("remove", AWAY)

    calls = [passes(world, task_is_over=is_over) for _ in range(2)]

    assert calls == [([], str(AWAY)), ([1], None)]
    assert world.state.status == "stopped"
    assert (world.state.attempts[0].unreleased, len(world.backend.removed)) == ("", 1)
