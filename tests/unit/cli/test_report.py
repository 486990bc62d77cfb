"""``envscaler report``: the cost of a run, beside its cost without a move."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing import ManualClock
from envscaler_airflow.testing.scripted_backend import cpu_offer

RUN = "d/shell/one/train/-1"
SMALL, LARGE = (Allocation(cpu_offer(vcpus, usd_per_hour=float(vcpus))) for vcpus in (1, 2))
BEGAN = 1_700_000_000.0


class Story:
    """The events of a run, each attempt an hour after the last one began."""

    def __init__(self, tmp_path):
        """A generation that has started."""
        self.clock = ManualClock(time=BEGAN)
        self.url = f"file://{tmp_path}/store"
        self.log = Run(open_store(self.url), RUN, clock=self.clock.time).events
        self.attempts = self.events = 0
        self.add("generation", spec_hash="0", reason="first start")

    def add(self, kind, **body):
        """Append an event."""
        self.log.append(self.events, read_body(kind, {"generation": 1, **body}), actor=Actor("t"))
        self.events += 1

    def attempt(self, place, *, outcome, **ended):
        """One that lasts 1,000 s: 100 to start, 800 training, 40 of them saving, 100 to stop."""
        self.attempts += 1
        key = {"attempt": self.attempts}
        self.add("attempt-intended", **key, allocation=place.to_dict(), reason="r")
        if outcome == "not-started":
            self.add("attempt-ended", **key, outcome=outcome, failure="capacity", usage=[], usd=0.0)
            return
        handle = {"backend": "scripted", "name": f"a{self.attempts}", "details": {}}
        self.add("attempt-started", **key, handle=handle)
        start = self.clock.time()
        self.clock.advance(1000)
        if outcome == "drained":
            self.add(
                "attempt-stopping",
                **key,
                stop_reason="move",
                reason="faster",
                grace_s=30.0,
                target=LARGE.to_dict(),
            )
        usage = [[0, start, start + 1000]]
        told = {
            "setup_s": 90.0,
            "first_step_s": 10.0,
            "elapsed_s": 810.0,
            "save_s": 40.0,
            "checkpoint_s": 20.0,
        }
        usd = place.usd_per_hour * 1000 / 3600
        self.add("attempt-ended", **key, outcome=outcome, usage=usage, usd=usd, **told, **ended)

    def report(self, *options):
        """Output of the command."""
        got = CliRunner().invoke(main, ["report", "one", *options, "--store", self.url])
        assert got.exit_code == 0, got.output
        return got.stdout

    def bill(self):
        """The same for programs."""
        return json.loads(self.report("--json"))["bill"]


@pytest.fixture
def story(tmp_path, monkeypatch):
    """A run that has started."""
    monkeypatch.delenv("COLUMNS", raising=False)  # a library that another test imports may set it
    return Story(tmp_path)


@pytest.mark.parametrize("total_steps", [800, 5000])
def test_a_run_that_never_moved_costs_as_much_as_itself(story, total_steps):
    """Its idle time counts on both sides, also where it ended before its announced steps (F11)."""
    story.attempt(SMALL, outcome="succeeded", start_step=0, step=800, total_steps=total_steps)
    story.add("succeeded", outputs={})

    bill = story.bill()

    assert bill["usd"] == pytest.approx(1000 / 3600)
    assert bill["saved_usd"] == pytest.approx(0.0, abs=1e-12)
    assert bill["static"]["hours"] == pytest.approx(bill["wall_s"] / 3600)


def test_a_run_that_never_moved_is_the_same_as_its_static_plan(story):
    """Not "$0.00 less" and "0 s less" (F11)."""
    story.attempt(SMALL, outcome="succeeded", start_step=0, step=800, total_steps=800)
    story.add("succeeded", outputs={})

    line = next(line for line in story.report().splitlines() if line.startswith("static plan"))

    assert line == ("static plan (scripted/cpu-1 throughout): $0.28 in 16 min 40 s, the same as this run")


def test_a_run_that_cost_more_says_by_how_much(story):
    """1,000 s twice for the work of 1,000 s (F11) (feature G3)."""
    story.attempt(SMALL, outcome="lost", start_step=0, step=800, checkpoint_step=400)
    story.attempt(SMALL, outcome="succeeded", start_step=400, step=800)
    story.add("succeeded", outputs={})

    assert "; this run cost $0.28 more and took 16 min 40 s more" in " ".join(story.report().split())


def test_a_run_that_never_moved_and_tells_no_steps_costs_as_much_as_itself(story):
    """The use of its time is unknown; its cost is known (F11)."""
    story.attempt(SMALL, outcome="succeeded")
    story.add("succeeded", outputs={})

    assert story.bill()["saved_usd"] == pytest.approx(0.0, abs=1e-12)


def test_a_run_that_was_lost_once_is_compared_with_the_same_idle_time(story):
    """Another 1,000 s for half the steps: static are 100 s to start, 760 s of steps, 140 s idle (F11)."""
    story.attempt(SMALL, outcome="lost", start_step=0, step=800, checkpoint_step=400)
    story.attempt(SMALL, outcome="succeeded", start_step=400, step=800)
    story.add("succeeded", outputs={})

    bill = story.bill()

    assert bill["static"]["hours"] * 3600 == pytest.approx(1000)
    assert bill["saved_usd"] == pytest.approx(-1000 / 3600)


def test_after_a_refused_move_the_split_stays(story):
    """It moved for a machine that was not available, and resumed in place: 800 steps, none lost (F11)."""
    story.attempt(SMALL, outcome="drained", start_step=0, step=400, checkpoint_step=400, exit_code=85)
    story.attempt(LARGE, outcome="not-started")
    story.attempt(SMALL, outcome="succeeded", start_step=400, step=800)
    story.add("succeeded", outputs={})

    bill = story.bill()

    assert (bill["steps"], bill["lost_steps"]) == (800, 0)
    assert {name: part is not None for name, part in bill["usd_split"].items()} == {
        "compute": True, "lost": True, "provisioning": True, "idle": True,
    }  # fmt: skip
    assert bill["usd_split"]["lost"] == 0.0
    assert bill["notes"] == []
    assert [(pause["before"], pause["after"]) for pause in bill["pauses"]] == [(1, 3)]
