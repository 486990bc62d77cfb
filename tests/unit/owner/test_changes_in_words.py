"""Changes in place, in words."""

from __future__ import annotations

import pytest

from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Event, RunState
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.run.narration import describe
from envscaler_airflow.testing.scripted_backend import cpu_offer

TARGET = Allocation(cpu_offer(2), 3).to_dict()
BODY = {"generation": 1, "attempt": 1, "request": 4, "target": TARGET, "reason": "why"}


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("move-deferred", {}, "the next attempt runs on 3 x scripted/cpu-2/on-demand: why"),
        (
            "change-intended",
            {"kind": "rescale"},
            "attempt 1 changes in place to 3 x scripted/cpu-2/on-demand: why",
        ),
        (
            "changed",
            {"step": 7},
            "attempt 1 has 3 x scripted/cpu-2/on-demand at step 7, without a restart",
        ),
        ("change-undone", {}, "attempt 1 is unchanged: why"),
        (
            "attempt-started",
            {"handle": {"backend": "local", "name": "train-1", "details": {"namespace": "ml"}}},
            "attempt 1 runs as ml/train-1",
        ),
        ("succeeded", {"outputs": {"model": "s3://b/m"}}, "the stage succeeded; output model: s3://b/m"),
        (
            "move-accepted",
            {"align": "epoch", "reason": "3 x scripted/cpu-2/on-demand saves $0.48"},
            "attempt 1 saves at the end of the epoch and moves to 3 x scripted/cpu-2/on-demand: saves $0.48",
        ),
        ("attempt-ended", {"outcome": "lost", "step": 7}, "attempt 1 lost at step 7"),
    ],
)
def test_a_change_in_place_is_one_line(kind, more, words):
    """For the log of a shell and of the demo."""
    assert describe(Event(1, read_body(kind, {**BODY, **more})), RunState()) == words
