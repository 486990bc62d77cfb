"""Recorded scaling checks: chunks, counters, and reading back."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling import Check, Decision, Observation, Policy
from envscaler_airflow.store.decisions import CHUNK_S, DecisionLog, read_decisions
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store
from envscaler_airflow.testing import ManualClock
from envscaler_airflow.testing.scripted_backend import cpu_offer

HERE = Allocation(cpu_offer(1))
THERE = Allocation(cpu_offer(2))


def check(elapsed_s, action="keep", reason="no move saves more than 10% of $1.50"):
    """One check at *elapsed_s*."""
    target = HERE if action == "keep" else THERE
    return Check(Observation(HERE, elapsed_s=elapsed_s), Policy(), Decision(action, target, reason))


def made(tmp_path):
    """A log in a new store, with its clock."""
    store, clock = open_store(f"file://{tmp_path}/store"), ManualClock()
    check_store(store)
    return store, clock, DecisionLog(Run(store, "run"), writer="sensor-1", monotonic=clock.monotonic)


def test_keeps_for_the_same_reason_are_one_line_with_a_count(tmp_path):
    """Numbers in the reason do not count; the last check is read back."""
    store, _, log = made(tmp_path)

    for second, dollars in [(0, "1.50"), (30, "1.49"), (60, "1.48")]:
        log.add(check(second, reason=f"no move saves more than 10% of ${dollars}"))
    log.close()

    assert list(read_decisions(Run(store, "run"))) == [
        (check(60, reason="no move saves more than 10% of $1.48"), 3)
    ]


def test_every_phase_has_a_line_though_their_names_differ_by_a_number_alone(tmp_path):
    """The next run forecasts its phases from them."""
    store, _, log = made(tmp_path)

    for second, phase in [(0, "stage1"), (30, "stage1"), (60, "stage2"), (90, "stage2")]:
        seen = check(second, reason=f"here is what {phase} needs")
        log.add(replace(seen, observation=replace(seen.observation, training_phase=phase)))
    log.close()

    found = [(seen.observation.training_phase, times) for seen, times in read_decisions(Run(store, "run"))]
    assert found == [("stage1", 2), ("stage2", 2)]


def test_what_waits_to_be_written_is_no_work_for_the_garbage_collector(tmp_path):
    """The list, its line and what names the line: no dictionary of a check, of which one has dozens."""
    _, _, log = made(tmp_path)
    log.add(check(0))
    log.add(check(30))

    found, left = [], [log._lines]
    while left:
        found.append(one := left.pop())
        left += [item for item in gc.get_referents(one) if gc.is_tracked(item) and not isinstance(item, type)]

    assert {type(one).__name__ for one in found} <= {"list", "_Line", "tuple"}
    assert len(found) <= 3


def test_a_move_closes_the_chunk_at_once(tmp_path):
    """The store never has a request without its reasons."""
    store, _, log = made(tmp_path)

    log.add(check(0))
    before = store.children("run/decisions")
    log.add(check(30, "move", "saves $1"))

    assert before == []
    assert store.children("run/decisions") == ["sensor-1-000001.jsonl"]


def test_a_chunk_is_closed_after_ten_minutes(tmp_path):
    """By the observer's own clock."""
    store, clock, log = made(tmp_path)

    log.add(check(0))
    clock.advance(CHUNK_S)
    log.add(check(600))

    assert len(store.children("run/decisions")) == 1


def test_two_observers_and_a_restart_keep_each_others_chunks(tmp_path):
    """A second trigger of the same sensor uses the next number; another writer its own."""
    store, clock, log = made(tmp_path)
    twin = DecisionLog(Run(store, "run"), writer="sensor-1", monotonic=clock.monotonic)
    other = DecisionLog(Run(store, "run"), writer="sensor-2", monotonic=clock.monotonic)

    for second, writer in [(0, log), (10, twin), (20, other)]:
        writer.add(check(second, "move", "saves $1"))

    assert [seen.observation.elapsed_s for seen, _ in read_decisions(Run(store, "run"))] == [0, 10, 20]
    assert len(store.children("run/decisions")) == 3


def test_torn_lines_and_other_versions_are_left_out(tmp_path):
    """They only explain and do not decide."""
    store, _, log = made(tmp_path)
    log.add(check(0, "move", "saves $1"))
    good = store.read("run/decisions/sensor-1-000001.jsonl")
    newer = json.dumps({**json.loads(good), "schema": "3.0"}).encode()

    store.write("run/decisions/zz-000001.jsonl", good[:40] + b"\n" + newer + b"\nnull\n")

    assert len(list(read_decisions(Run(store, "run")))) == 1


def test_a_chunk_that_is_too_large_ends_no_reader(tmp_path):
    """Another package's policy recorded five megabytes of numbers."""
    store, _, log = made(tmp_path)
    talkative = check(0, "move", "saves $1")
    log.add(replace(talkative, decision=replace(talkative.decision, numbers={"x": "x" * (5 << 20)})))
    log.add(check(30, "move", "saves $1"))

    assert [seen.observation.elapsed_s for seen, _ in read_decisions(Run(store, "run"))] == [30]


@pytest.mark.parametrize(
    "line",
    [
        '{"schema": "2.0", "times": 1, "check": {"observation": {"elapsed_s": 1' + 400 * "0" + "}}}",
        '{"schema": "2.0", "times": Infinity, "check": GOOD}',
        100_000 * "[",
    ],
    ids=["no float", "no count", "too deep"],
)
def test_a_line_of_numbers_that_no_machine_has_is_left_out(tmp_path, line):
    """Such a line ends neither a sensor nor the next start of the stage."""
    store, _, log = made(tmp_path)
    log.add(check(0, "move", "saves $1"))
    good = json.loads(store.read("run/decisions/sensor-1-000001.jsonl"))["check"]

    store.write("run/decisions/zz-000001.jsonl", line.replace("GOOD", json.dumps(good)).encode())

    assert len(list(read_decisions(Run(store, "run")))) == 1


def test_chunks_are_read_beside_each_other_and_kept_in_order(tmp_path):
    """A training of weeks has thousands."""
    store, clock, log = made(tmp_path)
    for number in range(4):
        clock.advance(CHUNK_S)
        log.add(check(number * CHUNK_S, reason=f"because of {number}"))
    meeting = threading.Barrier(2, timeout=1)

    class Meeting:
        children = store.children

        def read(self, name, max_bytes):
            meeting.wait()
            return store.read(name, max_bytes=max_bytes)

    found = [read.observation.elapsed_s for read, _ in read_decisions(Run(Meeting(), "run"))]

    assert found == [number * CHUNK_S for number in range(4)]
