"""A scaling check that hangs blocks one thread, and none of those that keep trainings alive."""

from __future__ import annotations

import asyncio
import threading

import pytest

from envscaler_airflow.triggers import stage_trigger
from envscaler_airflow.triggers.scaling_trigger import ScalingTrigger


def trigger():
    """Return a trigger for an arbitrary stage."""
    return ScalingTrigger(folder="d/dag/run/train", dag_id="dag", run_id="run", task_id="train")


def test_a_check_that_hangs_is_joined_by_no_other(monkeypatch):
    """The second one reports that at once, and the third works after the first has returned."""
    checks, entered, go_on, calls = trigger(), threading.Event(), threading.Event(), []

    def hang(self):
        calls.append(self)
        entered.set()
        go_on.wait(5)

    monkeypatch.setattr(ScalingTrigger, "_checked", hang)
    first = threading.Thread(target=checks._check)
    first.start()
    entered.wait(5)
    with pytest.raises(TimeoutError, match="has not come back"):
        checks._check()
    go_on.set()
    first.join(5)
    checks._check()

    assert calls == [checks, checks]


def test_hanging_checks_leave_the_threads_of_stages_free(monkeypatch):
    """As many checks hang as there are threads: a stage's check still gets one."""
    monkeypatch.setattr(stage_trigger, "_THREADS", 2)
    stage_trigger._pool.cache_clear()
    go_on = threading.Event()

    async def both():
        hung = [
            asyncio.ensure_future(stage_trigger.in_thread(go_on.wait, 5, kind="scaling")) for _ in range(3)
        ]
        await asyncio.sleep(0)
        answer = await stage_trigger.in_thread(lambda: "renewed", timeout_s=2.0)
        go_on.set()
        await asyncio.gather(*hung)
        return answer

    try:
        assert asyncio.run(both()) == "renewed"
    finally:
        stage_trigger._pool.cache_clear()
