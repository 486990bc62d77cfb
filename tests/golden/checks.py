"""Scaling checks of every policy: observations, policy and decision."""

from __future__ import annotations

import json
from dataclasses import replace

from fakes.observations import LARGE, NOW, SEEN, SMALL, TWICE, local
from golden.files import json_text, stored

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed
from envscaler_airflow.scaling import (
    Check,
    Observation,
    PhaseNeed,
    Policy,
    Sample,
    ThresholdRule,
    decide,
    explain,
    validate,
)
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.observation import Refused

GIB = float(1 << 30)
START = Overheads(start_s=600.0)
ONE = Speed(1.0, 0.0, "measured", 3600.0)


def on(capacity="on-demand", *, usd=3.0, nodes=1, memory=32.0, kind="p3.2xlarge", zone="a"):
    """One offer with V100s."""
    size = {"vcpus": 8.0, "memory_gib": memory, "gpu_name": "V100", "gpus": 1, "gpu_memory_gb": 16.0}
    return Allocation(Offer("aws", "us-east-1", kind, capacity, zone=zone, usd_per_hour=usd, **size), nodes)


OD, SPOT = on(), on("spot", usd=1.0)
FOUR, EIGHT, TWO = on(nodes=4), on(nodes=8), on(nodes=2)
BIG, LITTLE = on(memory=64.0, usd=4.0, kind="big"), on(memory=16.0, usd=2.0, kind="small")


def seen(current, *others, left_h=None, work_h=8.0, **more):
    """Work of *work_h* hours at one step a second, *left_h* hours to the deadline."""
    facts = {
        "candidates": (current, *others),
        "deadline_left_s": None if left_h is None else left_h * 3600,
        "elapsed_s": 10_000.0,
        "overheads": START,
        "speeds": {current.name: ONE},
        "units_done": 0.0,
        "units_total": work_h * 3600,
    }
    return Observation(current, **{**facts, **more})


def using(memory_gib):
    """Memory of ``memory_gib(look)`` at each of 41 looks, every 30 s up to now."""
    samples = (Sample(8_800.0 + 30 * at, 0, "memory_bytes", memory_gib(at) * GIB) for at in range(41))
    return seen(OD, BIG, LITTLE, samples=tuple(samples))


def loaded(*values, metric="gpu0_percent", **more):
    """*values* of one metric on two nodes, 30 s apart, the last one now."""
    samples = tuple(
        Sample(30.0 * at, node, metric, value) for at, value in enumerate(values) for node in (0, 1)
    )
    return Observation(TWO, elapsed_s=30.0 * (len(values) - 1), samples=samples, **more)


DEADLINE = Policy("deadline", stabilization_s=0.0)
PHASES = Policy(
    "phase",
    max_nodes=8,
    stabilization_s=0.0,
    cooldown_s=0.0,
    min_epochs_between=0,
    phases=(PhaseNeed("loading", 4), PhaseNeed("training", 8), PhaseNeed("evaluation", 2)),
)
RULES = Policy("threshold", max_nodes=4, stabilization_s=0.0, rules=(ThresholdRule("gpu*_percent"),))
HPA = replace(RULES, rules=(ThresholdRule("gpu0_percent", target=60.0, samples=2),))
QUEUE = ThresholdRule("queue", query="max(queue_length)", above=100.0, below=None, samples=2)
VERTICAL = Policy("vertical", stabilization_s=0.0)
MEASURED = {SMALL.name: Measured(600, 1.0, 0.01), LARGE.name: Measured(300, 0.5, 0.02)}

CHECKS = {
    "cost-moves": (SEEN, NOW),
    "cost-recommends": (SEEN, replace(NOW, recommend_only=True)),
    "cost-move-is-too-slow": (replace(SEEN, overheads=Overheads(start_s=5400)), NOW),
    "cost-hour-is-worth-much": (replace(SEEN, candidates=(local(2, 3.0),)), replace(NOW, value_of_hour=10.0)),
    "cost-speed-is-uncertain": (replace(SEEN, speedups=(replace(TWICE, stdev=1.2),)), NOW),
    "cost-waits-for-the-window": (replace(SEEN, wanted={LARGE.name: 560.0}), Policy(stabilization_s=120.0)),
    "cost-waits-for-the-cooldown": (
        replace(SEEN, since_move_s=60.0, since_move_epochs=0, moves=1),
        replace(NOW, cooldown_s=3600.0),
    ),
    "cost-waits-by-the-stakes": (
        replace(SEEN, since_move_s=60.0, moves=1, overheads=Overheads(start_s=600.0)),
        NOW,
    ),
    "cost-budget-is-unknown": (replace(SEEN, budget_usd=9.0), NOW),
    "cost-was-refused": (replace(SEEN, refused={LARGE.name: Refused(3, 30.0)}), NOW),
    "cost-spot-is-lost": (
        seen(
            SPOT,
            OD,
            interruptions_per_hour={SPOT.offer.name: 2.0},
            overheads=Overheads(start_s=600.0, checkpoint_s=60.0),
            speeds={SPOT.name: ONE, OD.name: ONE},
        ),
        NOW,
    ),
    "deadline-keeps-spot": (seen(SPOT, OD, left_h=10.0), DEADLINE),
    "deadline-leaves-spot": (seen(SPOT, OD, left_h=8.175, since_move_s=10.0), DEADLINE),
    "deadline-goes-back": (seen(OD, SPOT, left_h=9.5), DEADLINE),
    "deadline-of-a-mixed-fleet": (
        seen(Allocation(OD.offer, 4, rest=SPOT.offer, rest_nodes=3), FOUR, left_h=8.175),
        replace(DEADLINE, max_nodes=4),
    ),
    "phase-begins": (seen(FOUR, EIGHT, TWO, training_phase="training"), PHASES),
    "phase-is-coming": (
        seen(FOUR, EIGHT, training_phase="loading", next_phase="training", next_phase_in_s=600.0),
        PHASES,
    ),
    "phase-is-too-short": (
        seen(EIGHT, TWO, training_phase="evaluation", phase_lasts_s={"evaluation": 300.0}),
        PHASES,
    ),
    "threshold-out": (loaded(10.0, 85.0, 85.5, 90.0), RULES),
    "threshold-in": (loaded(39.0, 39.0, 39.0), RULES),
    "threshold-holds": (loaded(81.0, 81.0, 79.0), RULES),
    "threshold-target": (loaded(90.0, 90.0), HPA),
    "threshold-query": (loaded(150.0, 120.0, metric=QUEUE.sampled_as), replace(RULES, rules=(QUEUE,))),
    "threshold-query-is-unknown": (
        loaded(1.0, unknown={QUEUE.sampled_as: "no answer"}),
        replace(RULES, rules=(QUEUE,)),
    ),
    "vertical-more": (using(lambda at: 30.0 - at % 2), VERTICAL),
    "vertical-less": (using(lambda _at: 10.0), VERTICAL),
    "vertical-rises": (using(lambda at: 16.0 + 0.25 * at), replace(VERTICAL, cooldown_s=3600.0)),
    "vertical-blind": (replace(using(lambda _at: 10.0), health="unknown"), VERTICAL),
    "measured-steps": (replace(SEEN, measured=MEASURED, gpu_speeds={"V100": 1.0}), NOW),
}


def golden_files():
    """Each check with its decision, the owner's answer to a request for it, and the explanation."""
    return {
        f"checks/{name}.json": json_text(answer(Check(*facts, decide(*facts))))
        for name, facts in CHECKS.items()
    }


def answer(check):
    """The decision of the current code for *check*."""
    observation, policy = check.observation, check.policy
    decision = decide(observation, policy)
    request = {
        "validated": validate(observation, policy, decision.target).to_dict(),
        "forced": validate(observation, policy, decision.target, is_forced=True).to_dict(),
    }
    body = {
        "check": Check(observation, policy, decision).to_dict(),
        "words": explain(Check(observation, policy, decision)).splitlines(),
    }
    return body if decision.action == "keep" else body | request


def read_check(name):
    """The recorded check *name*."""
    return Check.from_dict(json.loads(stored(f"checks/{name}.json"))["check"])
