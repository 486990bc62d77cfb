"""A simulated machine does what a real one does: real sidecar and wrapper over a simulated training."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def facts():
    """What happened in the scenes, from a process with the world's clocks."""
    command = [sys.executable, "-m", "tests.simulation.node_scenes"]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=True, capture_output=True, timeout=60
    )
    return json.loads(found.stdout)


def test_cooperating_code_loses_no_step_in_a_drain(facts):
    """The last step trained is saved, restored by the next attempt, and not trained again (G7)."""
    found = facts["drained session"]
    step = found["trained"]

    assert found["ends"] == ["drained", "succeeded"]
    assert found["saved"] == f"g1-step-{step:08}-a1"
    assert found["restored"] == [found["saved"]]
    assert found["begins"] == step
    assert len(found["outputs"]) == 1


def test_code_that_knows_nothing_continues_from_its_last_complete_folder(facts):
    """SIGTERM ends it; the next attempt finds the newest snapshot in its own folder (G7)."""
    found = facts["drained saver"]

    assert found["ends"] == ["drained", "succeeded"]
    assert found["saved"] is None
    assert found["begins"] > 0
    assert found["restored"] == [f"g1-step-{found['begins']:08}-a1"]
    assert found["trained"] - found["begins"] <= 600 / 7 + 2


def test_ranks_advance_together_and_stall_without_one(facts):
    """Two nodes do the same steps; one alone does none until the other is replaced (G7)."""
    found = facts["lost node"]

    assert found["together"][0] == found["together"][1] > 0
    assert found["steps"][0] == found["steps"][1]
    assert found["is_alive"]
    assert found["ends"] == ["succeeded", "succeeded"]
    assert found["claims"] == ["g1-a1-n0-000001.json", "g1-a1-n1-000001.json", "g1-a1-n1-000002.json"]


def test_an_elastic_training_goes_on_without_a_node(facts):
    """The node that is left trains on, slower; the new one joins (G7)."""
    found = facts["lost elastic node"]

    assert found["steps"][1] > found["steps"][0]
    assert found["ends"] == ["succeeded", "succeeded"]


def test_ranks_end_that_look_for_rank_0_where_it_no_longer_is(facts):
    """Another machine is rank 0, at another address: node 1 has lost its own (G7)."""
    found = facts["second rank 0"]

    assert found["end"] == "peer-lost"
    assert found["after_s"] < 600


def test_a_sidecar_that_dies_at_any_effect_is_continued_by_the_next_one(facts):
    """It keeps its claim, and nothing of the training is lost (G7)."""
    for found in facts["killed sidecar"]:
        assert found == {"ends": ["succeeded"], "claims": 1, "checkpoints": 2}


def test_a_node_without_an_owner_saves_and_ends(facts):
    """The lease stands still for half an hour: the sidecar drains the training (G7)."""
    found = facts["orphaned"]

    assert found["ends"] == ["orphaned"]
    assert 1800 <= found["after_s"] <= 2100
    assert found["saved"] > "g1-step-00000350-a1"


def test_sigterm_makes_cooperating_code_save_what_it_has(facts):
    """Within the grace the step is saved and in the store (G7)."""
    found = facts["signalled"]

    assert found["ends"] == ["stopped"]
    assert found["newest"] == f"g1-step-{found['trained']:08}-a1"


def test_a_torn_checkpoint_is_refused_for_the_one_before(facts):
    """Bytes that the store lost are found before the training sees them (G7)."""
    found = facts["torn"]

    assert found["restored"] == [found["before"]]
    assert found["ends"] == ["succeeded"]


def test_a_wrapper_that_dies_alone_ends_its_node_as_killed(facts):
    """The machine's own process reports it, and what was saved is in the store (G7)."""
    found = facts["killed wrapper"]

    assert found["ends"] == ["killed"]
    assert found["saved"] == found["checkpoints"] != []


def test_a_seed_gives_the_same_world_each_time(facts):
    """Twice in one process, with crashes, refusals and a full disk; another seed gives another world (G7)."""
    first, again, other = facts["lines"]

    assert first == again
    assert len(first) > 10
    assert first != other
