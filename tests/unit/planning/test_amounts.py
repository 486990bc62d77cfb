"""Amounts of money and time as text."""

from __future__ import annotations

import pytest

from envscaler_airflow.planning.amounts import duration_less, duration_text, rounded_money, usd_less, usd_text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "$0.00"), (1204.5, "$1,204.50"), (0.48, "$0.48"), (0.1, "$0.10"), (0.0312, "$0.0312"),
        (0.000123, "$0.000123"), (0.01, "$0.01"), (0.05, "$0.05"), (-0.000004, "-$0.000004"),
        (0.09999, "$0.10"), (1e-9, "$0.000000001"),
    ],
)  # fmt: skip
def test_an_amount_is_as_small_as_it_is(usd, text):
    """Two decimals from ten cents on, three digits below; a positive amount is never ``$0.00`` (F14)."""
    assert usd_text(usd) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (45.4, "45 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, text):
    """A person needs the magnitude, not the exact value."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (0.48, "$0.48 less"),
        (-0.0008, "$0.0008 more"),
        (0.0, "the same"),
        (1e-15, "the same"),
        (-1e-15, "the same"),
    ],
)
def test_a_difference_of_nothing_is_none(saved, text):
    """Sums of floats differ in their last digits; the text is never "$0.00 less" (F11)."""
    assert usd_less(saved, of=1.36) == text


@pytest.mark.parametrize(
    ("sooner_s", "text"), [(20.0, "20 s less"), (-5.0, "5 s more"), (0.4, "the same"), (-0.4, "the same")]
)
def test_times_that_read_alike_are_the_same(sooner_s, text):
    """The text is never "0 s less" (F11)."""
    assert duration_less(sooner_s) == text


def test_money_in_json_has_no_noise_of_sums():
    """Amounts below a name with the word usd are rounded; all else is unchanged (F6)."""
    body = {"saved_usd": -3e-21, "usd_split": {"lost": 0.1 + 0.2, "idle": None}, "speed": -3e-21, "n": [1]}

    assert rounded_money([body]) == [
        {"saved_usd": 0.0, "usd_split": {"lost": 0.3, "idle": None}, "speed": -3e-21, "n": [1]}
    ]
    assert str(rounded_money({"usd": -3e-21})["usd"]) == "0.0"
