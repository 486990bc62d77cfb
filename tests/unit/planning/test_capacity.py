"""Stock-outs and their memory, data that are bound to a place, mixed fleets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.clouds import refusals, tariffs
from envscaler_airflow.planning import (
    Allocation,
    Goal,
    Knowledge,
    Offer,
    Overheads,
    Requirements,
    Speed,
    feasible,
    plan,
)
from envscaler_airflow.planning.billing import Billing
from envscaler_airflow.planning.data import GIB_PER_S, DataPlace
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.stockouts import FIRST_S, LONGEST_S, QUOTA_S, StockOut, against, classify, met
from envscaler_airflow.planning.table import ANY_RATE_PER_HOUR, RATES_PER_HOUR, Row, build_table, table_of
from envscaler_airflow.store import open_store
from envscaler_airflow.store.availability import STOCKOUTS, forget, remember, stockouts

SPOT = Offer("aws", "us-east-1", "g5.xlarge", "spot", 4, 16, "us-east-1a", "A10G", 1, 24, 0.4)
OTHER_ZONE = replace(SPOT, zone="us-east-1b", usd_per_hour=0.5)
ON_DEMAND = replace(SPOT, capacity_type="on-demand", usd_per_hour=1.0)
LARGER = replace(SPOT, instance_type="g6.4xlarge")
FAR = replace(ON_DEMAND, cloud="gcp", region="us-central1", zone=None, usd_per_hour=0.7)
NOW = 1_000_000.0


NO_GPU = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu. preemption: 0/5"


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        ("InsufficientInstanceCapacity", "", ("InsufficientInstanceCapacity", "capacity", "offer")),
        ("ClientError", "An error occurred (VcpuLimitExceeded)", ("VcpuLimitExceeded", "quota", "family")),
        ("MaxSpotInstanceCountExceeded", "", ("MaxSpotInstanceCountExceeded", "quota", "region")),
        ("ZONE_RESOURCE_POOL_EXHAUSTED", "", ("ZONE_RESOURCE_POOL_EXHAUSTED", "capacity", "offer")),
        ("", "code: OperationDenied.NoStock, sold", ("OperationDenied.NoStock", "capacity", "offer")),
        ("ResourceInsufficient.SpecifiedInstanceType", "", ("ResourceInsufficient", "capacity", "offer")),
        ("Unschedulable", NO_GPU, ("Unschedulable: Insufficient nvidia.com/gpu", "capacity", "offer")),
        ("Unschedulable", 'persistentvolumeclaim "x" not found', None),
        ("UnauthorizedOperation", "no", None),
        ("", "", None),
    ],
)
def test_refusals_are_told_apart(code, message, expected):
    """A stock-out, a quota, or another error."""
    assert classify(code, message, refusals()) == expected


def test_a_stock_out_excludes_its_offer_for_a_while():
    """Ten minutes for this type, zone and capacity type; other zones and on demand remain available."""
    out = met(SPOT, "InsufficientInstanceCapacity", refusals=refusals(), now=NOW)

    assert out.excludes(SPOT, NOW + 60) == "InsufficientInstanceCapacity 1 min ago: tried again in 9 min"
    assert out.excludes(SPOT, NOW + FIRST_S) is None
    for offer in (OTHER_ZONE, ON_DEMAND, LARGER, FAR):
        assert out.excludes(offer, NOW) is None


def test_stock_outs_in_a_row_last_longer():
    """Twice each time, up to four hours."""
    out = None
    lasting = []
    for _ in range(8):
        out = met(SPOT, "InsufficientInstanceCapacity", refusals=refusals(), now=NOW, before=out)
        lasting.append(out.lasts_s)

    assert lasting[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert lasting[-1] == LONGEST_S
    assert "8 times in a row" in out.excludes(SPOT, NOW)


def test_a_quota_excludes_what_it_counts():
    """All spot of the region, or all types of a family there."""
    spot = met(SPOT, "MaxSpotInstanceCountExceeded", refusals=refusals(), now=NOW)
    family = met(ON_DEMAND, "VcpuLimitExceeded", refusals=refusals(), now=NOW)

    assert spot.excludes(LARGER, NOW + QUOTA_S - 1) is not None
    assert spot.excludes(ON_DEMAND, NOW) is None
    assert family.excludes(replace(ON_DEMAND, instance_type="g6.4xlarge"), NOW) is not None
    assert family.excludes(replace(ON_DEMAND, instance_type="p5.48xlarge"), NOW) is None
    assert family.excludes(replace(ON_DEMAND, region="us-west-2"), NOW) is None


def test_a_clock_that_is_wrong_costs_no_more_than_a_stock_out_lasts():
    """The stock-out was recorded a day in the future."""
    out = met(SPOT, "InsufficientInstanceCapacity", refusals=refusals(), now=NOW + 86400)

    assert out.left_s(NOW) == FIRST_S
    assert "0 min ago" in out.excludes(SPOT, NOW)


def test_the_memory_is_shared_by_all_runs_on_a_store(tmp_path):
    """One run meets it, the next one avoids it, and it is forgotten after a successful start."""
    store = open_store(str(tmp_path))

    assert remember(store, SPOT, "InsufficientInstanceCapacity", now=NOW).times == 1
    assert remember(store, SPOT, "InsufficientInstanceCapacity", now=NOW + 60).times == 2
    assert remember(store, SPOT, "UnauthorizedOperation", now=NOW) is None
    (found,) = stockouts(store, now=NOW + 60)
    assert against(SPOT, [found], NOW + 60).startswith("InsufficientInstanceCapacity 0 min ago, 2 times")

    how = Search(avoid=lambda offer: against(offer, [found], NOW + 60))
    assert search(Requirements(gpus=1), table_of([SPOT, OTHER_ZONE]), how=how).pick().offer == OTHER_ZONE

    forget(store, SPOT)
    assert stockouts(store, now=NOW) == []


def test_a_memory_that_is_over_goes_away_and_a_torn_one_is_none(tmp_path):
    """It is kept for twice its duration, so that the next one counts as consecutive."""
    store = open_store(str(tmp_path))
    remember(store, SPOT, "InsufficientInstanceCapacity", now=NOW)
    store.write(f"{STOCKOUTS}/torn.json", b"{")
    store.write(f"{STOCKOUTS}/list.json", b"[]")

    assert stockouts(store, now=NOW + FIRST_S + 1) == []
    assert remember(store, SPOT, "InsufficientInstanceCapacity", now=NOW + FIRST_S + 1).times == 2
    assert stockouts(store, now=NOW + 10 * FIRST_S) == []
    assert sorted(store.names(STOCKOUTS)) == [f"{STOCKOUTS}/list.json", f"{STOCKOUTS}/torn.json"]


def test_a_stock_out_comes_back_from_json():
    """It is unchanged."""
    out = met(SPOT, "InsufficientInstanceCapacity", refusals=refusals(), now=NOW)

    assert StockOut.from_dict(out.to_dict()) == out


GPU = Requirements(gpus=1)


def speed_of(_kind, nodes):
    """One unit per hour for each node."""
    return Speed(nodes / 3600, 0.0, "user")


def test_data_elsewhere_cost_egress_and_time():
    """900 GiB out of AWS: $81 and an hour, so the cheaper cloud costs more for ten hours of work."""
    data = DataPlace("data", "aws", "us-east-1", gib=900.0)
    table, work = table_of([ON_DEMAND, FAR]), Knowledge(10, "units", tariffs=tariffs())

    near = search(GPU, table, knowledge=work, how=Search(speed_of=speed_of))
    tied = search(GPU, table, knowledge=replace(work, data=(data,)), how=Search(speed_of=speed_of))

    assert near.pick().offer == FAR
    assert tied.pick().offer == ON_DEMAND
    away = tied.candidates[1].estimate
    assert away.data_usd == pytest.approx(81.0)
    assert away.start_s == pytest.approx(900 / GIB_PER_S) == 3600
    assert away.usd == pytest.approx(81 + 11 * 0.7)


def test_another_region_of_the_same_cloud_is_nearer_than_another_cloud():
    """$0.02 per GiB against $0.09; nothing in the same region; unknown for a cloud without a known tariff."""
    data = DataPlace("data", "aws", "us-east-1", gib=100.0)

    assert data.usd_to("aws", "us-east-1", tariffs()) == 0.0
    assert data.usd_to("aws", "us-west-2", tariffs()) == pytest.approx(2.0)
    assert data.usd_to("gcp", "us-central1", tariffs()) == pytest.approx(9.0)
    assert replace(data, cloud="tencent").usd_to("aws", "us-east-1", tariffs()) is None


def test_a_bound_claim_restricts_and_is_named():
    """It can be used only in its zone; the note names the cheaper offer that this excludes."""
    claim = DataPlace("claim", "aws", "us-east-1", zone="us-east-1b", is_bound=True)

    got = search(GPU, table_of([SPOT, OTHER_ZONE, FAR]), knowledge=Knowledge(data=(claim,)))

    assert [item.allocation.offer for item in got.candidates] == [OTHER_ZONE]
    assert (
        f"data that can be used in one place alone exclude {SPOT.name} at $0.4000/h: "
        "claim (aws/us-east-1/us-east-1b)"
    ) in got.notes


def test_a_mixed_fleet_has_its_core_on_demand():
    """One of three nodes at $1, two at $0.4: $1.80; losing any of the two costs a restart."""
    work = Knowledge(30, "units", overheads=Overheads(360, 0, 0, 3600))
    how = Search(speed_of=speed_of, is_mixed=True)

    made = search(replace(GPU, max_nodes=3), table_of([SPOT, OTHER_ZONE, ON_DEMAND]), knowledge=work, how=how)

    by_size = {item.allocation.rest_nodes: item for item in made.fleets}
    assert set(by_size) == {1, 2}
    assert by_size[2].allocation == Allocation(ON_DEMAND, 3, rest=SPOT, rest_nodes=2)
    assert by_size[2].usd_per_hour == pytest.approx(1.8)
    # 10 h at twice the rate of an unknown risk: each costs half an hour of work and 360 s of start.
    expected = by_size[2].estimate
    assert expected.interruption_s == pytest.approx(10 * 2 * ANY_RATE_PER_HOUR * (1800 + 360), rel=0.1)
    assert expected.usd == pytest.approx(1.8 * expected.hours, rel=1e-3)


def test_a_fleet_needs_both_kinds_of_the_same_type():
    """There is no spot of another type, and none without a price."""
    unpriced = replace(SPOT, usd_per_hour=None)
    how = Search(is_mixed=True)
    wide = replace(GPU, max_nodes=2)

    assert search(wide, table_of([LARGER, ON_DEMAND, unpriced]), how=how).fleets == ()
    assert search(wide, table_of([SPOT, ON_DEMAND]), how=how).fleets != ()
    assert search(wide, table_of([SPOT, ON_DEMAND])).fleets == ()  # nobody asked


@pytest.mark.parametrize(
    "change",
    [{"capacity": "spot"}, {"capacity": "on-demand"}, {"can_checkpoint": False}, {"min_nodes": 2}],
    ids=["spot alone", "on demand alone", "nothing to go on from", "no node to spare"],
)
def test_a_stage_that_may_not_be_on_both_gets_no_fleet(change):
    """Both planners agree."""
    need = replace(GPU, max_nodes=2, **change)
    offers = [SPOT, ON_DEMAND]

    assert plan(need, offers, is_mixed=True).fleets == ()
    assert search(need, table_of(offers), how=Search(is_mixed=True)).fleets == ()


def test_a_fleet_is_chosen_where_it_alone_keeps_the_limits():
    """Two on spot are lost too often for the deadline, and two on demand are too expensive for the budget."""
    need = replace(GPU, min_nodes=1, max_nodes=2)
    offers = [SPOT, ON_DEMAND]
    fast = {
        Allocation(offer, nodes).name: Speed(nodes / 3600, 0.0, "measured")
        for offer in offers
        for nodes in (1, 2)
    }
    # 20 units in 10 h. A loss costs about half an hour of work and an hour of start.
    work = Knowledge(20, "units", fast, Overheads(3600, 0, 0, 3600), {SPOT.name: 0.1})
    goal = Goal("deadline", budget_usd=19.0, deadline_s=14 * 3600)

    got = plan(need, offers, goal=goal, knowledge=work, is_mixed=True)

    assert got.chosen.allocation == Allocation(ON_DEMAND, 2, rest=SPOT, rest_nodes=1)
    assert got.chosen.is_safe
    assert plan(need, offers, goal=goal, knowledge=work).chosen is None
    assert got.chosen == got.fleets[0]


def test_both_planners_make_the_same_fleets():
    """The planner over columns examines few offers, and finds the same."""
    need = replace(GPU, min_nodes=1, max_nodes=3)
    offers = [SPOT, OTHER_ZONE, ON_DEMAND]
    rates = {offer.name: ANY_RATE_PER_HOUR for offer in (SPOT, OTHER_ZONE)}
    overheads = Overheads(360, 30, 5, 3600)
    speeds = {
        Allocation(offer, nodes).name: speed_of(offer, nodes) for offer in offers for nodes in (1, 2, 3)
    }

    whole = plan(need, offers, knowledge=Knowledge(30, "units", speeds, overheads, rates), is_mixed=True)
    columns = search(
        need,
        table_of(offers),
        knowledge=Knowledge(30, "units", overheads=overheads),
        how=Search(speed_of=speed_of, is_mixed=True),
    )

    assert columns.fleets == whole.fleets
    assert columns.chosen == whole.chosen


@pytest.mark.parametrize(
    ("need", "goal"),
    [
        (Requirements(gpus=1, max_nodes=2), Goal("deadline", budget_usd=19.0, deadline_s=13 * 3600)),
        (Requirements(gpus=1, max_nodes=2, max_usd_per_hour=1.5), Goal("deadline", deadline_s=13 * 3600)),
    ],
    ids=["budget", "price an hour"],
)
def test_limits_are_held_against_the_fleet_and_not_its_parts(need, goal):
    """All on demand is too expensive and all on spot too late: both planners find the mixed fleet."""
    offers = [SPOT, ON_DEMAND]
    rates = {SPOT.name: ANY_RATE_PER_HOUR}
    overheads = Overheads(5400, 0, 0, 5400)
    speeds = {Allocation(offer, n).name: speed_of(offer, n) for offer in offers for n in (1, 2)}

    small = plan(
        need, offers, goal=goal, knowledge=Knowledge(20, "units", speeds, overheads, rates), is_mixed=True
    )
    large = search(
        need,
        table_of(offers),
        goal=goal,
        knowledge=Knowledge(20, "units", overheads=overheads),
        how=Search(speed_of=speed_of, is_mixed=True),
    )

    mixed = Allocation(ON_DEMAND, 2, rest=SPOT, rest_nodes=1)
    assert (small.chosen.allocation, small.candidates) == (mixed, ())
    assert (large.chosen, large.candidates) == (small.chosen, ())


def test_what_may_be_moved_to_has_fleets_where_they_are_asked_for():
    """They follow the other candidates, which keep their order."""
    need = replace(GPU, max_nodes=2)
    plain = feasible([need], [SPOT, ON_DEMAND])

    assert feasible([need], [SPOT, ON_DEMAND], is_mixed=True) == (
        *plain,
        Allocation(ON_DEMAND, 2, rest=SPOT, rest_nodes=1),
    )


def test_the_risk_of_a_spot_part_is_that_of_its_place():
    """The row's own range is used where it is known."""
    rows = {
        InstanceType("aws", "g5.xlarge", 4, 16, "A10G", 1, 24): [
            Row("r", "a", 1.0, 0.4, risk=5),
            Row("r", "b", 1.0, 0.4),
        ]
    }
    table = build_table(rows)
    by_zone = {offer.zone: offer for offer in table.offers() if offer.capacity_type == "spot"}

    assert table.rates_of(Allocation(by_zone["a"], 2)) == {by_zone["a"].name: RATES_PER_HOUR[5]}
    assert table.rates_of(Allocation(by_zone["b"])) == {by_zone["b"].name: ANY_RATE_PER_HOUR}
    assert table.rates_of(Allocation(ON_DEMAND)) == {}
    assert [table.range_of(by_zone[zone]) for zone in "ab"] == [">20%", None]
    assert table.range_of(replace(by_zone["a"], capacity_type="on-demand")) is None


def test_time_is_billed_as_the_cloud_does():
    """AWS: by the second, at least a minute. Lambda: whole minutes."""
    aws, minutes = tariffs()["aws"].billing, tariffs()["lambda"].billing

    assert aws.billed_s(59.2) == 60.0
    assert aws.billed_s(61.2) == 62.0
    assert aws.billed_s(3600.0000000001) == 3600.0
    assert minutes.billed_s(61.0) == 120.0
    with pytest.raises(ValueError, match="unit_s"):
        Billing(0.0)


def test_an_estimate_pays_for_whole_units():
    """90 s on Lambda at $40 an hour are billed as two minutes."""
    here = Offer("lambda", "us-east-1", "gpu_1x", "on-demand", 8, 32, usd_per_hour=40.0)

    got = search(
        Requirements(),
        table_of([here]),
        knowledge=Knowledge(90, "units", tariffs=tariffs()),
        how=Search(speed_of=lambda *_: Speed(1, 0)),
    )

    assert got.chosen.estimate.hours == pytest.approx(90 / 3600)
    assert got.chosen.estimate.usd == pytest.approx(40 * 120 / 3600)
