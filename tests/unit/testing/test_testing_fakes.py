"""Unit tests of the public fakes: a wrong fake makes every other test worthless."""

import pytest

from envscaler_airflow.errors import StoreError
from envscaler_airflow.store import open_store
from envscaler_airflow.testing import FaultyStore, ManualClock


@pytest.fixture
def store(tmp_path):
    """A store in a folder, with scripted faults."""
    (tmp_path / "store").mkdir()
    return FaultyStore(open_store(f"file://{tmp_path / 'store'}"), sleep=ManualClock().sleep)


def test_without_faults_it_is_the_store(store):
    """Every call passes through."""
    store.write("a/b", b"1")

    assert store.create("a/b", b"2") is False
    assert store.read("a/b") == b"1"
    assert store.names("") == ["a/b"]
    assert store.size("a/b") == 1
    store.delete("a/b")
    assert store.read("a/b") is None


def test_a_refused_call_does_nothing(store):
    """It raises, once, and the store is unchanged."""
    store.add("refuse", "write", "a")

    with pytest.raises(StoreError, match="scripted fault"):
        store.write("a", b"1")

    assert store.read("a") is None
    store.write("a", b"2")
    assert store.read("a") == b"2"


def test_a_lost_answer_is_an_act_that_was_done(store):
    """The file is created, and the caller does not know."""
    store.add("lose-answer", "create", "events/*")

    with pytest.raises(StoreError):
        store.create("events/1", b"mine")

    assert store.read("events/1") == b"mine"


def test_a_fault_strikes_only_what_it_names_and_as_often_as_it_says(store):
    """Two reads below b/ fail, all others succeed."""
    fault = store.add("refuse", "read", "b/*", times=2)

    assert store.read("a/x") is None
    for _ in range(2):
        with pytest.raises(StoreError):
            store.read("b/x")
    assert store.read("b/x") is None
    assert fault.struck == 2


def test_a_delay_is_slept_before_the_act(tmp_path):
    """By the clock of the test."""
    clock = ManualClock()
    store = FaultyStore(open_store(f"file://{tmp_path / 'store'}"), sleep=clock.sleep)
    store.add("delay", "*", delay_s=7.0)

    store.write("a", b"1")

    assert clock.slept == [7.0]
    assert store.read("a") == b"1"


def test_a_manual_clock_moves_when_told():
    """Both clocks together, or the wall clock alone; never backwards."""
    clock = ManualClock(time=100.0, monotonic=5.0)

    clock.advance(2.0)
    clock.set_wall(50.0)
    clock.sleep(1.0)

    assert (clock.time(), clock.monotonic()) == (51.0, 8.0)
    with pytest.raises(ValueError, match="must be >= 0"):
        clock.advance(-1.0)
