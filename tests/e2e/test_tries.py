"""On a real Airflow: a retry is not a clear, nor is a clear of another task; and which try may act."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import psutil
from e2e.crowds import together

from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.store.run import Run

LONG = 600
"""More steps than any test waits for."""


def kill_execution(run) -> None:
    """SIGKILL the worker's processes of the task: its runner and the supervisor above it."""
    for pid in run.airflow.task_pids(run.dag_id, run.run_id, run.task_id):
        os.kill(pid, signal.SIGKILL)


def is_over(pid: int) -> bool:
    """The process has ended, also if its parent is gone and does not wait for it."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def cancel(run) -> None:
    """`envscaler cancel`."""
    request_stop(Run(run.store, run.key), reason="cancelled", by="test")


def clear(run) -> None:
    """Clear the task, and return once its next try owns the run."""
    before = run.state().owner
    run.airflow.clear(run.dag_id, run.run_id, ["train"])
    run.until("the next try", lambda: run.state().owner.try_number > before.try_number)


def types(run) -> list[str]:
    """Types of the run's events."""
    return [event.type for event in run.events()]


def goes_on(run) -> None:
    """The next attempt starts from the last checkpoint of the first, and is then ended for good."""
    run.wait_step(3, attempt=2)
    run.wait_watched()
    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")
    run.wait_gone()
    assert run.state().generation == 1
    assert [attempt.outcome for attempt in run.state().attempts][:1] == ["drained"]
    run.check()


@together("local")
def test_retries_of_a_recreated_dag_run_go_on(begin: Callable):
    """The DAG run is recreated after the third try; its first try is lost before it starts (A1)."""
    run = begin("held", steps=LONG)
    run.wait_step(3)
    for _ in range(2):
        run.wait("deferred")
        clear(run)
    run.wait_watched()
    run.airflow.set_run_state(run.dag_id, run.run_id, "failed")
    run.wait_gone()
    run.airflow.delete_dag_run(run.dag_id, run.run_id)
    run.gate("lost").touch()
    run.gate("before").touch()
    run.airflow.trigger_dag(run.dag_id, run_id=run.run_id, conf={"ledger": str(run.ledger), "steps": 8})

    run.wait_held("before")
    assert run.state().owner.try_number > 1
    kill_execution(run)
    run.open_gates()

    assert run.wait_end(timeout_s=150) == "success"
    assert run.wait("success")["try_number"] > 2
    assert types(run).count("generation") == 2
    assert len({event.actor.life for event in run.events() if event.actor}) == 2
    assert [step for generation, _, step in run.steps() if generation == 2] == list(range(1, 9))
    run.check()


@together("local")
def test_an_older_try_that_wakes_late_writes_nothing(begin: Callable):
    """Its supervisor was killed while it slept, and the next try trains (A2)."""
    run = begin("held", held="asleep", steps=LONG)
    run.wait_held("asleep")
    runner, supervisor = run.airflow.task_pids(run.dag_id, run.run_id, "train")
    os.kill(supervisor, signal.SIGKILL)
    run.wait_step(3)
    run.wait("deferred")

    run.gate("asleep").with_suffix(".asleep.reached").unlink()
    run.until("the older try is over", lambda: is_over(runner))

    made = len(run.steps())
    run.until("five more steps", lambda: len(run.steps()) > made + 5)
    assert run.wait("deferred")["try_number"] == 2
    assert {event.actor.try_number for event in run.events() if event.actor} == {2}
    assert (types(run).count("generation"), types(run).count("owner")) == (1, 0)
    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")
    run.wait_gone()
    run.check()


@together("local")
def test_machines_that_do_not_answer_use_up_no_retry(begin: Callable):
    """The first execution is cut off after the start of its attempt; the next one finds it running (A7)."""
    run = begin("held_without_retries", held="unanswered", steps=60)
    run.until("the answer is lost", lambda: not run.gate("unanswered").exists(), timeout_s=200)

    assert run.wait_end(timeout_s=150) == "success"

    log = run.airflow.logs(run.dag_id, run.run_id, "train")
    assert run.wait("success")["try_number"] == 1
    assert any("uses up no retry" in line for line in log)
    assert [step for _, _, step in run.steps()] == list(range(1, 61))
    run.check()


@together("local")
def test_a_retry_of_a_cancelled_run_halts(begin: Callable):
    """The worker dies before it acts on the cancel, and a sibling is cleared; a clear resumes it (A3)."""
    run = begin("held", held="after", steps=LONG)
    run.wait_held("after")
    run.wait_checkpoint()

    cancel(run)
    run.airflow.clear(run.dag_id, run.run_id, ["sibling"])
    kill_execution(run)
    run.open_gates()

    run.wait("failed", timeout_s=150)
    assert (run.state().status, run.state().reason) == ("stopped", "cancelled")
    assert types(run).count("attempt-intended") == 1
    run.airflow.clear(run.dag_id, run.run_id, ["train"])
    goes_on(run)


@together("local")
def test_a_clear_before_any_try_saw_the_cancel_stops_once_more(begin: Callable):
    """Airflow dates no clears, so a cancel that no try has answered counts; one more clear goes on (A3)."""
    run = begin("held", held="after", steps=LONG)
    run.wait_held("after")
    run.wait_checkpoint()

    cancel(run)
    run.airflow.clear(run.dag_id, run.run_id, ["train"])
    run.until("the old try is dead", lambda: not run.airflow.task_pids(run.dag_id, run.run_id, "train"))
    run.open_gates()
    run.wait("failed", timeout_s=150)
    run.airflow.clear(run.dag_id, run.run_id, ["train"])

    goes_on(run)


@together("local")
def test_a_crash_right_after_the_delivery_trains_nothing_again(begin: Callable):
    """Airflow has the task as failed; a clear delivers, the next one trains from the start (A4)."""
    run = begin("held_without_retries", held="delivered", steps=5)
    run.wait_held("delivered")

    kill_execution(run)
    run.open_gates()

    assert run.wait_end() == "failed"
    run.airflow.clear(run.dag_id, run.run_id, ["train"])
    run.wait("success", timeout_s=150)
    assert [step for _, _, step in run.steps()] == list(range(1, 6))
    uri = run.airflow.xcom(run.dag_id, run.run_id, "train", "result")
    assert re.search(r"/outputs/g1-a\d+-c\d+/result\Z", uri)
    run.until("the acceptance", lambda: types(run)[-1] == "accepted")
    run.airflow.clear(run.dag_id, run.run_id, ["train"])
    run.until("the second generation", lambda: run.state().generation == 2)
    assert run.wait_end() == "success"
    run.check()


def test_two_schedulers(begin: Callable):
    """A second scheduler beside the first: the stage starts once, and makes each step once."""
    run = begin("stage", steps=100)
    run.wait_step(3)

    with run.airflow.second("scheduler", timeout_s=120):
        run.wait_step(30)
        other = begin("stage", steps=5)
        assert other.wait_end() == "success"

    assert run.wait_end() == "success"
    for one in (run, other):
        assert [(a.number, a.outcome) for a in one.state().attempts] == [(1, "succeeded")]
        one.check()
    assert [step for _, _, step in run.steps()] == list(range(1, 101))
