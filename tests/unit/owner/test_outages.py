"""What needs neither does not wait for an unreachable API server or a removed Role."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import BackendError, NoOfferError
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Delivered, Wake
from envscaler_airflow.store.run import Run

AWAY = [BackendError("the API server does not answer", transient=True), NoOfferError("403: list nodes")]


@pytest.fixture(params=AWAY, ids=["away", "forbidden"])
def owner(world, monkeypatch, request):
    """The owner of a running attempt; from now on the backend cannot list offers."""
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10))

    def offers():
        raise request.param

    monkeypatch.setattr(world.backend, "offers", offers)
    return owner


def test_an_attempt_is_asked_to_go(world, owner):
    """A cancel is a record in the store."""
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")

    owner.resume(Wake("request"))

    assert world.control().action == "drain"


def test_a_result_is_delivered(world, owner):
    """Its delivery needs only the store."""
    world.succeed()

    assert isinstance(owner.resume(Wake("status")), Delivered)


def test_a_move_is_refused_and_the_training_goes_on(world, owner):
    """The sensor requests it again."""
    asked = world.ask_move()

    owner.resume(Wake("request"))

    answer = world.answer(asked)
    assert answer.type == "move-refused"
    assert "the available offers are unknown now" in answer.body.reason
    assert world.state.live.phase == "started"


def test_a_lost_machine_is_followed_by_one_of_the_same_offer(world, owner):
    """The owner does not plan again."""
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))

    owner.resume(Wake("backoff"))

    assert (world.state.live.number, world.state.live.phase) == (2, "started")
