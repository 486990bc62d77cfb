"""Allocations of two offers: ranks, prices, names, and their records."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial

import pytest

from envscaler_airflow.clouds import tariffs
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.offers import AllocationPart
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import cost
from envscaler_airflow.run.cost import UsageInterval, Use

HOUR = 3600.0
bill = partial(cost.bill, tariffs=tariffs())
CORE = Offer(
    "aws",
    "us-east-1",
    "p3.2xlarge",
    "on-demand",
    8,
    61,
    gpu_name="V100",
    gpus=1,
    gpu_memory_gb=16,
    usd_per_hour=3.0,
)
REST = replace(CORE, capacity_type="spot", zone="us-east-1a", usd_per_hour=1.0)
MIXED = Allocation(CORE, 4, rest=REST, rest_nodes=3)


def test_the_last_ranks_are_on_the_rest():
    """Rank 0 on demand, ranks 1 to 3 on spot."""
    assert MIXED.parts == (AllocationPart(CORE, 1, 0), AllocationPart(REST, 3, 1))
    assert [MIXED.offer_of(rank) for rank in range(4)] == [CORE, REST, REST, REST]
    with pytest.raises(ValueError, match="rank"):
        MIXED.offer_of(4)
    with pytest.raises(ValueError, match="rank"):
        MIXED.offer_of(-1)


def test_an_allocation_of_one_offer_has_one_part():
    """All ranks on it."""
    assert Allocation(CORE, 2).parts == (AllocationPart(CORE, 2, 0),)
    assert not Allocation(CORE, 2).is_mixed
    assert MIXED.is_mixed


def test_a_mixed_allocation_costs_its_parts_together():
    """$3 and three times $1; unknown when either price is."""
    assert MIXED.usd_per_hour == 6.0
    assert replace(MIXED, rest=replace(REST, usd_per_hour=None)).usd_per_hour is None
    assert replace(MIXED, offer=replace(CORE, usd_per_hour=None)).usd_per_hour is None
    assert replace(MIXED, rest=replace(REST, usd_per_hour=0.0)).usd_per_hour == 3.0


def test_its_name_tells_both_parts():
    """The number of nodes of each offer."""
    assert MIXED.name == (
        "1 x aws/us-east-1/p3.2xlarge/on-demand + 3 x aws/us-east-1/us-east-1a/p3.2xlarge/spot"
    )


@pytest.mark.parametrize(
    ("nodes", "rest", "rest_nodes"),
    [(2, REST, 2), (2, REST, 0), (2, None, 1), (2, REST, -1), (0, None, 0)],
    ids=["nothing for rank 0", "no nodes for it", "nodes of nothing", "negative", "none at all"],
)
def test_parts_that_do_not_add_up_are_refused(nodes, rest, rest_nodes):
    """At least rank 0 is on the first offer, and the rest has nodes exactly when it is given."""
    with pytest.raises(ValueError, match="nodes"):
        Allocation(CORE, nodes, rest=rest, rest_nodes=rest_nodes)


@pytest.mark.parametrize(
    "change",
    [{"region": "us-west-2"}, {"gpu_name": "T4"}, {"gpus": 4}, {"cloud": "gcp"}],
    ids=["region", "type of GPU", "number of GPUs", "cloud"],
)
def test_parts_that_one_job_cannot_run_across_are_refused(change):
    """Another region, another GPU, another number of processes."""
    with pytest.raises(ValueError, match="the same GPUs"):
        replace(MIXED, rest=replace(REST, **change))


def test_what_is_written_of_it_is_read_back():
    """There are two more keys, and only when the allocation is mixed."""
    body = json.loads(json.dumps(MIXED.to_dict()))

    assert Allocation.from_dict(body) == MIXED
    assert set(body) == {"offer", "nodes", "rest", "rest_nodes"}
    assert set(Allocation(CORE, 2).to_dict()) == {"offer", "nodes"}


@pytest.mark.parametrize(
    "change",
    [{"rest": "spot"}, {"rest": {}}, {"rest_nodes": None}, {"rest_nodes": 9}, {"rest": None}],
    ids=["text", "empty", "no number", "too many", "missing"],
)
def test_a_torn_record_of_it_is_refused(change):
    """The error is the same as for any bad record."""
    with pytest.raises(ValueError, match=r"allocation|offer|rest"):
        Allocation.from_dict({**MIXED.to_dict(), **change})


def test_records_that_hold_one_are_as_short():
    """Plans and decisions contain an allocation in its own form."""

    @dataclass(frozen=True, slots=True)
    class Holding(Record):
        allocation: Allocation

    assert Holding(Allocation(CORE, 2)).to_dict() == {"allocation": Allocation(CORE, 2).to_dict()}
    assert Holding(MIXED).to_dict() == {"allocation": MIXED.to_dict()}


def used(*held: UsageInterval, allocation: Allocation = MIXED) -> Use:
    """An attempt with ten steps, all kept, that started at once."""
    return Use(
        1,
        1,
        allocation,
        held,
        "succeeded",
        provisioning_s=0,
        idle_s=0,
        first_step=0,
        last_step=10,
        kept_step=10,
    )


def test_each_node_is_billed_by_the_part_that_it_is_of():
    """Two hours of rank 0 at $3, half an hour of rank 2 at $1: $6.5 for 2.5 hours, $2.60 each."""
    line = bill([used(UsageInterval(0, 0.0, 2 * HOUR), UsageInterval(2, 0.0, HOUR / 2))], now=0).lines[0]

    assert line.usd == 6.5
    assert line.node_hours == 2.5
    assert line.usd_per_node_hour == 2.6
    assert line.usd_split.compute == 6.5


def test_an_unknown_price_of_a_part_is_unknown_only_where_it_was_held():
    """Rank 0 alone has a bill; with rank 1 there is none, and the note names the part."""
    unpriced = replace(MIXED, rest=replace(REST, usd_per_hour=None))
    alone = bill([used(UsageInterval(0, 0.0, HOUR), allocation=unpriced)], now=0)
    both = bill([used(UsageInterval(0, 0.0, HOUR), UsageInterval(1, 0.0, HOUR), allocation=unpriced)], now=0)

    assert alone.usd == 3.0
    assert both.usd is None
    assert f"g1-a1: the price of {unpriced.rest.name} is unknown" in both.notes


def test_a_node_that_a_mixed_allocation_has_not_has_no_price():
    """The part that it belongs to is unknown."""
    got = bill([used(UsageInterval(4, 0.0, HOUR))], now=0)

    assert got.usd is None
    assert f"g1-a1: the price of a node beyond {MIXED.name} is unknown" in got.notes


def test_the_static_plan_of_a_mixed_start_is_all_on_demand():
    """Four nodes at $3 for the two hours that its ten steps took."""
    held = [UsageInterval(rank, 0.0, 2 * HOUR) for rank in range(4)]
    got = bill([used(*held)], now=0)
    other = replace(MIXED, rest=replace(REST, instance_type="p3dn.large"))

    assert got.static.usd == 24.0
    assert got.static.allocation == Allocation(CORE, 4)
    assert got.saved_usd == 24.0 - (6.0 + 6.0)
    assert bill([used(*held, allocation=other)], now=0).static.usd is None


def test_a_bill_rounds_as_the_cloud_does():
    """20 s on AWS are billed as a minute, 61 s on Lambda as two; the unused rest is idle."""
    lambda_core = replace(CORE, cloud="lambda")
    short = bill([used(UsageInterval(0, 0.0, 20.0), allocation=Allocation(CORE))], now=0).lines[0]
    minutes = bill([used(UsageInterval(0, 0.0, 61.0), allocation=Allocation(lambda_core))], now=0).lines[0]
    local = bill(
        [used(UsageInterval(0, 0.0, 20.0), allocation=Allocation(replace(CORE, cloud="local")))], now=0
    ).lines[0]

    assert short.usd == pytest.approx(3.0 / 60)
    assert short.hours.idle == pytest.approx(40 / HOUR)
    assert short.hours.compute == pytest.approx(20 / HOUR)
    assert minutes.usd == pytest.approx(3.0 / 30)
    assert local.usd == pytest.approx(3.0 * 20 / HOUR)


def test_what_was_never_held_is_not_rounded():
    """An interval of zero costs nothing, in spite of the minimum."""
    assert bill([used(UsageInterval(0, 5.0, 5.0), allocation=Allocation(CORE))], now=0).usd == 0.0
