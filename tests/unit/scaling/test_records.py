"""The inputs and the record of a decision: read back, folded, explained, rejected."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.observations import LARGE, NOW, ONE_A_SECOND, SEEN, SMALL

from envscaler_agent.protocol import Progress
from envscaler_airflow.scaling import (
    Check,
    Decision,
    Memory,
    Policy,
    Sample,
    decide,
    explain,
    recent,
    remember,
    replay,
    usage_samples,
    work_of,
)


def test_a_recorded_check_decides_the_same_again():
    """After a JSON round trip the observation gives the recorded decision (feature G6)."""
    check = Check(SEEN, NOW, decide(SEEN, NOW))
    line = json.dumps(check.to_dict(), allow_nan=False)

    again = Check.from_dict(json.loads(line))

    assert again == check
    assert replay(again) == check.decision


def test_memory_is_a_fold_of_the_checks():
    """Wanted moves and speeds survive a restart; a new generation starts with none."""
    patient = Policy(stabilization_s=60)
    one = replace(SEEN, elapsed_s=5)
    two = replace(SEEN, elapsed_s=35, current=LARGE, speeds={LARGE.name: ONE_A_SECOND})
    checks = [Check(seen, patient, decide(seen, patient)) for seen in (one, two)]

    memory = remember(checks)

    both = {SMALL.name: ONE_A_SECOND, LARGE.name: ONE_A_SECOND}
    assert memory == Memory(35, 1, checks[1].decision.wanted, both, unit="steps")
    silent = replace(two, units_done=None, unit="epochs")
    assert memory.after(Check(silent, patient, decide(silent, patient))).speeds == both
    other = replace(two, unit="epochs")
    assert memory.after(Check(other, patient, decide(other, patient))).speeds == other.speeds
    assert remember([*checks, checks[1]]) == memory
    new = replace(one, generation=2, speeds={})
    assert memory.after(Check(new, patient, decide(new, patient))).speeds == {}


def test_explains_in_words():
    """The human-readable text of a check."""
    seen = replace(SEEN, spent_usd=1.0, budget_usd=50.0)

    assert explain(Check(seen, NOW, decide(seen, NOW))).splitlines() == [
        "move to local/cpu-2: local/cpu-2 saves $2.50 of $10.00 ($7.50 and 5 h instead of $10.00 and 10 h)",
        "  attempt 1 of generation 1 on local/cpu-1, policy cost-to-finish, 600 s after the first check",
        "  0 of 36000 steps done",
        "  spent $1.00 of $50.00",
        "  staying on local/cpu-1: 10 h (10 to 10), $10.00, objective 10, 1 +- 0 steps/s measured",
        "  moving to local/cpu-2: 5 h (5 to 5), $7.50, objective 7.5, 2 +- 0 steps/s stated",
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        {"staying": {"cheap": 1}},
        {"moving": ["here"]},
        {"moving": {"there": 3}},
        {"metrics": [{"is": 1}]},
        {"metrics": 7},
        {"slack_s": "much"},
        {"ticks_of_on_demand": 4},
        {"phase_from": "us", "lasts_s": "long"},
        {"vcpus": {"peak": "high"}},
        {"unknown_speed": 1},
    ],
    ids="-".join,
)
def test_numbers_of_another_form_are_still_explained(numbers):
    """Another package's policy, or another version, uses one of our names for something else."""
    decided = replace(decide(SEEN, NOW), numbers={**numbers, "mine": 4.5})

    lines = explain(Check(SEEN, NOW, decided)).splitlines()

    assert lines[0].startswith("move to local/cpu-2: ")
    assert "  mine: 4.5" in lines


def test_work_is_counted_in_what_the_training_reports():
    """Steps when their total is known, otherwise epochs, otherwise unknown."""
    assert work_of(Progress(step=5, total_steps=9, epoch=1, epochs=2)).to_dict() == {
        "unit": "steps",
        "done": 5.0,
        "total": 9.0,
    }
    assert work_of(Progress(step=5, epoch=1, epochs=2)).unit == "epochs"
    assert work_of(Progress(step=5)).total is None
    assert work_of(Progress()).done is None


def test_metrics_that_are_no_numbers_are_missing():
    """A NaN from a broken sampler is omitted, and a sample with it is rejected."""
    usage = {"cpu_percent": float("nan"), "gpu_percent": 7.0, "disk": None, "queue": 1.7e308}

    assert usage_samples(3, 0, usage) == (Sample(3, 0, "gpu_percent", 7.0),)
    beyond = {"memory_bytes": 1e99, "memory_limit_bytes": 1e-9}
    assert "memory_utilization" not in {item.metric for item in usage_samples(3, 0, beyond)}
    with pytest.raises(ValueError, match="value must be finite"):
        Sample(3, 0, "cpu_percent", float("nan"))


def test_old_samples_are_dropped():
    """An observation contains only the window."""
    old, new = Sample(0, 0, "m", 1.0), Sample(90, 0, "m", 2.0)

    assert recent([old, new], now_s=100, window_s=10) == (new,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["elapsed_s", "units_done", "units_total", "spent_usd", "since_move_s"])
def test_an_observation_with_nonsense_cannot_exist(field, bad):
    """Every comparison with NaN is false, so it must not reach one."""
    with pytest.raises(ValueError, match=field):
        replace(SEEN, **{field: bad})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_nodes": 2}, "nodes must be 1 or more, min to max, got 2..1"),
        ({"tolerance": 1.0}, r"tolerance must be in \[0, 1\), got 1.0"),
        ({"value_of_hour": float("nan")}, "value_of_hour must be finite"),
    ],
)
def test_a_policy_with_nonsense_cannot_exist(fields, message):
    """The constructor rejects it, where the error can still name the spec."""
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


def test_a_decision_from_text_is_checked():
    """A record is data: the error names fields of a wrong type."""
    with pytest.raises(ValueError, match=r"action: got 'dance', input should be 'keep'"):
        Decision.from_dict({"action": "dance", "target": SMALL.to_dict(), "reason": ""})
    with pytest.raises(ValueError, match=r"target: is missing"):
        Decision.from_dict({"action": "keep"})
