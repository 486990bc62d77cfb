"""Unit tests of what the wrapper reports: a manual clock, files in a temporary folder."""

import json

import pytest

from envscaler_agent.output import END_TRIES, Reporter, aggregate
from envscaler_agent.progress import Rate
from envscaler_agent.protocol import Ended, Progress, Status
from envscaler_agent.spool import SessionReport, Spool, write_atomic
from envscaler_agent.wrapper import _Tracker


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock():
    """A clock at 100."""
    return Clock()


@pytest.fixture
def spool(tmp_path):
    """A spool folder."""
    return Spool(tmp_path)


@pytest.fixture
def reporter(spool, clock):
    """A reporter that began at 100."""
    return Reporter(spool, clock=clock, wall=lambda: 5000.0)


def said(spool):
    """Return the status."""
    return Status.from_json(spool.wrapper.read_bytes(), where="wrapper.json")


def lines(spool):
    """Return all metric lines, closed or not."""
    found = []
    for path in sorted(spool.metrics.iterdir()):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def test_a_status_is_written_when_it_changed_and_not_more_than_once_a_second(reporter, spool, clock):
    """Three changes within a second cause one write; no change causes none."""
    reporter.set(phase="running")
    reporter.tick()
    for message in ("a", "b"):
        reporter.set(message=message)
        clock.now += 0.4
        reporter.tick()
    assert (said(spool).sequence, said(spool).message) == (1, "")

    clock.now += 0.3
    reporter.tick()
    assert (said(spool).sequence, said(spool).message) == (2, "b")

    clock.now += 10
    reporter.tick()
    assert said(spool).sequence == 2


@pytest.mark.parametrize(("full_for", "tries", "reason"), [(3, 3, "failed"), (999, END_TRIES, None)])
def test_the_end_is_said_once_a_full_disk_has_room(reporter, spool, monkeypatch, full_for, tries, reason):
    """The sidecar would wait for it for ever; a disk that stays full delays the end by at most a minute."""
    reporter.tick()
    waits = []

    def write(path, data):
        if len(waits) < full_for:
            raise OSError(28, "No space left on device")
        write_atomic(path, data)

    monkeypatch.setattr("envscaler_agent.output.write_atomic", write)
    reporter.set(phase="ended", ended=Ended(reason="failed", exit_code=1))

    reporter.close(sleep=waits.append)

    ended = said(spool).ended
    assert (ended and ended.reason, len(waits)) == (reason, tries)


def test_a_full_disk_delays_a_status(reporter, spool, clock, monkeypatch):
    """The next tick writes it."""

    def full(*_):
        raise OSError(28, "No space left on device")

    reporter.set(phase="running")
    with monkeypatch.context() as patch:
        patch.setattr("envscaler_agent.output.write_atomic", full)
        reporter.tick()
    reporter.tick()

    assert said(spool).phase == "running"


def test_metric_lines_have_both_clocks(reporter, spool, clock):
    """``t`` since the node began, ``at`` by the wall clock; the sampler's own times take precedence."""
    reporter.add_sample({"t": 1.5, "at": 4999.0, "cpu_percent": 50}, cpu_seconds=3.0)
    clock.now = 102.5
    reporter.add_progress(Progress(step=3, step_time_s=0.5, loss=0.25))

    assert lines(spool) == [
        {"t": 1.5, "at": 4999.0, "cpu_percent": 50},
        {"t": 2.5, "at": 5000.0, "step": 3, "step_time_s": 0.5, "loss": 0.25},
    ]


def test_loss_is_recorded_every_ten_seconds_and_steps_every_second(reporter, spool, clock):
    """21 s of four steps a second."""
    for quarter in range(85):
        clock.now = 100 + quarter / 4
        reporter.add_progress(Progress(step=quarter, loss=0.5))

    got = lines(spool)
    assert len(got) == 22
    assert [line["t"] for line in got if "loss" in line] == [0, 10, 20]


def test_a_step_is_recorded_once(reporter, spool, clock):
    """Evaluation takes a minute; the same step is not recorded sixty times."""
    for _ in range(60):
        clock.now += 1
        reporter.add_progress(Progress(step=5))

    assert len(lines(spool)) == 1


def test_old_metrics_are_closed(reporter, spool, clock):
    """After five minutes, even if nothing else is reported."""
    reporter.add_progress(Progress(step=1))
    clock.now += 300

    reporter.tick()

    assert (spool.metrics / "000001.jsonl").exists()


def test_usage_is_the_mean_of_the_last_samples(reporter, spool, clock):
    """Fifteen samples; limits, totals and counts keep their last value."""
    for number in range(30):
        clock.now += 1
        sample = {"t": 0, "at": 0, "cpu_percent": number, "memory_peak_bytes": number, "odd": "text"}
        reporter.add_sample(sample, cpu_seconds=2.0)
    reporter.tick()

    # the last aggregate was made with the 26th sample: 11 to 25
    assert said(spool).usage == {"cpu_percent": 18.0, "memory_peak_bytes": 25.0}
    assert said(spool).cpu_seconds == 2.0


def test_means_are_over_the_samples_that_know():
    """A GPU value that was unknown once does not count as 0."""
    assert aggregate([{"a": 1.0, "b_xid": 3.0}, {"a": 3.0, "b_xid": 4.0}, {"c": 5.0}]) == {
        "a": 2.0,
        "b_xid": 4.0,
        "c": 5.0,
    }


def test_what_has_no_mean_is_as_it_was_last():
    """Bit masks, and counters: the mean of 4 and 8 would mean two other reasons."""
    samples = [
        {"gpu0_throttle_reasons": 4.0, "gpu0_energy_joules": 10.0},
        {"gpu0_throttle_reasons": 8.0, "gpu0_energy_joules": 30.0},
    ]

    assert aggregate(samples) == {"gpu0_throttle_reasons": 8.0, "gpu0_energy_joules": 30.0}


def test_without_an_spool_nothing_is_written(clock, tmp_path, monkeypatch):
    """A wrapped command on a laptop leaves no files."""
    monkeypatch.chdir(tmp_path)
    reporter = Reporter(None, clock=clock, wall=lambda: 5000.0)

    reporter.set(phase="running")
    reporter.add_sample({"cpu_percent": 1}, cpu_seconds=None)
    reporter.add_progress(Progress(step=1))
    reporter.close()

    assert list(tmp_path.iterdir()) == []


def test_the_end_is_said_at_once(reporter, spool):
    """It does not wait for the next second."""
    reporter.set(phase="running")
    reporter.tick()
    for percent in (1, 3):
        reporter.add_sample({"cpu_percent": percent}, cpu_seconds=None)
    reporter.set(phase="ended")

    reporter.close()

    assert said(spool).phase == "ended"
    assert said(spool).usage == {"cpu_percent": 2.0}
    assert (spool.metrics / "000001.jsonl").exists()


def test_a_rate_looks_back_half_a_minute():
    """One a second for a minute, then two: 30 s later it is two."""
    rate = Rate(window_s=30)
    for now in range(60):
        rate.add(now, now)
    assert rate.per_s() == 1
    for now in range(60, 91):
        rate.add(now, 59 + 2 * (now - 59))

    assert rate.per_s() == 2


def test_a_rate_needs_two_moments():
    """Unknown is not 0, and a count that fell starts over."""
    rate = Rate()
    assert rate.per_s() is None
    rate.add(0, 10)
    assert rate.per_s() is None
    rate.add(1, 5)
    assert rate.per_s() is None
    rate.add(2, 7)
    assert rate.per_s() == 2


@pytest.mark.parametrize(("by", "rate"), [("session", None), ("log", 100.0)])
def test_only_steps_told_by_the_log_are_timed_here(by, rate):
    """A session counts its own, and its first report of a restored step is a jump; a log needs a count."""
    said = Progress()

    class OutputCopier:
        def progress(self):
            return said if by == "log" else Progress()

    tracker = _Tracker(OutputCopier(), None, 0.0)
    for now, step in ((1.0, 0), (11.0, 1000)):
        said = Progress(step=step)
        got = tracker.merge(now, SessionReport(progress=said if by == "session" else Progress()))

    assert got.step == 1000
    assert got.steps_per_s == rate
