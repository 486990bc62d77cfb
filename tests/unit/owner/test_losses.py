"""How often spot is lost, and how often to save because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.launch import SessionSettings
from envscaler_airflow.owner import limits
from envscaler_airflow.owner.limits import checkpoint_interval_s
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.planning.profile import Losses
from envscaler_airflow.run import AttemptState, Event, RunState
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.run.measured import save_s_of
from envscaler_airflow.scaling.deadline import Hazard
from envscaler_airflow.scaling.deadline.risk import age_bin

DEMAND = Offer("scripted", "", "gpu-1", "on-demand", vcpus=8, memory_gib=32, usd_per_hour=3.0)
SPOT = replace(DEMAND, capacity_type="spot", usd_per_hour=1.0)
PRIOR = Hazard().up[age_bin(3.0)]
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
entrypoint: [python, train.py]
checkpoint: {every: 1h}
"""


def lived(hours, outcome="lost", *, offer=SPOT, nodes=1, **ended):
    """Return an attempt that ran for this long."""
    return AttemptState(
        1, 1, Allocation(offer, nodes), phase="ended", started_at=0.0, ended_at=hours * 3600.0,
        ended=AttemptEnded(generation=1, attempt=1, outcome=outcome, **ended),
    )  # fmt: skip


def run_of(*attempts):
    """Return a run with these attempts."""
    return RunState(generation=1, attempts=attempts)


def stage(every="1h"):
    """Return a stage with this checkpoint interval."""
    return EnvSpec.from_dict({"version": "v1", "name": "s", "checkpoint": {"every": every}})


@pytest.mark.parametrize(
    ("attempts", "seen"),
    [
        ((), (0, 0)),
        ((lived(10),), (1, 10)),
        ((lived(5, nodes=2),), (1, 10)),
        ((lived(10, "drained"),), (0, 10)),
        ((lived(10, "failed"), lived(10, "killed")), (1, 20)),
        ((lived(1000, offer=DEMAND),), (0, 0)),
    ],
)
def test_losses_are_counted_over_node_hours_on_spot(attempts, seen):
    """In addition to ten hours at the fitted rate; on-demand and other outcomes do not count."""
    lost, hours = seen

    got = limits.losses_per_hour(run_of(*attempts), now=0.0)

    assert got == pytest.approx((lost + 10 * PRIOR) / (hours + 10))


def test_losses_of_earlier_runs_count_too():
    """Two in 20 hours before, one in 10 hours now."""
    got = limits.losses_per_hour(run_of(lived(10)), now=0.0, earlier=Losses(hours=20.0, losses=2))

    assert got == pytest.approx((3 + 10 * PRIOR) / (30 + 10))


def test_only_spot_is_interrupted():
    """On-demand is not interrupted, as far as is known."""
    assert limits.interruptions((DEMAND, SPOT), 0.2) == {SPOT.name: 0.2}


@pytest.mark.parametrize(
    ("ended", "save_s"),
    [
        ({"save_s": 60.0, "checkpoints": 4, "checkpoint_s": 90.0}, 15.0),
        ({"save_s": 60.0, "checkpoints": 0, "checkpoint_s": 90.0}, 90.0),
        ({"checkpoint_s": 90.0}, 90.0),
        ({}, None),
    ],
)
def test_a_checkpoint_costs_what_training_stood_still(ended, save_s):
    """60 s over four saves; the last one's whole time where only that is known."""
    assert save_s_of(AttemptEnded(generation=1, attempt=1, outcome="lost", **ended)) == save_s


def test_the_interval_is_daly_s():
    """36 s for a save, and the rate after ten hours with a loss: about 27 minutes between two."""
    state = run_of(lived(10, checkpoint_s=36.0))
    per_hour = limits.losses_per_hour(state, now=0.0)

    got = limits.checkpoint_every_s(stage(), state, Allocation(SPOT), now=0.0)

    assert got == checkpoint_interval_s(36.0, per_hour)
    assert 1000 < got < 3600


def test_a_higher_price_than_before_shortens_it():
    """Spot at twice this run's earlier price is more likely to be interrupted."""
    state = run_of(lived(10, checkpoint_s=36.0))
    dear = Allocation(replace(SPOT, usd_per_hour=2.0))

    calm = limits.checkpoint_every_s(stage(), state, Allocation(SPOT), now=0.0)

    assert limits.checkpoint_every_s(stage(), state, dear, now=0.0) < calm


def test_more_nodes_are_lost_more_often():
    """Any one of eight ends the attempt."""
    state = run_of(lived(10, checkpoint_s=36.0))

    one = limits.checkpoint_every_s(stage(), state, Allocation(SPOT), now=0.0)

    assert limits.checkpoint_every_s(stage(), state, Allocation(SPOT, 8), now=0.0) < one


@pytest.mark.parametrize(
    ("every", "allocation", "ended", "got"),
    [
        ("1h", Allocation(DEMAND), {"checkpoint_s": 36.0}, None),
        ("1h", Allocation(SPOT), {}, None),
        ("100 steps", Allocation(SPOT), {"checkpoint_s": 36.0}, None),
        ("10m", Allocation(SPOT), {"checkpoint_s": 36.0}, 600.0),
        ("1h", Allocation(SPOT), {"checkpoint_s": 1e-6}, 60.0),
    ],
)
def test_the_spec_is_never_asked_for_less(every, allocation, ended, got):
    """On demand, unmeasured, or in steps: the spec's interval.

    Never longer than that, never under a minute.
    """
    state = run_of(lived(10, **ended))

    assert limits.checkpoint_every_s(stage(every), state, allocation, now=0.0) == got


def test_the_next_machine_is_told_how_often_to_save(new_world):
    """After a loss on spot: event and control have the interval with its rate (feature C3)."""
    world = new_world((DEMAND, SPOT), spec=SPEC)
    owner = world.owner()
    owner.enter()
    first = world.control().checkpoint_every_s
    world.say(checkpoint=world.save(10), checkpoint_s=36.0)
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    intended = [event for event in world.log.read() if event.type == "attempt-intended"][-1]
    every_s = intended.body.checkpoint_every_s
    assert first is None
    assert every_s == checkpoint_interval_s(36.0, intended.body.losses_per_hour)
    assert world.control().checkpoint_every_s == every_s
    assert Event.from_json(intended.to_json(), where="e") == intended


@pytest.mark.parametrize(
    ("every", "asked", "got"),
    [
        ({"seconds": 600.0}, 120.0, {"seconds": 120.0}),
        ({"seconds": 600.0}, 900.0, {"seconds": 600.0}),
        ({"seconds": 600.0}, None, {"seconds": 600.0}),
        ({"steps": 10.0}, 120.0, {"steps": 10.0}),
        (None, 120.0, None),
    ],
)
def test_the_training_s_side_saves_as_often_as_the_owner_asks(every, asked, got):
    """Only more often, and only where the spec counts seconds."""
    assert SessionSettings(every=every).with_interval(asked).every == got
