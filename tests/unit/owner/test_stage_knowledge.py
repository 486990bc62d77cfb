"""Every attempt is planned with what the run has measured, and the plan can be recomputed from its record."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.errors import CapacityError
from envscaler_airflow.owner import choose
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.owner.stage_knowledge import knowledge_of
from envscaler_airflow.planning import Goal
from envscaler_airflow.planning.profile import StageProfile
from envscaler_airflow.run.measured import start_s
from envscaler_airflow.testing.scripted_backend import cpu_offer

OFFERS = (cpu_offer(1, usd_per_hour=1.0), cpu_offer(2, usd_per_hour=1.5))
HERE, TWICE = (offer.name for offer in OFFERS)


@pytest.fixture
def lost(new_world):
    """A run of 1000 steps whose attempt was lost at step 110, after 100 s of training, saved at 100."""
    world = new_world(OFFERS)
    world.owner(value_of_hour=0.0).enter()
    name = world.save(100)
    timed = {"elapsed_s": 130.0, "first_step_s": 20.0, "save_s": 10.0}
    world.say(step=111, checkpoint=name, checkpoint_s=10.0, **timed)
    world.backend.lose(world.handle)
    return world


def planned(world):
    """Return the recorded plan."""
    return json.loads(world.store.read(f"{world.prefix}/plan.json"))


def test_the_first_plan_knows_only_the_defaults_and_says_so(new_world):
    """No speed is known: $/h decides."""
    world = new_world(OFFERS)
    world.owner(value_of_hour=0.0).enter()

    made = planned(world)

    assert made["chosen"]["allocation"]["offer"]["instance_type"] == "cpu-1"
    assert made["notes"][0] == "no speed is known yet: ranked by USD an hour, without times"
    assert made["inputs"]["knowledge"]["sources"]["start"] == "not measured yet: a chosen default"


def replan(world):
    """Plan after the same machine was refused: all measurements count."""
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    world.backend.fail_next("submit", CapacityError("none left"))
    owner.resume(Wake("backoff"))
    owner.resume(Wake("backoff"))
    return planned(world)


def test_the_next_attempt_is_planned_with_what_this_run_measured(lost):
    """1.1 steps a second here, by the stated ratio 2.09 there (feature B10)."""
    made = replan(lost)

    known = made["inputs"]["knowledge"]
    assert known["units"] == 889.0
    assert known["speeds"][HERE]["mean"] == pytest.approx(1.1)
    assert known["speeds"][TWICE]["mean"] == pytest.approx(2.09)
    assert known["sources"]["speed"] == "measured in this run, stated in scaling.speedup"
    assert made["chosen"]["allocation"]["offer"]["instance_type"] == "cpu-2"
    assert made["chosen"]["estimate"]["train_s"] == pytest.approx(889 / 2.09, rel=0.02)


def test_the_cost_to_finish_decides_as_soon_as_speeds_are_known(lost):
    """889 steps: $1 an hour at 1.1 a second cost more than $1.50 at 2.09."""
    owner = lost.owner(value_of_hour=0.0)
    owner.enter()
    known = knowledge_of(lost.state, owner.owned.stage.spec, OFFERS, StageProfile(), now=0.0)

    _, made = choose.make_plan(lost.state, owner.owned.stage.spec, OFFERS, Goal(), known)

    assert [item.allocation.name for item in made.candidates] == [TWICE, HERE]


def test_a_forecast_ends_no_stage_that_has_begun(lost):
    """No offer finishes within a second: the fastest is chosen, and a first attempt would be refused."""
    state, spec = lost.state, lost.owner().owned.stage.spec
    lost.owner(value_of_hour=0.0).enter()
    state = lost.state
    known = knowledge_of(state, spec, OFFERS, StageProfile(), now=0.0)
    goal = Goal("deadline", deadline_s=1.0)

    inputs, made = choose.make_plan(state, spec, OFFERS, goal, known)
    _, first = choose.make_plan(replace(state, generation=2), spec, OFFERS, goal, known)
    guess = replace(known, is_guess=True)
    _, changed = choose.make_plan(replace(state, generation=2), spec, OFFERS, goal, guess)

    assert made.chosen.allocation.name == TWICE
    assert made.notes[0].startswith("the forecast breaks the budget or the deadline on every offer")
    assert inputs.plan() == made
    assert first.chosen is None
    assert changed.chosen is not None, "what other code took says nothing certain about this one"


def test_the_plan_of_a_run_is_recomputed_from_its_record(lost):
    """The owner's plan.json and the shell's are the same bytes (feature G6)."""
    recorded = replan(lost)

    args = ["explain", lost.prefix, "--plan", "--store", lost.store.url]
    again = CliRunner().invoke(main, [*args, "--json"])
    words = CliRunner().invoke(main, args)

    assert again.exit_code == 0, again.output
    for more in ("schema", "targets", "inputs", "forecast"):
        recorded.pop(more)
    assert again.stdout == json.dumps(recorded, indent=1) + "\n"
    assert "measured in this run, stated in scaling.speedup" in words.stdout
    assert "differs" not in words.stdout


def test_a_plan_of_another_version_is_named(lost):
    """Without inputs there is nothing to make it from."""
    lost.store.write(f"{lost.prefix}/plan.json", b'{"schema": "2.0", "candidates": []}')

    found = CliRunner().invoke(main, ["explain", lost.prefix, "--plan", "--store", lost.store.url])

    assert found.exit_code != 0
    assert "plan.json: has no inputs that this version reads" in found.output


def test_the_start_is_measured_from_the_intent_to_the_first_step(lost):
    """20 s to the first step, and no set-up was reported."""
    lost.owner(value_of_hour=0.0).enter()

    assert start_s(lost.state.attempts_of(1)[:1]) == pytest.approx(20.0)
