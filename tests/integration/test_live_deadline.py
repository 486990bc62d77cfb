"""A stage with a deadline pays through owner and sensor what the simulator says; ten seconds a start."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from envscaler_airflow.simulate.reports import SpotCell
from envscaler_airflow.simulate.spot import of_dataset, read_traces, read_windows

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "spot"
STARTS = (10, 80)
"""Chosen: a zone that is nearly always up, and one that is away for days."""


@pytest.fixture(scope="module")
def bench():
    """The benchmark, of which this is a part."""
    path = ROOT / "benchmarks" / "policies" / "live_deadline.py"
    spec = importlib.util.spec_from_file_location("live_deadline", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["live_deadline"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["live_deadline"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("deadline_h", [52.0, 70.0])
def test_a_stage_pays_what_is_simulated(bench, deadline_h):
    """Two starts, 48 h of work and launches of 0.2 h: within 5 %, and in time; all starts: within 2 %."""
    traces = read_traces(DATA / bench.DATA)
    windows = of_dataset(read_windows(DATA / "windows.csv"), DATA / bench.DATA)
    cell = SpotCell(48.0, deadline_h, 0.2, 3.06, 0.9731)

    pairs = [bench.pair(traces, windows[at], cell) for at in STARTS]

    live, simulated = (sum(one[at]["usd"] for one in pairs) for at in (0, 1))
    assert live == pytest.approx(simulated, rel=0.05)
    assert not any(one["late"] for one, _ in pairs)


@pytest.mark.timeout(120)
def test_small_jobs_are_in_time_when_machines_are_lost_at_any_moment(bench):
    """Five jobs of some hours that begin within a tick, with half an hour to two hours of slack."""
    traces = read_traces(DATA / bench.DATA)
    windows = of_dataset(read_windows(DATA / "windows.csv"), DATA / bench.DATA)

    pairs = [bench.small_pair(traces, windows, number) for number in range(5)]

    assert not any(one["late"] for one, _ in pairs)
