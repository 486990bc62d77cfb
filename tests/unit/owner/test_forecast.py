"""Forecast of a run's phases from the previous run."""

from __future__ import annotations

import pytest

from envscaler_airflow.owner import policies
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.scaling import Check, Decision, Observation, Policy, StartFacts
from envscaler_airflow.scaling.phase import FILE, PHASE, Forecast, Span, spans_of
from envscaler_airflow.store.decisions import DecisionLog
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

NODE = Offer("scripted", "", "node", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
FOUR, EIGHT, TWO = Allocation(NODE, 4), Allocation(NODE, 8), Allocation(NODE, 2)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
num_nodes: 4
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling:
  policy: phase
  min_nodes: 2
  max_nodes: 8
  stabilization: 1s
  cooldown: 1s
  min_epochs_between: 0
  phases: {loading: {nodes: 4}, training: {nodes: 8}, evaluation: {nodes: 2}}
"""
THREE = Forecast((Span("loading", 600.0), Span("training", 7200.0), Span("evaluation", 900.0)))


def seen(phase, elapsed_s):
    """Return a check during which the training was in *phase*."""
    here = Observation(FOUR, elapsed_s=elapsed_s, training_phase=phase)
    return Check(here, Policy(), Decision("keep", FOUR, f"{phase} is what it is"))


def prepare(world):
    """Do what the owner does at a start."""
    policies.prepare(Run(world.store, world.prefix), PHASE, Policy("phase"), StartFacts(FOUR, 30.0))


def test_phases_last_from_the_end_of_the_one_before():
    """Seen until 600 s, 7,800 s and 8,700 s; checks without a phase add nothing."""
    checks = [
        seen("loading", 30.0), seen("loading", 600.0), seen(None, 610.0), seen("training", 660.0),
        seen("training", 7800.0), seen("evaluation", 8700.0),
    ]  # fmt: skip

    assert spans_of(checks) == THREE.spans


@pytest.mark.parametrize(
    ("phases", "in_phase_s", "comes"),
    [
        (("loading",), 100.0, ("training", 500.0)),
        (("loading", "training"), 9000.0, ("evaluation", 0.0)),
        (("loading", "training", "evaluation"), 1.0, (None, None)),
        (("training",), 1.0, (None, None)),
        ((), 0.0, (None, None)),
    ],
)
def test_what_comes_next_is_told_only_on_the_same_way(phases, in_phase_s, comes):
    """500 s are left of loading; a run that began with other phases gets no forecast."""
    assert THREE.after(phases, in_phase_s) == comes


def test_a_phase_that_comes_twice_lasts_its_mean():
    """The mean of 10 and 30 minutes."""
    twice = Forecast((Span("training", 600.0), Span("evaluation", 60.0), Span("training", 1800.0)))

    assert twice.lasts_s() == {"training": 1200.0, "evaluation": 60.0}


def test_the_larger_need_is_met_before_its_phase_begins(new_world):
    """Yesterday loading took 600 s: this time the request for eight nodes comes shortly before it ends."""
    world = new_world((NODE,), spec=SPEC, backend=ElasticBackend)
    before = world.prefix.replace("/run/", "/a-run-of-yesterday/")
    log = DecisionLog(Run(world.store, before), writer="sensor", monotonic=world.clock.monotonic)
    for check in (seen("loading", 600.0), seen("training", 7800.0), seen("evaluation", 8700.0)):
        log.add(check)
    log.close()
    world.owner(value_of_hour=0.0).enter()
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        candidates=(FOUR, EIGHT, TWO),
        monotonic=world.clock.monotonic,
    )
    asked = []
    for _ in range(22):
        for node in range(4):
            world.say(node=node, step=10, phase="running", elapsed_s=1.0, training="loading")
        world.clock.advance(30)
        check = watcher.snapshot().check
        asked.append((check.decision.action, check.observation.next_phase))

    first = [action for action, _ in asked].index("move")
    assert {name for _, name in asked} == {"training"}
    assert check.observation.phase_lasts_s == {"loading": 600.0, "training": 7200.0, "evaluation": 900.0}
    assert 500 < 30 * first < 660
    assert check.decision.target == EIGHT


@pytest.mark.parametrize(
    "text", [b"torn", b'{"schema": "2.0", "spans": [{"phase": 3}]}', b'{"schema": "9.0"}']
)
def test_what_cannot_be_read_foretells_nothing(world, text):
    """The policy then uses the announced phases."""
    world.store.write(f"{world.prefix}/tables/{FILE}", text)

    assert policies.read_forecast(Run(world.store, world.prefix)) == Forecast()


def test_a_first_run_has_nothing_to_go_by(world):
    """The DAG has no other run."""
    world.owner().enter()

    prepare(world)

    assert world.store.size(f"{world.prefix}/tables/{FILE}") is None


def test_the_last_of_the_earlier_runs_tells(world):
    """Two days ago loading took 100 s, yesterday 200 s: the forecast is 200 s."""
    for name, lasted_s in (("day-1", 100.0), ("day-2", 200.0)):
        prefix = world.prefix.replace("/run/", f"/{name}/")
        log = DecisionLog(Run(world.store, prefix), writer="sensor", monotonic=world.clock.monotonic)
        log.add(seen("loading", lasted_s))
        log.close()

    prepare(world)

    assert policies.read_forecast(Run(world.store, world.prefix)) == Forecast((Span("loading", 200.0),))
