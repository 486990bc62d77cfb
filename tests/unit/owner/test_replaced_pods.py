"""Bills of attempts with a replaced pod: the first pod's work counts, and repeated work is lost."""

from __future__ import annotations

import pytest

from envscaler_agent.protocol import Ended, Progress, Resume, Status, claim_name, status_name
from envscaler_airflow.owner import report
from envscaler_airflow.owner.stage import Delivered, Wake
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store.run import Run


def said(world, claim, *, start, step, elapsed_s, ended=None, resume=None):
    """Let a pod of node 0 claim it and report."""
    world.store.write(f"{world.prefix}/{claim_name(1, 1, 0, claim)}", b'{"uid": "u", "boot_id": "b"}')
    progress = Progress(step=step, total_steps=100, elapsed_s=elapsed_s, first_step_s=1.0, save_s=0.0)
    status = Status(
        generation=1,
        attempt=1,
        node=0,
        sequence=claim,
        claim=claim,
        phase="ended" if ended else "running",
        progress=progress,
        start_step=start,
        resume=resume,
        setup_s=9.0,
        ended=ended,
        outputs={"model": world.output} if ended else {},
    )
    world.store.write(f"{world.prefix}/{status_name(1, 1, 0, claim)}", status.to_json())


def test_the_first_pods_work_is_work_and_what_was_made_again_is_lost(world):
    """60 of 100 steps, evicted, again from 0: 60 steps lost, and nothing of the first hour is idle (D5)."""
    world.owner().enter()
    attempt = world.state.live
    said(world, 1, start=0, step=60, elapsed_s=3601.0)
    said(world, 2, start=0, step=100, elapsed_s=6001.0, ended=Ended(exit_code=0, reason="succeeded"))

    found = report.measured(Run(world.store, world.prefix), attempt)

    assert (found["earlier_pods_s"], found["repeated_steps"], found["start_step"]) == (3600.0, 60, 0)


def test_a_replacement_that_resumed_repeats_what_was_not_saved(world):
    """Evicted at step 60, resumed from 50: ten steps again; the attempt began at 0 (D5)."""
    world.owner().enter()
    said(world, 1, start=0, step=60, elapsed_s=3601.0)
    said(world, 2, start=50, step=100, elapsed_s=3001.0)

    found = report.measured(Run(world.store, world.prefix), world.state.live)

    assert (found["repeated_steps"], found["start_step"]) == (10, 0)


def test_what_all_nodes_do_again_after_another_was_replaced_is_lost(world):
    """Node 0 stays, and says how many steps; a number below 0 is not believed."""
    world.owner().enter()
    said(
        world,
        1,
        start=0,
        step=95,
        elapsed_s=3601.0,
        resume=Resume((1, 3), "g1-step-00000070-a1", 1, 70, 95, 30),
    )

    found = report.measured(Run(world.store, world.prefix), world.state.live)
    assert found["repeated_steps"] == 30

    said(world, 1, start=0, step=95, elapsed_s=3601.0, resume=Resume(repeated_steps=-1))
    assert "repeated_steps" not in report.measured(Run(world.store, world.prefix), world.state.live)


def test_sums_of_what_nodes_report_always_fit_into_the_event_of_the_end(world):
    """Each is believed alone; an end that cannot be written would never be recorded."""
    owner = world.owner()
    owner.enter()
    for claim in (1, 2):
        said(world, claim, start=0, step=10**15, elapsed_s=9e14)
    said(world, 3, start=0, step=10, elapsed_s=6001.0, ended=Ended(exit_code=0, reason="succeeded"))
    world.backend.end(world.handle)

    assert isinstance(owner.resume(Wake("status")), Delivered)
    end = world.state.attempts[0].end
    assert (end.earlier_pods_s, end.repeated_steps) == (1e15, 10**15)


def test_the_bill_counts_steps_that_were_made_twice(world):
    """An hour, a gap of a minute, and 1,700 s: 160 steps made, 60 lost, 70 s idle in all (D5)."""
    world.owner().enter()
    ended = {
        "outcome": "succeeded",
        "start_step": 0,
        "step": 100,
        "repeated_steps": 60,
        "earlier_pods_s": 3590.0,
        "setup_s": 9.0,
        "first_step_s": 1.0,
        "elapsed_s": 1691.0,
        "save_s": 0.0,
        "usage": [[0, 0.0, 3600.0], [0, 3660.0, 5360.0]],
    }
    world.log.append(
        world.state.number,
        read_body("attempt-ended", {"generation": 1, "attempt": 1, **ended}),
        actor=world.state.owner,
    )

    bill = report.run_bill(world.state, now=world.clock.time())

    [line] = bill.lines
    assert (line.steps, line.lost_steps) == (160, 60)
    assert line.use.idle_s == pytest.approx(3600 + 1700 - 10 - 3590 - 1690)


def test_an_attempt_with_one_pod_has_nothing_before_it(world):
    """Unchanged from before."""
    world.owner().enter()
    said(world, 1, start=0, step=60, elapsed_s=3601.0)

    found = report.measured(Run(world.store, world.prefix), world.state.live)

    assert "repeated_steps" not in found
    assert "earlier_pods_s" not in found
