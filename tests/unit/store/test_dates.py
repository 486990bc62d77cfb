"""A run's clock is its store's: the time that each store reports, and how a process uses it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.store import file as file_module
from envscaler_airflow.store import open_store
from envscaler_airflow.store.clock import STEP_S, StoreDates, date_of, written_at
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.s3 import S3Store
from envscaler_airflow.testing import ManualClock

HOUR = 3600.0
JAN_2 = 1767312000.0  # 2026-01-02T00:00:00Z


@pytest.fixture
def store(tmp_path):
    """A folder that exists."""
    (tmp_path / "store").mkdir()
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture(params=[HOUR, -HOUR], ids=["an hour ahead", "an hour behind"])
def off(monkeypatch, request):
    """This machine's clock is wrong by an hour; files get the right time."""
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + request.param)
    return true


def test_a_folder_s_time_is_its_filesystem_s_and_not_this_machine_s(store, off):
    """Before and after the first write (A6)."""
    before = store.now()
    store.write("a", b"1")
    after = store.now()

    assert before == pytest.approx(off(), abs=5)
    assert after == pytest.approx(off(), abs=5)
    assert list(store.root.iterdir()) == [store.root / "a"]


def test_a_filesystem_without_nameless_files_is_asked_by_one_that_goes(store, off, monkeypatch):
    """NFS has none (A6)."""
    monkeypatch.setattr(file_module, "_NAMELESS", 0)

    assert store.now() == pytest.approx(off(), abs=5)
    assert list(store.root.iterdir()) == []


def test_where_nothing_can_be_asked_this_machine_s_time_counts(tmp_path):
    """The folder is missing: the page of an unavailable run still shows times (A6)."""
    assert open_store(f"file://{tmp_path}/away").now() == pytest.approx(time.time(), abs=5)


def test_an_event_has_the_store_s_time_whatever_the_clock_of_its_writer(store, off):
    """A machine writes and reads it whose clock is an hour off (A6)."""
    Run(store, "run").events.append(0, NewGeneration(generation=1, spec_hash="a"))

    [event] = Run(store, "run").events.read()

    assert event.at == pytest.approx(off(), abs=5)


def test_no_event_is_later_than_its_file(store):
    """A writer whose clock was an hour ahead, as versions before this one wrote them (A6)."""
    later = time.time() + HOUR
    Run(store, "run", clock=lambda: later).events.append(0, NewGeneration(generation=1, spec_hash="a"))

    [event] = Run(store, "run").events.read()

    assert event.at == pytest.approx(time.time(), abs=5)


def test_a_copied_store_keeps_the_times_of_its_events(store):
    """Its files are new, but the run is not (A6)."""
    log = Run(store, "run").events
    log.append(0, NewGeneration(generation=1, spec_hash="a"))
    [written] = log.read()
    os.utime(store.root / "run/events/000001.json", (written.at + 9 * HOUR,) * 2)

    [read] = Run(store, "run").events.read()

    assert read.at == pytest.approx(written.at, abs=5)


class Client:
    """An S3 client that answers with a date; rejects requests if *status* is not 200."""

    exceptions = SimpleNamespace(NoSuchKey=KeyError)

    def __init__(self, date):
        """Answer with *date*."""
        self.date = date
        self.asked = 0
        self.meta = SimpleNamespace(events=SimpleNamespace(register=self._register))

    def _register(self, _event, handler):
        self._tell = handler

    def head_bucket(self, **_more):
        """Any answer contains the date."""
        self.asked += 1
        self._tell(http_response=SimpleNamespace(headers={"date": self.date}), event_name="x")


def test_s3_tells_its_time_by_the_date_of_its_answers(off):
    """One request if none was answered yet; then the time advances by itself (A6)."""
    client = Client("Fri, 02 Jan 2026 00:00:00 GMT")
    store = S3Store("bucket", "root", {"client": client})

    times = [store.now(), store.now()]

    assert times == pytest.approx([JAN_2, JAN_2], abs=5)
    assert client.asked == 1


def test_an_s3_that_tells_no_date_leaves_this_machine_s_time():
    """Some gateways strip it (A6)."""
    assert S3Store("b", "r", {"client": Client(None)}).now() == pytest.approx(time.time(), abs=5)


def test_fsspec_stores_tell_the_time_of_their_objects(off):
    """``memory://`` uses this machine's time, which is then the store's (A6)."""
    store = open_store("memory://dates-of-a-test")
    store.write("a", b"1")

    data, date = store.read_dated("a")

    assert data == b"1"
    assert date is not None
    assert store.now() == pytest.approx(date, abs=5)
    assert store.names("") == ["a"]


def test_time_does_not_go_back_for_a_date_that_was_cut_to_a_second():
    """At 0.9 s a date reads 0; at 1.1 s the next one reads 1 (A6)."""
    clock = ManualClock(monotonic=100.0)
    dates = StoreDates(clock.monotonic)
    dates.seen(1000.9)
    first = dates.now()
    clock.advance(0.05)
    dates.seen(1000.0)

    assert first == 1000.9
    assert dates.now() == pytest.approx(1000.95)


def test_a_store_whose_clock_was_set_is_followed():
    """The change exceeds the truncation of a date (A6)."""
    dates = StoreDates(ManualClock(monotonic=100.0).monotonic)
    dates.seen(10_000.0)
    dates.seen(5_000.0)

    assert dates.now() == 5_000.0


def test_an_old_date_is_asked_for_again():
    """A machine may have slept (A6)."""
    clock = ManualClock(monotonic=100.0)
    dates = StoreDates(clock.monotonic)
    dates.seen(1000.0)
    clock.advance(HOUR + 1)

    assert dates.now(max_age_s=HOUR) is None
    assert dates.now() == 1000.0 + HOUR + 1


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 0.999)), max_size=30))
def test_dates_cut_to_seconds_never_lead_away_from_the_store(steps):
    """For pauses of any length: within a step of the store's clock, and never backwards (A6)."""
    clock = ManualClock(time=1e9, monotonic=0.0)
    dates, told = StoreDates(clock.monotonic), []
    for pause_s, late_s in steps:
        clock.advance(pause_s)
        dates.seen(float(int(clock.time() - late_s)))
        told.append(dates.now())
        assert abs(told[-1] - clock.time()) <= STEP_S + 0.001

    assert told == sorted(told)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12, 12.0),
        ("2026-01-02T00:00:00Z", JAN_2),
        ("Fri, 02 Jan 2026 00:00:00 GMT", JAN_2),
        ("2026-01-02T00:00:00", JAN_2),
        (True, None),
        ("yesterday", None),
        (None, None),
        ([], None),
    ],
)
def test_a_time_is_read_however_it_is_written(value, expected):
    """Seconds, ISO 8601, HTTP dates (A6)."""
    assert date_of(value) == expected


def test_an_object_without_a_time_has_none():
    """Some filesystems report only its size (A6)."""
    assert written_at({"size": 3, "mtime": None, "updated": "2026-01-02T00:00:00Z"}) == JAN_2
    assert written_at({"size": 3}) is None
