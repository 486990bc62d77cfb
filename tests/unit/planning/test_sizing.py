"""CPU and memory of the next run follow from what the runs used: near it, and never too little twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.planning.profile import StageProfile, Usage
from envscaler_airflow.planning.sizing import Sizing, recommended

GIB = 1 << 30
USED = {"memory_bytes": Usage(1.0 * GIB, 1.5 * GIB, 2.0 * GIB), "cpu_percent": Usage(90.0, 160.0, 400.0)}
FIVE = StageProfile(runs=5, same=5, usage=USED, image="a")


def test_after_five_runs_the_request_is_within_a_fifth_of_the_need():
    """A peak of 2 GiB, and 1.6 CPUs 95 % of the time (feature B5)."""
    found = recommended(FIVE, image="a")

    assert 2.0 * GIB < found.memory_bytes <= 2.4 * GIB
    assert found.vcpus == 2.0
    assert found.reasons == (
        "memory peaked at 2.00 GiB in 5 runs",
        "95 % of the time at most 1.60 CPUs were busy",
    )


def test_fewer_runs_and_a_new_image_need_a_wider_margin():
    """1.4 times after one run, a quarter more after a change."""
    once = recommended(replace(FIVE, runs=1, same=1), image="a").memory_bytes
    changed = recommended(FIVE, image="b").memory_bytes

    assert once == pytest.approx(2.8 * GIB, rel=0.03)
    assert changed == pytest.approx(2.82 * GIB, rel=0.03)
    assert recommended(replace(FIVE, same=0), image="a").memory_bytes == changed


def test_after_an_out_of_memory_the_request_never_shrinks():
    """4 GiB were too little, 7 are requested: at least that, although the peaks of the others are at 2."""
    full = replace(FIVE, out_of_memory_bytes=4 * GIB)

    assert recommended(full, image="a").memory_bytes == 6 * GIB
    assert recommended(full, image="a", least_memory_bytes=7 * GIB).memory_bytes == 7 * GIB


def test_the_authors_limits_hold():
    """A larger need changes nothing."""
    found = recommended(FIVE, image="a", most_memory_bytes=GIB, most_vcpus=0.5)

    assert (found.memory_bytes, found.vcpus) == (GIB, 0.5)


def test_nothing_measured_recommends_nothing():
    """None is unknown, not zero."""
    assert recommended(StageProfile()) == Sizing()
