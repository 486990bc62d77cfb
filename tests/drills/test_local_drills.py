"""Every fault that a drill knows, on a real run of this machine: ``make drills``."""

from __future__ import annotations

import os

import pytest
from fakes.drilled import Drilled

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """One run, broken by every test after the other."""
    made = Drilled(tmp_path_factory.mktemp("drilled"))
    yield made
    made.close()


def passed(drilled, fault, *, options=()):
    """What the fault showed; every bound was kept."""
    code, shown = drilled.drill(fault, options=options)
    assert code == 0, shown
    return shown[fault]


@pytest.mark.parametrize("fault", ["lose-node", "stall"])
def test_what_ends_an_attempt_loses_no_saved_step(drilled, fault):
    """Another attempt resumes, and the report says what it took (G4)."""
    shown = passed(drilled, fault)

    assert shown["before"] != shown["after"]
    assert shown["detect_s"] > 0
    assert shown["pause_s"] == shown["resume_s"]


def test_a_training_that_is_out_of_memory_gets_more(drilled):
    """By the kernel's own kill at the limit of its cgroup."""
    if os.geteuid() != 0:
        pytest.skip("a memory cgroup usually needs root")

    shown = passed(drilled, "oom")

    assert shown["before"] != shown["after"]
    assert [one.outcome for one in drilled.state().attempts][-2] == "out-of-memory"


@pytest.mark.parametrize("fault", ["kill-sidecar", "store-away"])
def test_what_leaves_the_training_alone_pauses_nothing(drilled, fault):
    """The same attempt goes on."""
    shown = passed(drilled, fault)

    assert shown["before"] == shown["after"]
    assert (shown["pause_s"], shown["steps_lost"]) == (0, 0)


def test_the_training_outlives_the_shell_that_owns_it(drilled):
    """Another one takes the run over, and the attempt goes on."""
    shown = passed(drilled, "triggerer", options=("--restart", drilled.restart()))

    assert shown["before"] == shown["after"]
    assert drilled.state().owner.try_number == 2


@pytest.mark.parametrize(
    ("fault", "name"),
    [("grow", "2 x local/cpu-1"), ("shrink", "local/cpu-1"), ("change-type", "local/cpu-2")],
)
def test_a_move_that_a_person_requests_is_accepted_and_loses_nothing(drilled, fault, name):
    """It saves first, so that no step is made twice."""
    shown = passed(drilled, fault)

    assert shown["after"].endswith(f" on {name}")
    assert shown["committed_steps_lost"] == 0
    assert shown["pause_s"] < 300
