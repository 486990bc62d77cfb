"""Recorded scaling checks decide as before, under every policy."""

import json

import pytest
from golden.checks import CHECKS, answer, read_check
from golden.files import DATA, REVIEW, stored

from envscaler_airflow.scaling import all_policies, replay


@pytest.mark.parametrize("name", CHECKS)
def test_a_recorded_check_is_answered_as_it_was(name):
    """Read, decide, judge as a request, explain, and write: the same JSON."""
    check = read_check(name)

    assert replay(check) == check.decision
    assert answer(check) == json.loads(stored(f"checks/{name}.json")), REVIEW


@pytest.mark.parametrize("policy", sorted(all_policies()))
def test_every_policy_has_a_check_that_moves_and_one_that_keeps(policy):
    """So that a policy which changes is noticed."""
    decisions = [read_check(name).decision for name in CHECKS]

    assert {"move", "keep"} <= {one.action for one in decisions if one.policy == policy}


def test_every_recorded_check_is_known():
    """A check that was removed leaves no file behind."""
    assert {path.stem for path in (DATA / "checks").glob("*")} == CHECKS.keys()
