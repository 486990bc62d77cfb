"""Invalid offers and allocations: their records are data and may contain anything."""

from __future__ import annotations

import math

import pytest

from envscaler_airflow.planning import Allocation, Offer

BODY = {
    "cloud": "aws",
    "region": "r",
    "instance_type": "x",
    "capacity_type": "spot",
    "vcpus": 1,
    "memory_gib": 1,
    "zone": None,
    "gpu_name": "T4",
    "gpus": 1,
    "gpu_memory_gb": 16,
    "usd_per_hour": 0.5,
}
NOT_NUMBERS = [math.nan, math.inf, -1, True, "1", None, [1], 10**400]


@pytest.mark.parametrize("field", ["vcpus", "memory_gib", "gpus", "gpu_memory_gb", "usd_per_hour"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value)[:9])
def test_no_offer_has_a_number_that_is_none(field, value):
    """NaN, infinity, negative, text, a boolean; None only where it means unknown."""
    if value is None and field in ("gpu_memory_gb", "usd_per_hour"):
        assert getattr(Offer.from_dict({**BODY, field: value}), field) is None
        return
    with pytest.raises(ValueError, match=field):
        Offer.from_dict({**BODY, field: value})


@pytest.mark.parametrize(
    "field", ["cloud", "region", "instance_type", "zone", "gpu_name", "price_source", "arch"]
)
@pytest.mark.parametrize("value", [3, ["a"], {}, True], ids=repr)
def test_no_offer_has_a_name_that_is_no_text(field, value):
    """It would fail where names are joined, far from its source."""
    with pytest.raises(ValueError, match=field):
        Offer.from_dict({**BODY, field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"capacity_type": "reserved"},
        {"capacity_type": 1},
        {"is_attached": "yes"},
        {"gpus": 0},
        {"gpu_name": None},
    ],
    ids=str,
)
def test_no_offer_has_a_market_that_nobody_knows(change):
    """GPUs without a name and a name without GPUs are rejected too."""
    with pytest.raises(ValueError, match=r"capacity_type|is_attached|gpus"):
        Offer.from_dict({**BODY, **change})


@pytest.mark.parametrize("field", ["nodes", "rest_nodes"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, True, "2", [2], -1], ids=repr)
def test_no_allocation_has_a_number_of_nodes_that_is_none(field, value):
    """Only whole numbers are valid."""
    with pytest.raises(ValueError, match=field):
        Allocation.from_dict({"offer": BODY, "nodes": 4, "rest": BODY, "rest_nodes": 1, field: value})


@pytest.mark.parametrize(
    "body", [None, [], "aws", {"offer": None}, {"offer": []}, {}, {"nodes": 2}], ids=repr
)
def test_what_is_no_allocation_is_refused(body):
    """The error is the same as for any bad record."""
    with pytest.raises(ValueError, match=r"Allocation|offer"):
        Allocation.from_dict(body)


def test_what_was_written_is_read():
    """Numbers without a decimal point are unchanged."""
    offer = Offer.from_dict(BODY)

    assert Offer.from_dict(offer.to_dict()) == offer
    assert Allocation.from_dict({"offer": BODY, "nodes": 4}) == Allocation(offer, 4)
