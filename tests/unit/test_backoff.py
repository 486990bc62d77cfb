"""One rule for the time between two tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.backoff import Backoff, wait_s
from envscaler_airflow.testing.scripted_backend import ManualClock


def test_the_wait_doubles_up_to_its_limit():
    """1, 2, 4, 8, 16 s, then always 30."""
    waits = [wait_s(failures, first_s=1.0, most_s=30.0) for failures in range(1, 8)]

    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@given(st.integers(0, 10**9), st.floats(0.1, 100), st.floats(100, 1e6))
def test_any_number_of_failures_waits_between_the_first_and_the_longest(failures, first_s, most_s):
    """Also a billion failures, which no float can double."""
    assert first_s <= wait_s(failures, first_s=first_s, most_s=most_s) <= most_s


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_a_success_ends_the_wait(failures):
    """The next failure waits as the first one did."""
    clock = ManualClock()
    backoff = Backoff(clock.monotonic, first_s=2.0)
    for _ in range(failures):
        backoff.failed()

    backoff.worked()

    assert (backoff.is_ready, backoff.failures) == (True, 0)
    backoff.failed()
    clock.advance(1.9)
    assert not backoff.is_ready
    clock.advance(0.1)
    assert backoff.is_ready
