"""The example of phases: four nodes, eight, two."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from envscaler_airflow.envspec import load_spec
from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed
from envscaler_airflow.scaling import Observation, decide, policy_of

EXAMPLES = Path(__file__).parents[3] / "dags/examples"
POLICY = policy_of(load_spec(EXAMPLES / "envs/phases.yaml"))
OFFER = Offer("kubernetes", "r", "cpu-1", "on-demand", vcpus=1, memory_gib=1, usd_per_hour=1.0)
NODES = {count: Allocation(OFFER, count) for count in (2, 4, 8)}


def seen(nodes, phase, **more):
    """A check on so many nodes; a move takes a minute."""
    return Observation(
        current=NODES[nodes],
        candidates=tuple(NODES.values()),
        elapsed_s=600.0,
        units_done=50.0,
        units_total=300.0,
        speeds={NODES[nodes].name: Speed(1.0, 0.01, "measured", 600.0)},
        overheads=Overheads(start_s=60.0),
        training_phase=phase,
        **more,
    )


def test_the_stage_walks_from_four_to_eight_to_two():
    """Each announced phase has its number of nodes, and nothing moves until the next one."""
    walk, here = [], 4
    for phase in ("loading", "training", "evaluation"):
        got = decide(seen(here, phase), POLICY)
        here = got.target.nodes
        walk.append((got.action, here))
        assert decide(seen(here, phase), POLICY).action == "keep"

    assert walk == [("keep", 4), ("move", 8), ("move", 2)]


def test_a_bigger_need_is_met_before_its_phase_begins():
    """Earlier runs forecast training in 80 s, and a move takes 60: now. In 200 s: not yet (feature D5)."""
    soon, later = (
        decide(seen(4, "loading", next_phase="training", next_phase_in_s=left_s), POLICY)
        for left_s in (80.0, 200.0)
    )

    assert (soon.action, soon.target.nodes) == ("move", 8)
    assert "training begins in 80 s" in soon.reason
    assert later.action == "keep"


def test_a_smaller_need_waits_for_its_phase():
    """Evaluation on two nodes starts in 30 s: training keeps its eight until then."""
    got = decide(seen(8, "training", next_phase="evaluation", next_phase_in_s=30.0), POLICY)

    assert got.action == "keep"


def test_a_phase_that_does_not_pay_for_its_move_is_passed_over():
    """An evaluation of 100 s: moving there and back takes 120 s. One of an hour pays."""
    short, long = (
        decide(seen(8, "evaluation", phase_lasts_s={"evaluation": lasts_s}), POLICY)
        for lasts_s in (100.0, 3600.0)
    )

    assert short.action == "keep"
    assert "skipped: it lasts 100 s, and moving there and back takes 120 s" in short.reason
    assert (long.action, long.target.nodes) == ("move", 2)


def test_a_phase_that_needs_more_than_there_is_says_so():
    """Without eight nodes among the candidates the stage stays, and the reason names the need."""
    few = replace(seen(4, "training"), candidates=(NODES[2], NODES[4]))

    got = decide(few, POLICY)

    assert got.action == "keep"
    assert "needs 8 nodes" in got.reason


@pytest.fixture
def walk():
    """The training itself."""
    where = importlib.util.spec_from_file_location("walk", EXAMPLES / "phases" / "walk.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


def test_the_training_announces_the_phases_of_the_spec(walk, tmp_path):
    """Every phase has its need in the spec; at its end all steps are done."""
    walk.main(["--output", str(tmp_path), "--rounds", "1"])

    assert {name for name, _ in walk.PHASES} == {need.phase for need in POLICY.phases}
    assert json.loads((tmp_path / "step.json").read_text()) == {"step": 300}
    assert [walk.phase_of(step) for step in (0, 59, 60, 259, 260, 299)] == [
        "loading", "loading", "training", "training", "evaluation", "evaluation",
    ]  # fmt: skip
