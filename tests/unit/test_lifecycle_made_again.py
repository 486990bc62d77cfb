"""A DAG run that was deleted and made again is told from one that is retried or cleared."""

from __future__ import annotations

import pytest

from envscaler_airflow.lifecycle import Actor, Event, enter, fold


def actor(number, *, started, clears, ti=None, max_tries=3):
    """Try *number* of the DAG run that began at *started* and was cleared so often."""
    return Actor(
        ti or f"ti-{number}-{started}-{clears}", number, max_tries, run_started_at=started, clears=clears
    )


FIRST = actor(1, started=100.0, clears=0)


def after(*more, first=FIRST):
    """State of a run that *first* began, and *more* actors have seen since."""
    events = [Event(1, "generation", {"generation": 1, "spec_hash": "A"}, writer="w", actor=first)]
    events += [
        Event(number, "owner", {}, writer="w", actor=one)
        for number, one in enumerate(more, start=len(events) + 1)
    ]
    return fold(events)


@pytest.mark.parametrize(
    ("state", "seen", "is_made_again"),
    [
        (after(), actor(2, started=100.0, clears=0), False),  # retried
        (after(), actor(2, started=200.0, clears=1, max_tries=4), False),  # cleared
        (after(), actor(2, started=100.0, clears=1, max_tries=4), False),  # cleared without its DAG run
        (after(), actor(2, started=200.0, clears=0), True),  # its first try was failed unstarted
        (after(), actor(1, started=200.0, clears=0), True),
        (
            after(actor(2, started=200.0, clears=1, max_tries=4)),
            actor(3, started=300.0, clears=0, max_tries=4),
            True,  # cleared once, then deleted and made again
        ),
        (after(), Actor("ti-9", 2, 3), False),  # of an older version, which did not say
        (after(first=Actor("ti-0", 1, 3)), actor(2, started=200.0, clears=0), False),
        (after(), actor(1, started=100.0, clears=0, ti=FIRST.ti_id), False),  # the very same slice again
    ],
)
def test_by_when_the_dag_run_began_and_how_often_it_was_cleared(state, seen, is_made_again):
    """Airflow begins a DAG run anew at a clear too, and counts those."""
    entry = enter(state, seen, spec_hash="A")

    assert (entry.reason == "the DAG run was deleted and made again") is is_made_again


def test_an_actor_comes_back_from_its_event():
    """What it does not say is not written, as older versions did."""
    old = Actor("ti-1", 1, 3)

    assert Actor.from_dict(FIRST.to_dict()) == FIRST
    assert Actor.from_dict(old.to_dict()) == old
    assert old.to_dict() == {"ti_id": "ti-1", "try_number": 1, "max_tries": 3}
