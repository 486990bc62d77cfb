"""Cost of nodes that were changed in place: removed ones stay on the bill, and each is rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.owner import facts
from envscaler_airflow.owner.usage import Span, cost_usd, with_removed
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import AttemptState, Handle
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.run.state import Before
from envscaler_airflow.testing.scripted_backend import cpu_offer

HOUR = 3600.0
START = 1e6
OFFER = cpu_offer(1, usd_per_hour=1.0)


def attempt(*history):
    """Return an attempt with ``(nodes, until_h)`` for each period; None in the last: until now."""
    *earlier, (nodes, _) = history
    before = tuple(Before(Allocation(OFFER, count), START + hours * HOUR) for count, hours in earlier)
    return AttemptState(
        1,
        1,
        Allocation(OFFER, nodes),
        phase="started",
        started_at=START,
        earlier=before,
        handle=Handle("scripted", "a"),
    )


def held(*rows, off_s=0.0):
    """Return usage intervals of ``(node, from_h, to_h)`` by a provider's clock that is off by *off_s*."""
    return tuple(
        UsageInterval(
            node, START + off_s + first * HOUR, None if last is None else START + off_s + last * HOUR
        )
        for node, first, last in rows
    )


@pytest.mark.parametrize("off_s", [0.0, HOUR, -HOUR])
@pytest.mark.parametrize(
    ("history", "seen", "node_hours"),
    [
        (((3, 10), (1, None)), [(0, 0, None)], 11 + 2 * 10),
        (((1, 2), (3, 10), (2, None)), [(0, 0, None), (1, 2, None)], 11 + 9 + 8),
        (((2, 4), (1, 6), (2, 8), (1, None)), [(0, 0, None)], 11 + 4 + 2),
        (((2, 4), (1, 6), (2, None)), [(0, 0, None), (1, 6, None)], 11 + 4 + 5),
    ],
    ids=["shrunk", "grown-and-shrunk", "twice", "shrunk-and-grown"],
)
def test_a_node_that_was_removed_is_paid_until_then(history, seen, node_hours, off_s):
    """11 h in all; the provider shows only the nodes that exist now."""
    live = attempt(*history)

    found = with_removed(held(*seen, off_s=off_s), live)

    assert facts.usd_of(live, found, now=START + 11 * HOUR) == pytest.approx(node_hours)


def test_one_that_is_still_shown_is_not_paid_twice():
    """Its pod exists until its grace is over, and then for as long as the provider keeps it."""
    live = attempt((2, 10), (1, None))
    seen = held((0, 0, None), (1, 0.5, 10.01))

    assert with_removed(seen, live) == seen


def test_an_attempt_that_never_changed_has_what_the_provider_says():
    """Neither does one that only grew."""
    seen = held((0, 0, None), (1, 3, None))

    assert with_removed(seen, attempt((2, None))) == seen
    assert with_removed(seen, attempt((1, 3), (2, None))) == seen
    assert with_removed((), attempt((2, 3), (1, None))) == ()


class Shows:
    """A backend that shows only the nodes that exist now."""

    def usage(self, _handle):
        """One node."""
        return held((0, 0, None))


def test_the_bill_asks_for_both():
    """For a running attempt, for its budget, and for one that has ended."""
    live = attempt((2, 10), (1, None))

    assert facts.usage_of(Shows(), live) == held((0, 0, None), (1, 0, 10))


@pytest.mark.parametrize(("cloud", "seconds"), [("aws", 100), ("lambda", 120)])
def test_a_machine_that_is_changed_in_place_is_rounded_once(cloud, seconds):
    """100 s, the last 10 of them on more CPUs: AWS bills at least a minute, Lambda whole minutes."""
    small = Allocation(replace(cpu_offer(1, usd_per_hour=3.6), cloud=cloud), 1)
    large = Allocation(replace(cpu_offer(2, usd_per_hour=3.6), cloud=cloud), 1)

    usd = cost_usd((Span(0.0, small), Span(90.0, large)), [UsageInterval(0, START, START + 100)])

    assert usd == pytest.approx(seconds * 0.001)
