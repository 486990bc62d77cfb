"""Which try of a stage's task acts: retries, clears, deleted DAG runs, tries that resume late."""

from __future__ import annotations

import uuid

import pytest
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout
from fakes.operator_world import PREFIX, SPEC, Ti, api_error, operator_world

from envscaler_airflow.errors import StoreError
from envscaler_airflow.operators import execution
from envscaler_airflow.operators.execution import LIFE_KEY
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.run import Actor
from envscaler_airflow.store import EventLog
from envscaler_airflow.store.run import Run


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stage's operator with its store and machines."""
    with operator_world(tmp_path, monkeypatch) as made:
        yield made


def types(world):
    """Return the types of the written events."""
    return [event.type for event in world.log.read()]


def cancel(world):
    """Do what `envscaler cancel` does."""
    request_stop(Run(world.store, PREFIX), reason="cancelled", by="me")


def leave(world):
    """Let the running attempt do what the owner requested."""
    world.end(reason="drained", exit_code=85)


def test_the_first_try_names_its_dag_run(world):
    """By a UUID that Airflow keeps with the DAG run; every later try finds it (A1)."""
    world.execute(world.operator(), Ti(1))
    world.execute(world.operator(), Ti(2))

    life = world.dag_run_keeps[LIFE_KEY]
    assert uuid.UUID(life).version == 4
    assert [event.actor.life for event in world.log.read()] == [life] * 4
    assert world.log.load().owner.try_number == 2


def test_each_event_of_an_owner_says_who_it_is_and_what_it_runs(world):
    """DAG run, try, ``max_tries``, spec: a retry keeps the frozen spec, a clear brings its own (A1)."""
    world.execute(world.operator(), Ti(1))
    (world.dag_file.parent / "train.yaml").write_text(SPEC.replace("train.py", "other.py"))
    world.execute(world.operator(), Ti(2))
    world.execute(world.operator(), Ti(3, max_tries=5))

    life, own = world.dag_run_keeps[LIFE_KEY], ("generation", "owner")
    events = [event for event in world.log.read() if event.type in own]
    first, retry, clear = (event.body.spec_hash for event in events)
    assert [event.actor for event in events] == [
        Actor("ti-1", 1, 3, life),
        Actor("ti-2", 2, 3, life),
        Actor("ti-3", 3, 5, life),
    ]
    assert first == retry != clear


def test_retries_of_a_recreated_dag_run_go_on(world):
    """Deleted after its third try, recreated, first try lost before its start: one new generation (A1)."""
    for number in (1, 2, 3):
        world.execute(world.operator(), Ti(number))
    world.recreate_dag_run()

    world.execute(world.operator(), Ti(2, ti_id="ti-91"))
    leave(world)
    world.deferral(lambda: world.resume(world.operator(), Ti(2, ti_id="ti-91")))
    world.execute(world.operator(), Ti(3, ti_id="ti-92"))

    state = world.log.load()
    assert (state.generation, state.live.generation) == (2, 2)
    assert types(world).count("generation") == 2


def test_a_dag_run_that_is_set_to_queued_goes_on(world):
    """That changes its start date, which does not matter (A1)."""
    world.execute(world.operator(), Ti(1))

    world.execute(world.operator(), Ti(2))

    assert world.log.load().generation == 1


@pytest.mark.parametrize(
    "setting",
    [
        ("AIRFLOW__STATE_STORE__BACKEND", "company.Backend"),
        ("AIRFLOW__WORKERS__STATE_STORE_BACKEND", "company.Backend"),
        ("AIRFLOW__STATE_STORE__CLEAR_ON_SUCCESS", "True"),
    ],
)
def test_a_task_state_that_may_outlive_or_leave_the_dag_run_is_not_asked(world, monkeypatch, setting):
    """A retry is then recognized by its try number (A1)."""
    monkeypatch.setenv(*setting)

    world.execute(world.operator(), Ti(1))
    world.execute(world.operator(), Ti(2))

    assert world.dag_run_keeps == {}
    assert (world.log.load().owner.life, world.log.load().generation) == (None, 1)


def test_an_api_server_that_does_not_answer_costs_no_try(world, monkeypatch, caplog):
    """The task continues without the UUID, and logs that (A1)."""

    def away(_self, _key):
        raise api_error(503)

    monkeypatch.setattr("fakes.operator_world.TaskStateStore.get", away)

    world.execute(world.operator(), Ti(1))

    assert world.log.load().owner.life is None
    assert "the life of this DAG run cannot be read" in caplog.text


@pytest.mark.parametrize("state", ["running", "succeeded", "stopped"])
def test_an_older_try_that_wakes_late_writes_nothing(world, state):
    """It writes no file, probe or lease; it fails without a retry (A2)."""
    ti = Ti(2)
    operator = world.operator()
    world.execute(operator, ti)
    if state == "succeeded":
        world.end(outputs={"model": "file:///model"})
        world.resume(operator, ti)
    elif state == "stopped":
        cancel(world)
        world.deferral(lambda: world.resume(operator, ti))
        leave(world)
        with pytest.raises(AirflowFailException):
            world.resume(operator, ti)
    before = world.files()

    with pytest.raises(AirflowFailException, match="is older than the owner"):
        world.operator().execute(world.context(world.operator(), Ti(1)))

    assert world.files() == before


def test_a_try_of_a_deleted_dag_run_writes_nothing(world):
    """It reads no UUID any more, and its number is higher, but its task instance is the older one (A2)."""
    world.execute(world.operator(), Ti(3))
    world.recreate_dag_run()
    world.execute(world.operator(), Ti(1, ti_id="ti-9"))
    before = world.files()

    context = world.context(world.operator(), Ti(4, ti_id="ti-31"))
    del context["task_state_store"]
    with pytest.raises(AirflowFailException, match="is older than the owner"):
        world.operator().execute(context)

    assert world.files() == before


@pytest.mark.parametrize("is_first", [True, False])
def test_a_try_that_airflow_no_longer_knows_writes_nothing(world, is_first):
    """Its task instance was replaced: the new one may have the same number (A2)."""
    if not is_first:
        world.execute(world.operator(), Ti(1))
    before = world.files()

    context = world.context(world.operator(), Ti(2), is_known=False)
    with pytest.raises(AirflowFailException, match="Airflow no longer knows this try"):
        world.operator().execute(context)

    assert world.files() == before


def test_an_older_try_that_slept_while_it_packed_writes_nothing(world, monkeypatch):
    """A large workdir: the owner has another spec by then, and keeps it (A2)."""
    from envscaler_airflow.owner import freeze as freezing

    freeze, found = freezing.freeze, {}

    def slept(spec, store):
        monkeypatch.setattr(freezing, "freeze", freeze)
        (world.dag_file.parent / "train.yaml").write_text(SPEC.replace("train.py", "other.py"))
        world.execute(world.operator(), Ti(2))
        found.update(world.files())
        return freeze(spec, store)

    monkeypatch.setattr(freezing, "freeze", slept)
    with pytest.raises(AirflowFailException, match="is older than the owner"):
        world.operator().execute(world.context(world.operator(), Ti(1)))

    assert world.files() == found


def test_the_same_task_instance_may_come_back_as_another_try(world):
    """Airflow failed a try that was not running and kept its id: the first one is not the owner (A2)."""
    operator, first = world.operator(), Ti(1, ti_id="ti-7")
    world.execute(operator, first)
    world.execute(world.operator(), Ti(2, ti_id="ti-7"))

    with pytest.raises(AirflowFailException, match=r"owned by ti-7 \(try 2\), not by ti-7 \(try 1\)"):
        world.resume(operator, first)


def test_a_retry_of_a_cancelled_run_halts(world):
    """The worker died before it acted on the cancel (A3)."""
    world.execute(world.operator(), Ti(1))
    cancel(world)

    retry = world.operator()
    world.execute(retry, Ti(2))
    leave(world)

    with pytest.raises(AirflowFailException, match="the run was stopped: cancelled; clear the task"):
        world.resume(retry, Ti(2))
    with pytest.raises(AirflowFailException, match="may count as a retry: clear it once more"):
        world.operator().execute(world.context(world.operator(), Ti(3)))
    assert types(world).count("attempt-intended") == 1


def test_a_clear_takes_a_cancelled_run_up(world):
    """The clear resumes from the last good checkpoint, in the same generation (A3)."""
    operator = world.operator()
    world.execute(operator, Ti(1))
    cancel(world)
    world.deferral(lambda: world.resume(operator, Ti(1)))
    leave(world)
    with pytest.raises(AirflowFailException):
        world.resume(operator, Ti(1))

    world.execute(world.operator(), Ti(2, max_tries=4))

    state = world.log.load()
    assert (state.generation, state.live.number, state.status) == (1, 2, "active")


@pytest.mark.parametrize("is_live", [True, False])
def test_a_retry_after_the_tasks_time_fails(world, is_live):
    """The attempt saves and ends; without an attempt the run ends at once (A3)."""
    operator = world.operator()
    world.execute(operator, Ti(1))
    if not is_live:
        world.backend.lose(world.handle)
        world.deferral(lambda: world.resume(operator, Ti(1)))
    timeout = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}
    with pytest.raises(TaskDeferralTimeout):
        operator.resume_execution(TRIGGER_FAIL_REPR, timeout, world.context(operator, Ti(1)))

    retry = world.operator()
    if is_live:
        world.execute(retry, Ti(2))
        leave(world)
    with pytest.raises(AirflowFailException, match="execution_timeout"):
        retry.execute(world.context(retry, Ti(2)))

    assert world.log.load().failure == "timeout"
    world.execute(world.operator(), Ti(3, max_tries=5))
    assert world.log.load().live.number == 2


def delivered(world, ti, *, callback=True):
    """Return a stage that succeeded and was delivered to *ti*."""
    operator = world.operator()
    world.execute(operator, ti)
    world.end(outputs={"model": "file:///model"})
    return world.finish(operator, ti) if callback else world.resume(operator, ti)


def test_a_crash_right_after_the_delivery_trains_nothing_again(world, caplog):
    """Airflow records the task as failed, the user clears it: the same result, from the same attempt (A4)."""
    first = delivered(world, Ti(1), callback=False)

    cleared = world.operator()
    again = cleared.execute(world.context(cleared, Ti(2, max_tries=5)))

    assert again["outputs"] == first["outputs"]
    assert types(world).count("attempt-intended") == 1
    assert "restart='fresh' trains from the start" in caplog.text


def test_a_clear_of_a_success_trains_again(world):
    """Airflow showed a success (A4)."""
    delivered(world, Ti(1))

    world.execute(world.operator(), Ti(2, max_tries=5))

    assert types(world).count("accepted") == 1
    assert world.log.load().generation == 2


def test_a_clear_after_a_second_delivery_trains_again(world):
    """A crash lost the first delivery, the second one arrived (A4)."""
    delivered(world, Ti(1), callback=False)
    operator, ti = world.operator(), Ti(2)
    context = world.context(operator, ti)
    operator.execute(context)
    for callback in operator.on_success_callback:
        callback(context)

    world.execute(world.operator(), Ti(3, max_tries=5))

    assert world.log.load().generation == 2


def test_the_users_own_success_callbacks_are_called_too(world):
    """They run after our callback, whose result does not depend on theirs (A4)."""
    called = []
    operator = world.operator(on_success_callback=[lambda _context: called.append(types(world)[-1])])
    world.execute(operator, Ti(1))
    world.end(outputs={"model": "file:///model"})

    world.finish(operator, Ti(1))

    assert called == ["accepted"]


def test_a_success_that_airflow_refused_is_not_accepted(world, capsys):
    """The user had marked the task failed; Airflow still calls the callback (A4)."""
    world.airflow_says = "failed"
    delivered(world, Ti(1))

    assert "accepted" not in types(world)
    assert "Airflow has the task as failed" in capsys.readouterr().out


def test_a_delivery_of_a_superseded_try_is_not_accepted(world, capsys):
    """By then a newer try owns the run, and delivers (A4)."""
    operator = world.operator()
    world.execute(operator, Ti(1))
    world.end(outputs={"model": "file:///model"})
    world.resume(operator, Ti(1))
    newer = world.operator()
    newer.execute(world.context(newer, Ti(2)))

    for callback in operator.on_success_callback:
        callback(world.context(operator, Ti(1)))

    assert "accepted" not in types(world)
    assert "a newer try owns the run" in capsys.readouterr().out


def test_an_acceptance_that_cannot_be_written_is_reported(world, monkeypatch, capsys):
    """The stage still succeeds (A4)."""
    operator = world.operator()
    world.execute(operator, Ti(1))
    world.end(outputs={"model": "file:///model"})
    world.resume(operator, Ti(1))
    monkeypatch.setattr(EventLog, "load", lambda _self: (_ for _ in ()).throw(StoreError("503")))

    operator.on_success_callback[0](world.context(operator, Ti(1)))

    assert "is not recorded as accepted (503)" in capsys.readouterr().out


def test_a_changed_spec_is_named_field_by_field(world, caplog):
    """Names without values: a value may be secret."""
    world.execute(world.operator(), Ti(1))
    text = SPEC.replace("cpu: 1", "cpu: 2").replace("train.py", "other.py")
    (world.dag_file.parent / "train.yaml").write_text(text)

    world.execute(world.operator(), Ti(2))

    told = caplog.text
    assert "(entrypoint, resources.requests.cpu); that counts from the next clear" in told
    assert "other.py" not in told


def test_no_answer_of_airflow_counts_as_its_word(world, monkeypatch):
    """The callback runs only after a success, so its call counts as Airflow's confirmation (A4)."""

    def away(*_):
        raise api_error(503)

    monkeypatch.setattr(execution, "task_state", away)

    delivered(world, Ti(1))

    assert types(world)[-1] == "accepted"
