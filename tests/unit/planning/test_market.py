"""The search over many offers: the same answers as an exhaustive search, and as the planner itself."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import pytest

from envscaler_airflow.clouds import tariffs
from envscaler_airflow.errors import NoOfferError
from envscaler_airflow.planning import Goal, Knowledge, Offer, Overheads, Requirements, Speed, plan
from envscaler_airflow.planning.market import Scope, Search, search
from envscaler_airflow.planning.near_misses import unknown_gpus
from envscaler_airflow.planning.table import ANY_RATE_PER_HOUR, OfferTable, joined, table_of

_spec = importlib.util.spec_from_file_location("exhaustive", Path(__file__).parents[2] / "exhaustive.py")
exhaustive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exhaustive)

GPUS = {"T4": 16, "V100": 16, "A100": 40, "A100-80GB": 80, "H100": 80, "MI300X": 192, "Inferentia": None}
T4 = Offer("aws", "us-east-1", "g4dn.xlarge", "on-demand", 4, 16, None, "T4", 1, 16, 0.526, arch="x86_64")
A100 = Offer("gcp", "us-central1", "a2-highgpu-1g", "on-demand", 12, 85, "a", "A100", 1, 40, 3.67)
A100_SPOT = replace(A100, capacity_type="spot", usd_per_hour=1.1)
CPU = Offer("azure", "eastus", "D4", "on-demand", 4, 16, None, usd_per_hour=0.192)
SMALL = table_of([T4, A100, A100_SPOT, CPU])


def some_offers(rng: random.Random, number: int) -> list[Offer]:
    """Offers with unknown prices, equal prices, places without zones and both capacity types."""
    found = {}
    for _ in range(number):
        gpu = rng.choice([None, None, *GPUS])
        size = rng.choice([1, 2, 4, 8])
        offer = Offer(
            cloud=rng.choice(["aws", "gcp", "azure"]),
            region=rng.choice(["r1", "r2", "r3"]),
            instance_type=f"{gpu or 'cpu'}-{size}-{rng.choice('ab')}",
            capacity_type=rng.choice(["on-demand", "spot"]),
            vcpus=4 * size,
            memory_gib=16 * size,
            zone=rng.choice([None, "z1", "z2"]),
            gpu_name=gpu,
            gpus=size if gpu else 0,
            gpu_memory_gb=GPUS[gpu] if gpu else None,
            usd_per_hour=rng.choice([None, *(round(0.1 * size * step, 2) for step in range(1, 9))]),
            arch=rng.choice(["x86_64", "x86_64", "arm64"]),
        )
        found[offer.name] = offer
    return list(found.values())


def some_request(rng: random.Random) -> dict:
    """Needs in the form of the exhaustive search."""
    gpus = rng.choice([0, 1, 1, 2, 4, 8])
    nodes = rng.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    return {
        "vcpus": rng.choice([0, 0, 4, 8, 20, 32]),
        "memory_gib": rng.choice([0, 0, 16, 64, 100]),
        "gpus": gpus,
        "gpu_types": tuple(rng.sample(sorted(GPUS), rng.choice([0, 0, 1, 2]))) if gpus else (),
        "gpu_memory_gb": rng.choice([None, None, 24, 80]) if gpus else None,
        "gpu_memory_max_gb": rng.choice([None, None, None, 80]) if gpus else None,
        "gpu_vendor": rng.choice([None, None, "nvidia", "amd"]),
        "cloud": rng.choice([None, None, None, "aws", "gcp"]),
        "region": rng.choice([None, None, None, "r1", "r2"]),
        "zone": rng.choice([None, None, None, "z1"]),
        "capacity": rng.choice(["auto", "spot", "on-demand"]),
        "arch": rng.choice([None, "x86_64"]),
        "exact_gpus": rng.random() < 0.3,
        "min_nodes": nodes[0],
        "max_nodes": nodes[1],
    }


def row_of(offer: Offer) -> dict:
    """An offer in the form of the exhaustive search."""
    return {
        "name": offer.name,
        "cloud": offer.cloud,
        "region": offer.region,
        "zone": offer.zone or "",
        "instance_type": offer.instance_type,
        "capacity": offer.capacity_type,
        "vcpus": offer.vcpus,
        "memory_gib": offer.memory_gib,
        "arch": offer.arch,
        "gpu_name": offer.gpu_name,
        "gpus": offer.gpus,
        "gpu_memory_gb": offer.gpu_memory_gb,
        "usd": offer.usd_per_hour,
    }


def test_500_random_requests_get_the_answer_of_plain_loops():
    """The same offer, number of nodes and price, or nothing where nothing fits."""
    rng = random.Random(4)
    answered = 0
    for _ in range(10):
        offers = some_offers(rng, 300)
        table, rows = table_of(offers), [row_of(offer) for offer in offers]
        for _ in range(50):
            want = some_request(rng)
            expected = exhaustive.cheapest(rows, want)

            got = search(Requirements(**want), table, how=Search(limit=3)).chosen

            assert (got and got.allocation.name) == (expected and expected[1])
            answered += got is not None
    assert 150 < answered < 450  # both kinds of request are among them


@pytest.mark.parametrize("strategy", ["cost", "balanced", "performance", "deadline"])
@pytest.mark.parametrize(
    ("budget", "deadline"),
    [(None, None), (30.0, None), (None, 9 * 3600.0), (20.0, 3e4), (None, 5200.0), (2.5, None)],
)
def test_all_candidates_are_ranked_as_the_planner_ranks_them(strategy, budget, deadline):
    """With speeds, overheads, interruptions, budget and deadline: the same list in the same order."""
    rng = random.Random(len(strategy))
    offers = [replace(offer, capacity_type="on-demand") for offer in some_offers(rng, 120)]
    offers += [
        replace(o, capacity_type="spot", usd_per_hour=o.usd_per_hour and o.usd_per_hour / 3) for o in offers
    ]
    offers = list({offer.name: offer for offer in offers}.values())
    rates = {"T4": 1.0, "V100": 2.5, "A100": 5.0, "H100": 11.0}

    def speed_of(kind, nodes):
        per_gpu = rates.get(kind.gpu_name)
        return per_gpu and Speed(per_gpu * kind.gpus * nodes**0.9, 0.2 * per_gpu, "fitted")

    overheads = Overheads(300, 60, 10, 600)
    goal = Goal(strategy, budget_usd=budget, deadline_s=deadline)
    need = Requirements(gpus=1, min_nodes=1, max_nodes=2)
    table = table_of(offers)
    kinds = {kind.instance_type: kind for kind in table.kinds}
    names = [f"{'' if n == 1 else f'{n} x '}{o.name}" for o in offers for n in (1, 2)]
    speeds = {
        name: speed
        for name in names
        if (speed := speed_of(kinds[name.split("/")[-2]], 2 if name.startswith("2 x") else 1)) is not None
    }
    spot = {o.name: ANY_RATE_PER_HOUR for o in offers if o.capacity_type == "spot"}
    whole = plan(
        need,
        offers,
        goal=goal,
        knowledge=Knowledge(200_000, "steps", speeds, overheads, spot, tariffs=tariffs()),
    )

    got = search(
        need,
        table,
        goal=goal,
        knowledge=Knowledge(200_000, overheads=overheads, tariffs=tariffs()),
        how=Search(speed_of=speed_of, limit=9),
    )

    assert whole.candidates
    assert got.candidates == whole.candidates[:9]
    assert got.value_of_hour_usd == whole.value_of_hour_usd


def test_the_scope_leaves_clouds_and_regions_out():
    """The A100 is only in gcp/us-central1."""
    need = Requirements(gpus=1, gpu_types=("A100",))

    assert search(need, SMALL, how=Search(Scope({"gcp"}))).pick().offer == A100_SPOT
    assert search(need, SMALL, how=Search(Scope({"aws", "azure"}))).chosen is None
    assert search(need, SMALL, how=Search(Scope(regions={"gcp": {"us-east1"}}))).chosen is None


def test_an_offer_to_avoid_is_passed_over_and_says_why():
    """Spot was refused a minute ago: on demand is chosen, and the rejected offer names the reason."""
    how = Search(avoid={A100_SPOT: "no capacity 60 s ago"}.get, explain=True)

    got = search(Requirements(gpus=1, gpu_types=("A100",)), SMALL, how=how)

    assert got.pick().offer == A100
    assert (A100_SPOT.name, "no capacity 60 s ago") in [(r.allocation.name, r.reason) for r in got.rejected]


def test_the_first_alternative_that_is_offered_is_taken_when_they_are_ordered():
    """A100 before T4, although T4 is cheaper."""
    needs = [Requirements(gpus=1, gpu_types=(name,)) for name in ("H100", "A100", "T4")]

    assert search(needs, SMALL, is_ordered=True).pick().offer == A100_SPOT
    assert search(needs, SMALL).pick().offer == T4


def test_nothing_fits_names_the_nearest_miss_of_each_need():
    """More memory, or another GPU."""
    got = search(Requirements(gpus=1, gpu_types=("T4",), memory_gib=64), SMALL)

    with pytest.raises(NoOfferError, match=r"g4dn.xlarge.*has 16 GiB, 64 asked.*has A100, T4 asked"):
        got.pick()


def test_an_empty_catalog_is_said():
    """An empty catalog is not the same as a stage that is too large."""
    with pytest.raises(NoOfferError, match="there is no offer at all"):
        search(Requirements(), table_of([])).pick()


def test_an_unknown_gpu_gets_a_hint():
    """H10 is not for sale, H100 is not here either."""
    notes = unknown_gpus([Requirements(gpus=1, gpu_types=("A1000",))], SMALL)

    assert notes == ["no offer has a GPU named A1000: did you mean A100?"]


def test_unknown_prices_come_last_and_never_count_as_free():
    """An offer without a price is not chosen before one that has a price."""
    unknown = replace(T4, region="eu-west-1", usd_per_hour=None)

    got = search(Requirements(gpus=1, gpu_types=("T4",)), table_of([unknown, T4]))

    assert [item.usd_per_hour for item in got.candidates] == [0.526, None]
    assert "price unknown for 1 of 2 candidates; they come last" in got.notes


def test_a_stage_without_checkpoints_is_not_put_on_spot():
    """Its duration may exceed the tolerated loss."""
    got = search(Requirements(gpus=1, gpu_types=("A100",), can_checkpoint=False), SMALL)

    assert got.pick().offer == A100


def test_a_table_gives_back_the_offers_that_it_was_made_of():
    """Every offer, and no other."""
    assert sorted(offer.name for offer in SMALL.offers()) == sorted(
        o.name for o in (T4, A100, A100_SPOT, CPU)
    )
    assert set(SMALL.offers()) == {T4, A100, A100_SPOT, CPU}
    assert isinstance(SMALL, OfferTable)


def test_attached_gpus_have_a_name_of_their_own():
    """The same host with and without a GPU are two offers."""
    host = Offer("gcp", "r", "n1-standard-8", "spot", 8, 30, "z", usd_per_hour=0.1)
    with_gpu = replace(host, gpu_name="V100", gpus=2, gpu_memory_gb=16, is_attached=True)

    assert with_gpu.name == "gcp/r/z/n1-standard-8+V100:2/spot"
    assert Offer.from_dict(with_gpu.to_dict()) == with_gpu
    assert "is_attached" not in host.to_dict()


def test_when_none_is_sure_the_most_likely_are_kept():
    """All may miss the deadline of 90 min; the likeliest to meet it come first, as in the planner."""
    means = [(10 + number / 2) / 7200 for number in range(8)]
    speeds = {f"t{number}": Speed(mean, 0.3 * mean) for number, mean in enumerate(means)}
    offers = [
        Offer("aws", "r", name, "on-demand", 4, 16, usd_per_hour=20.0 - number)
        for number, name in enumerate(speeds)
    ]
    goal, work = Goal("deadline", deadline_s=5400.0), Knowledge(10, "units")
    whole = plan(
        Requirements(),
        offers,
        goal=goal,
        knowledge=replace(work, speeds={o.name: speeds[o.instance_type] for o in offers}),
    )

    got = search(
        Requirements(),
        table_of(offers),
        goal=goal,
        knowledge=work,
        how=Search(speed_of=lambda kind, _: speeds[kind.instance_type], limit=2),
    )

    assert len(whole.candidates) > 4
    assert not any(item.is_safe for item in whole.candidates)
    assert got.candidates == whole.candidates[:2]


@pytest.mark.parametrize("seed", range(8))
def test_two_tables_joined_are_searched_as_one(seed):
    """Each offer may be in either table, also when both have offers of one type."""
    rng = random.Random(seed)
    first, second = some_offers(rng, 60), some_offers(rng, 20)
    both = list({offer.name: offer for offer in [*second, *first]}.values())
    rest = [offer for offer in second if offer.name not in {item.name for item in first}]
    table = joined(table_of(first, label="a"), table_of(rest, label="b"))
    need = Requirements(vcpus=4, gpus=rng.choice([0, 1, 2]), capacity=rng.choice(["auto", "spot"]))

    got, whole = search(need, table), search(need, table_of(both))

    assert got.candidates == whole.candidates
    assert sorted(offer.name for offer in table.offers()) == sorted(offer.name for offer in both)
    assert table.label == "a; b"
