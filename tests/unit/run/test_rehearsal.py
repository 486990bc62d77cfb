"""What a drill shows, judged from samples of a run before and after a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.run.rehearsal import (
    FAULTS,
    Bounds,
    NodeSample,
    Sample,
    has_resumed,
    is_detected,
    is_steady,
    judge,
)

BOUNDS = Bounds()


def node(step=None, *, claim=1, sequence=1, start=0, saved=None, phase="running", first_step_s=None):
    """A report of a node; a step takes half a second."""
    return NodeSample(claim, sequence, phase, step, start, saved, 0.5, first_step_s)


def at(at_s, *nodes, attempt=1, **more):
    """The run at a time: on one machine at $3.60 an hour, which is $0.001 a second."""
    fields = {
        "status": "active",
        "attempt": (1, attempt),
        "is_started": True,
        "allocation": "local/cpu-1",
        "usd_per_hour": 3.6,
        "usd": {(1, 1): 1 + at_s / 1000} if attempt == 1 else {(1, 1): 1.0, (1, 2): at_s / 1000},
    }
    return Sample(at_s, nodes=nodes, **(fields | more))


BEFORE = at(0, node(100, saved=80))


def shown(fault, *seen, before=BEFORE, **more):
    """The judgement of that fault."""
    return judge(FAULTS[fault], before, seen, bounds=BOUNDS, **more)


def test_a_lost_node_is_measured_from_its_loss_to_the_first_new_step():
    """Detected after 2 s; it resumes at the checkpoint of step 80 and steps after 30 s.

    Twenty steps of half a second are repeated, and the pause is paid: $0.01 + $0.03.
    """
    seen = [
        at(1, node(100, saved=80)),
        at(2, attempt=None, is_started=False),
        at(20, node(None, start=80, phase="restoring"), attempt=2),
        at(30, node(81, start=80), attempt=2),
    ]

    found = shown("lose-node", *seen)

    assert (found.detect_s, found.resume_s, found.pause_s) == (2, 30, 30)
    assert (found.steps_lost, found.committed_steps_lost) == (20, 0)
    assert found.usd_lost == pytest.approx(0.04)
    assert (found.before, found.after) == ("g1-a1 on local/cpu-1", "g1-a2 on local/cpu-1")
    assert found.is_passed


@pytest.mark.parametrize("new", [{"attempt": 2}, {"attempt": 1, "claim": 2}])
def test_the_first_step_is_taken_from_the_new_process_s_own_report(new):
    """Steps are reported every 15 s, but the start at once: it ran from 17 s on, and stepped 1 s later.

    Also a pod that waited for a machine, whose own times begin with its start. The training from then on is
    not part of the loss: 18 s, and twenty steps of half a second.
    """
    claim = new.pop("claim", 1)
    seen = [
        at(12, node(None, claim=claim, start=80, phase="setup"), **new),
        at(17, node(None, claim=claim, start=80), **new),
        at(30, node(120, claim=claim, start=80, first_step_s=1.0), **new),
    ]

    found = shown("lose-node", *seen)

    assert (found.resume_s, found.pause_s) == (18, 18)
    assert found.usd_lost == pytest.approx(0.018 + 0.010)


def test_the_end_of_the_attempt_may_report_later_steps_than_were_seen():
    """It ended at step 110, so that 30 steps are repeated."""
    assert shown("lose-node", at(30, node(81, start=80), attempt=2), last_step=110).steps_lost == 30


def test_a_step_of_a_valid_checkpoint_that_is_trained_again_is_a_missed_bound():
    """It had saved step 80, and resumes at 60."""
    found = shown("lose-node", at(30, node(61, start=60), attempt=2))

    assert (found.steps_lost, found.committed_steps_lost) == (40, 20)
    assert found.missed == ("20 steps of a valid checkpoint were lost",)


@pytest.mark.parametrize(
    ("seen", "missed"),
    [
        (at(630, attempt=None, is_started=False), "no new step within 630 s"),
        (at(601, node(81, start=80), attempt=2), "the first new step took 601 s of 600 s"),
        (
            at(40, attempt=None, is_started=False, status="failed", reason="it broke"),
            "the run ended before a new step was seen: failed: it broke",
        ),
    ],
)
def test_a_node_that_is_not_replaced_in_time_is_a_missed_bound(seen, missed):
    """Whether it comes too late, never, or the run ends (feature G4)."""
    assert shown("lose-node", seen).missed == (missed,)


def test_a_new_claim_of_the_node_is_a_replacement_within_the_attempt():
    """As on Kubernetes, where its Job makes another pod: detected by its claim, then measured."""
    seen = [at(5, node(None, claim=2, phase="setup")), at(12, node(83, claim=2, start=80))]

    found = shown("lose-node", *seen)

    assert (found.detect_s, found.resume_s, found.steps_lost) == (5, 12, 20)
    assert found.is_passed


def test_a_lost_machine_that_is_billed_until_it_was_last_seen_makes_nothing_cheaper():
    """Five seconds less than was thought; the pause of the next machine costs what it costs."""
    usd = {(1, 1): 0.995, (1, 2): 0.030}

    found = shown("lose-node", at(30, node(81, start=80), attempt=2, usd=usd))

    assert found.usd_lost == pytest.approx(0.030 + 0.010)


def test_what_is_not_priced_has_no_cost():
    """Steps that cannot be priced are not free."""
    before = replace(BEFORE, usd_per_hour=None)

    assert shown("lose-node", at(30, node(81, start=80), attempt=2), before=before).usd_lost is None


def test_another_node_s_replacement_may_throw_node_0_back_without_an_end_of_its_own():
    """As under torchrun: node 1 is replaced, and node 0 trains on from step 80, not from 100."""
    before = at(0, node(100, saved=80), node(100))
    seen = [
        at(5, node(104), node(None, claim=2, phase="setup")),
        at(20, node(80, sequence=2), node(80, claim=2)),
        at(25, node(85, sequence=3), node(85, claim=2)),
    ]

    found = shown("lose-node", *seen, before=before, node=1)

    assert (found.resume_s, found.steps_lost, found.committed_steps_lost) == (25, 24, 0)


@pytest.mark.parametrize(
    ("seen", "lost"),
    [
        ([at(30, node(130, claim=2, start=80))], 20),
        ([at(5, node(104)), at(20, node(80, sequence=2)), at(30, node(130, sequence=3))], 24),
    ],
)
def test_steps_after_the_fault_are_not_steps_before_it(seen, lost):
    """The new pod, or the old process thrown back, has already passed the last step when it reports."""
    before = at(0, node(100, saved=80), node(100))
    after = [replace(one, nodes=(*one.nodes, node(130, claim=2))) for one in seen]

    assert shown("lose-node", *after, before=before, node=1).steps_lost == lost


def test_every_node_must_train_again():
    """Node 1 is still being set up."""
    before = at(0, node(100), node(100))
    seen = [at(20, node(101, claim=2), node(None, claim=2, phase="setup"))]

    assert not has_resumed(FAULTS["lose-node"], before, seen)


def test_a_killed_sidecar_costs_nothing_once_it_reports_a_new_step():
    """An old report in the store is not enough, nor is a new one without a step."""
    fault = FAULTS["kill-sidecar"]
    silent, idle = at(1, node(100, sequence=1)), at(2, node(100, sequence=2))
    back = at(4, node(140, sequence=2))

    assert not has_resumed(fault, BEFORE, [silent])
    assert not has_resumed(fault, BEFORE, [idle])
    found = shown("kill-sidecar", silent, back)
    assert (found.detect_s, found.resume_s, found.pause_s) == (None, 4, 0)
    assert (found.steps_lost, found.committed_steps_lost, found.usd_lost) == (0, 0, 0)
    assert found.is_passed


def test_a_training_that_is_restarted_for_a_dead_sidecar_is_a_missed_bound():
    """It should have gone on."""
    found = shown("kill-sidecar", at(30, node(81, start=80), attempt=2))

    assert found.missed == ("the training was restarted, and should have gone on",)


def test_a_run_without_its_watcher_is_well_once_another_one_renews_the_lease():
    """The training alone is not enough, although it goes on."""
    fault, before = FAULTS["triggerer"], replace(BEFORE, lease=7)
    alone = at(15, node(130, sequence=2), lease=7)
    watched = at(40, node(180, sequence=3), lease=8)

    assert not has_resumed(fault, before, [alone])
    assert has_resumed(fault, before, [alone, watched])


def test_the_time_without_a_store_does_not_count_as_time_to_resume():
    """It is away for 60 s, in which the node is silent; its next report comes 3 s after."""
    before = at(-60, node(100, saved=80))
    silent = [at(-30, node(100)), at(-1, node(100))]

    found = shown("store-away", *silent, at(3, node(220, sequence=2)), before=before)

    assert (found.resume_s, found.steps_lost) == (3, 0)
    assert found.is_passed


def test_a_fault_without_effect_is_no_pass():
    """The node reports 30 s after its store should have gone away."""
    before = at(-60, node(100, saved=80))

    found = shown("store-away", at(-30, node(150, sequence=2)), at(3, node(220, sequence=3)), before=before)

    assert found.missed == ("node 0 reported to the store all the time: the fault had no effect",)


def test_a_move_pauses_from_the_last_step_before_it_to_the_first_after_it():
    """It trains on until it drains at 10 s, at step 130, and steps on the new machine at 50 s.

    The first machine is paid for 10 s of the pause of 40 s, the second one for the other 30.
    """
    seen = [
        at(10, node(130, sequence=2, saved=130), is_started=False),
        at(20, node(130, sequence=3, saved=130, phase="draining"), is_started=False),
        at(50, node(131, start=130), attempt=2, allocation="local/cpu-2", usd={(1, 1): 1.02, (1, 2): 0.03}),
    ]

    found = shown("change-type", *seen, target="local/cpu-2", detect_s=2.0)

    assert (found.detect_s, found.resume_s, found.pause_s) == (2, 50, 40)
    assert (found.steps_lost, found.committed_steps_lost) == (0, 0)
    assert found.usd_lost == pytest.approx(0.04)
    assert found.is_passed


def test_a_move_that_pauses_too_long_is_a_missed_bound():
    """Six minutes of five."""
    found = shown("grow", at(360, node(101, start=100), attempt=2, allocation="big"), target="big")

    assert found.missed == ("the pause took 360 s of 300 s",)


def test_a_new_attempt_on_another_allocation_than_requested_is_no_move():
    """It was lost meanwhile, and resumed where it was."""
    seen = [at(30, node(101, start=100), attempt=2)]

    assert not has_resumed(FAULTS["grow"], BEFORE, seen, target="2 x local/cpu-1")


def test_a_change_in_place_pauses_nothing():
    """The same process trains on, on what was requested."""
    found = shown("change-type", at(20, node(150, sequence=2), allocation="big"), target="big")

    assert (found.pause_s, found.steps_lost, found.usd_lost) == (0, 0, 0)
    assert found.is_passed


def test_what_is_unknown_stays_unknown():
    """Neither price nor restart step are reported: no amount is made up, nor a loss of nothing."""
    last = at(30, node(81, start=None), attempt=2, usd={(1, 1): None, (1, 2): 0.03})
    found = shown("lose-node", last)

    assert (found.steps_lost, found.committed_steps_lost, found.usd_lost) == (None, None, None)


@pytest.mark.parametrize(
    ("sample", "needs_checkpoint", "expected"),
    [
        (at(0, node(100, saved=80)), True, True),
        (at(0, node(100)), True, False),
        (at(0, node(100)), False, True),
        (at(0, node(100, start=100)), False, False),
        (at(0, node(100, start=80, saved=80)), True, False),
        (at(0, node(100), node(100, phase="setup")), False, False),
        (at(0, node(100), None), False, False),
        (at(0, node(100), is_started=False), False, False),
        (at(0, node(100), status="succeeded"), False, False),
        (at(0), False, False),
    ],
)
def test_the_next_fault_waits_until_the_stage_trains_and_has_saved(sample, needs_checkpoint, expected):
    """Otherwise losses in a row without a newer checkpoint would end the run."""
    assert is_steady(sample, needs_checkpoint=needs_checkpoint) is expected


def test_a_stop_of_the_attempt_is_the_first_sign_that_a_stall_was_noticed():
    """Before its end, and before the next attempt."""
    assert not is_detected("replaced", BEFORE, at(5, node(100)))
    assert is_detected("replaced", BEFORE, at(5, node(100), is_started=False))
