"""After any kill, clear or deletion: one live attempt at most, no orphan, no committed step lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from e2e.crowds import together

LONG = 600
"""More steps than any test waits for."""


def kill_slice(run) -> None:
    """SIGKILL the worker's processes of the task: its runner and the supervisor above it."""
    for pid in run.airflow.task_pids(run.dag_id, run.run_id, run.task_id):
        os.kill(pid, signal.SIGKILL)


@together("local")
def test_mark_failed_while_deferred_ends_the_attempt(begin: Callable):
    """The trigger's on_kill asks the attempt to save and stop; the task stays failed."""
    run = begin("stage", steps=LONG)
    run.wait_step(3)
    run.wait_watched()

    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")

    run.wait_gone()
    assert run.wait_end() == "failed"
    run.until("the recorded end", lambda: run.state().status == "stopped")
    assert "stop-requested" in [event.type for event in run.events()]
    assert [attempt.outcome for attempt in run.state().attempts] == ["stopped"]
    run.check()


@together("local")
def test_mark_failed_during_a_worker_slice_leaves_nothing_behind(begin: Callable):
    """The execution is killed between intent and act: nothing starts, then or later."""
    run = begin("held", held="before", steps=LONG)
    run.wait_held("before")

    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")

    run.until("the slice is dead", lambda: not run.airflow.task_pids(run.dag_id, run.run_id, "train"))
    run.open_gates()
    assert run.wait_end() == "failed"
    assert run.state().live.phase == "intended"
    assert run.steps() == []
    run.check()


@together("local")
def test_mark_failed_after_the_act_is_ended_by_the_lease(begin: Callable):
    """The execution dies before it records the start: the lease is not renewed, so the sidecar ends all."""
    run = begin("orphaned", held="after", steps=LONG)
    run.wait_held("after")

    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")

    run.wait_step(3)
    run.open_gates()
    run.wait_gone(timeout_s=90)
    assert run.wait_end() == "failed"
    run.check()


@together("local")
def test_worker_killed_between_intent_and_act_with_retries(begin: Callable):
    """The next try finds the intent and carries it out, also if the DAG run was set to queued (A1)."""
    run = begin("held", held="before", steps=10)
    run.wait_held("before")

    run.airflow.set_run_state(run.dag_id, run.run_id, "queued")
    kill_slice(run)

    run.open_gates()
    assert run.wait_end() == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    assert run.state().generation == 1
    run.check()


@together("local")
def test_worker_killed_after_the_act_with_retries(begin: Callable):
    """The machine was started and not recorded: the next try adopts it, without a second (feature C6)."""
    run = begin("held", held="after", steps=100)
    run.wait_held("after")

    kill_slice(run)

    run.open_gates()
    assert run.wait_end(timeout_s=150) == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    assert [step for _, _, step in run.steps()] == list(range(1, 101))
    run.check()


@together("local")
def test_worker_killed_without_retries_leaves_no_machine(begin: Callable):
    """No try returns: the machine is gone within ``orphan_after``."""
    run = begin("orphaned", held="after", steps=LONG)
    run.wait_held("after")

    kill_slice(run)

    run.wait_step(3)
    run.open_gates()
    run.wait_gone(timeout_s=90)
    assert run.wait_end() == "failed"
    run.check()


@together("local")
def test_clear_while_a_slice_runs(begin: Callable):
    """The old execution is killed and the new try carries its intent out."""
    run = begin("held", held="before", steps=10)
    run.wait_held("before")

    run.airflow.clear(run.dag_id, run.run_id, ["train"])

    run.until("the slice is dead", lambda: not run.airflow.task_pids(run.dag_id, run.run_id, "train"))
    run.open_gates()
    assert run.wait_end() == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    run.check()


@together("local")
def test_clear_while_deferred_adopts_the_attempt(begin: Callable):
    """The training continues: the new try owns it."""
    run = begin("stage", steps=100)
    run.wait_checkpoint()

    run.airflow.clear(run.dag_id, run.run_id, ["train"])

    run.until("the new owner", lambda: run.state().owner.try_number == 2)
    assert run.wait_end(timeout_s=150) == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    assert [step for _, _, step in run.steps()] == list(range(1, 101))
    run.check()


@together("local")
def test_clear_after_success_begins_a_new_generation(begin: Callable):
    """A delivered stage restarts from the beginning, not from its last checkpoint."""
    run = begin("stage", steps=8)
    assert run.wait_end() == "success"

    run.airflow.clear(run.dag_id, run.run_id, ["train"])

    run.until("the second generation", lambda: run.state().generation == 2)
    assert run.wait_end() == "success"
    assert [(g, s) for g, _, s in run.steps()] == [(g, s) for g in (1, 2) for s in range(1, 9)]
    run.check()


@together("local")
def test_deferral_timeout_saves_and_a_clear_goes_on(begin: Callable):
    """``execution_timeout`` counts deferred time; a retry does not override it, a clear does (A3)."""
    run = begin("stage_with_timeout", steps=120)

    assert run.wait_end() == "failed"
    assert run.state().failure == "timeout"
    for _ in range(3):  # each attempt has the whole time again
        run.airflow.clear(run.dag_id, run.run_id, ["train"])
        run.until("it goes on", lambda: run.state().status == "active")
        if run.wait_end() == "success":
            break

    outcomes = [attempt.outcome for attempt in run.state().attempts]
    assert outcomes[-1] == "succeeded"
    assert set(outcomes[:-1]) == {"drained"}
    run.check()


@together("local")
def test_dag_run_deleted_while_training_and_made_again(begin: Callable):
    """The new DAG run of the same name is a new generation; the old attempt is gone before it starts."""
    run = begin("stage", steps=60)
    run.wait_step(5)
    run.wait_watched()

    run.airflow.set_run_state(run.dag_id, run.run_id, "failed")
    run.airflow.delete_dag_run(run.dag_id, run.run_id)
    run.airflow.trigger_dag(run.dag_id, run_id=run.run_id, conf={"ledger": str(run.ledger), "steps": 10})

    run.until("the second generation", lambda: run.state().generation == 2)
    assert run.wait_end() == "success"
    assert [step for generation, _, step in run.steps() if generation == 2] == list(range(1, 11))
    run.check()


@together("local")
def test_dag_run_deleted_after_success_and_made_again(begin: Callable):
    """The result of the deleted DAG run is not delivered again, even right after the deletion.

    Airflow may take the old try's late "finished" for the new one's, and fail the new one before it starts.
    """
    run = begin("stage", steps=5)
    assert run.wait_end() == "success"

    run.airflow.delete_dag_run(run.dag_id, run.run_id)
    run.airflow.trigger_dag(run.dag_id, run_id=run.run_id, conf={"ledger": str(run.ledger), "steps": 6})

    run.until("the second generation", lambda: run.state().generation == 2)
    assert run.wait_end() == "success"
    assert [(g, s) for g, _, s in run.steps()] == [(1, s) for s in range(1, 6)] + [
        (2, s) for s in range(1, 7)
    ]
    run.check()


def test_triggerer_killed_during_training(begin: Callable):
    """Training continues meanwhile, and no line of its log is shown twice."""
    run = begin("stage", steps=100)
    run.wait_step(5)

    run.airflow.kill("triggerer")
    run.wait_step(20)
    run.airflow.restart("triggerer")

    assert run.wait_end() == "success"
    assert [step for _, _, step in run.steps()] == list(range(1, 101))
    shown = [line for line in run.airflow.logs(run.dag_id, run.run_id, "train") if line.startswith("step ")]
    assert len(shown) == len(set(shown))
    run.check()


def test_two_triggerers_for_a_moment(begin: Callable):
    """One triggerer stops until another has taken its triggers, then continues: one event counts."""
    run = begin("stage", steps=100)
    run.wait_step(5)

    with run.airflow.frozen("triggerer"), run.airflow.second("triggerer"):
        run.wait_step(40)
    run.airflow.restart("triggerer")

    assert run.wait_end() == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    assert [step for _, _, step in run.steps()] == list(range(1, 101))
    run.check()
