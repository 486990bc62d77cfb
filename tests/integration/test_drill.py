"""``envscaler drill`` on a real run of this machine; the faults that take minutes are in tests/drills."""

from __future__ import annotations

import pytest
from fakes.drilled import Drilled

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def drilled(tmp_path):
    """A run that trains."""
    made = Drilled(tmp_path)
    yield made
    made.close()


def test_a_lost_node_and_a_dead_sidecar_are_measured_and_survived(drilled):
    """The node is replaced by an attempt that resumes; the sidecar comes back without one (feature G4)."""
    code, shown = drilled.drill("lose-node", "kill-sidecar")

    lost, alone = shown["lose-node"], shown["kill-sidecar"]
    assert code == 0, shown
    assert (lost["before"][:5], lost["after"][:5]) == ("g1-a1", "g1-a2")
    assert 0 < lost["detect_s"] <= lost["resume_s"] == lost["pause_s"] < 600
    assert lost["committed_steps_lost"] == 0
    assert lost["usd_lost"] > 0
    assert (alone["before"][:5], alone["after"][:5]) == ("g1-a2", "g1-a2")
    assert (alone["pause_s"], alone["steps_lost"]) == (0, 0)
    assert 0 < alone["resume_s"] < 60
    assert [(one.number, one.outcome) for one in drilled.state().attempts] == [(1, "lost"), (2, "")]
