"""Unit tests of a machine's shares: offers, shortfalls and allocation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.machine import GIB, Gpu, Identity, Machine
from envscaler_airflow.backends.local.shares import (
    Claim,
    Slots,
    allocation_shortfalls,
    fit,
    nodes_that_fit,
    share_offers,
    shortfalls,
)
from envscaler_airflow.envspec.resources import Resources
from envscaler_airflow.errors import CapacityError
from envscaler_airflow.planning.offers import Allocation, Offer

MACHINE = Machine(cpus=(0, 1, 2, 3, 4, 5), memory_bytes=40 << 30, identity=Identity("here"))
GPUS = Machine(
    cpus=tuple(range(16)), memory_bytes=120 << 30, gpus=tuple(Gpu(i, "T4", 16.0) for i in range(4))
)


def offer_of(vcpus, memory_gib=4.0, **changes):
    """Return a share of *vcpus* CPUs."""
    return Offer("local", "", f"cpu-{vcpus}", "on-demand", vcpus=vcpus, memory_gib=memory_gib, **changes)


def test_offers_are_powers_of_two_and_the_whole():
    """Six CPUs with 40 GiB: 36 GiB are allocated, 6 GiB with each CPU."""
    offers = share_offers(MACHINE)

    assert [offer.name for offer in offers] == ["local/cpu-1", "local/cpu-2", "local/cpu-4", "local/cpu-6"]
    assert [offer.memory_gib for offer in offers] == [6.0, 12.0, 24.0, 36.0]


def test_prices_are_said_to_be_shadow_prices_and_are_in_proportion():
    """Six vCPUs and 40 GiB are nearest to m7i.2xlarge ($0.4032 for 8): $0.0504 a CPU."""
    offers = share_offers(MACHINE)

    assert offers[0].price_source == (
        "shadow price: aws m7i.2xlarge on-demand us-east-1, list price of 2026-07-20"
    )
    assert [offer.usd_per_hour for offer in offers] == pytest.approx([0.0504, 0.1008, 0.2016, 0.3024])


def test_a_price_of_one_s_own_stands_in_place_of_the_shadow():
    """Only for the share that it names, and the offer names it as the source."""
    offers = {offer.instance_type: offer for offer in share_offers(MACHINE, {"cpu-2": 0.5})}

    assert (offers["cpu-2"].usd_per_hour, offers["cpu-2"].price_source) == (0.5, "set in the configuration")
    assert offers["cpu-1"].price_source.startswith("shadow price")


def test_gpu_offers_share_the_machine_in_proportion():
    """Four T4 on 16 CPUs: a GPU comes with 4 CPUs and a quarter of the memory."""
    offers = [offer for offer in share_offers(GPUS) if offer.gpus]

    assert [(o.name, o.gpus, o.vcpus, o.memory_gib) for o in offers] == [
        ("local/gpu-1", 1, 4.0, 27.0),
        ("local/gpu-2", 2, 8.0, 54.0),
        ("local/gpu-4", 4, 16.0, 108.0),
    ]
    assert offers[0].gpu_name == "T4"
    assert offers[0].usd_per_hour == pytest.approx(3.912 / 4)  # g4dn.12xlarge has four


def test_an_unpriced_gpu_has_no_price_and_says_why():
    """Unknown, never 0."""
    machine = Machine(cpus=(0, 1), memory_bytes=8 << 30, gpus=(Gpu(0, "RTX4090", 24.0),))

    [offer] = [offer for offer in share_offers(machine) if offer.gpus]

    assert offer.usd_per_hour is None
    assert offer.price_source == "no published type has this GPU"


@pytest.mark.parametrize(
    ("resources", "missing"),
    [
        ({"requests": {"cpu": "6", "memory": "36Gi"}}, []),
        ({"requests": {"cpu": "6500m"}}, ["cpu: 6.5 asked, this machine has 6"]),
        ({"requests": {"memory": "37Gi"}}, ["memory: 37Gi asked, this machine can give 36Gi"]),
        ({"requests": {"gpu": {"count": 1, "type": []}}}, ["gpu: 1 of any type asked, this machine has 0"]),
        ({"requests": {"gpu": {"count": 1, "type": ["A100", "H100"]}}, "cpu_fallback": True}, []),
        ({"any_of": [{"requests": {"gpu": {"count": 1}}}, {"requests": {"cpu": "2"}}]}, []),
        (
            {"any_of": [{"requests": {"cpu": "9", "memory": "99Gi"}}, {"requests": {"cpu": "8"}}]},
            ["cpu: 8 asked, this machine has 6"],
        ),
        ({}, []),
    ],
)
def test_shortfalls_say_what_is_missing(resources, missing):
    """Each with the required and the available amount; of alternatives the nearest."""
    assert shortfalls(Resources.model_validate(resources), MACHINE) == missing


@pytest.mark.parametrize(
    ("gpu", "missing"),
    [
        ({"count": 4, "type": ["T4"]}, []),
        ({"count": 5, "type": ["T4"]}, ["gpu: 5 of T4 asked, this machine has 4"]),
        ({"count": 1, "type": ["L4"]}, ["gpu: 1 of L4 asked, this machine has 0"]),
        ({"count": 1, "type": [], "memory": "16GB"}, []),
        ({"count": 1, "memory": "24GB"}, ["gpu: 1 of any type with 24 GB asked, this machine has 0"]),
    ],
)
def test_shortfalls_of_gpus(gpu, missing):
    """Count, type and memory of GPUs."""
    assert shortfalls(Resources.model_validate({"requests": {"gpu": gpu}}), GPUS) == missing


def test_nodes_together_must_fit_the_machine():
    """Three nodes of two CPUs do, four do not; a shared offer is not counted."""
    offer = offer_of(2.0)
    shared = Offer("local", "", "cpu-2-shared", "on-demand", vcpus=2.0, memory_gib=4.0)

    assert allocation_shortfalls(Allocation(offer, 3), MACHINE) == []
    assert allocation_shortfalls(Allocation(offer, 4), MACHINE) == ["cpu: 8 asked, this machine has 6"]
    assert allocation_shortfalls(Allocation(shared, 4), MACHINE) == []


def test_a_slice_gets_the_cpus_that_nobody_has():
    """CPUs 0 and 1 are taken: the next two are 2 and 3."""
    taken = [Claim("other", 0, 2.0, 0, cpus=(0, 1))]

    claim = fit("mine", 0, Allocation(offer_of(2.0)), machine=MACHINE, taken=taken)

    assert claim.cpus == (2, 3)
    assert claim.memory_bytes == 4 * GIB


def test_gpus_are_given_out_once():
    """Two of four are taken: the next two, then none."""
    offer = offer_of(4.0, gpu_name="T4", gpus=2)
    first = fit("a", 0, Allocation(offer), machine=GPUS, taken=[])
    second = fit("b", 0, Allocation(offer), machine=GPUS, taken=[first])

    assert (first.gpus, second.gpus) == ((0, 1), (2, 3))
    with pytest.raises(CapacityError, match="0 GPUs"):
        fit("c", 0, Allocation(offer), machine=GPUS, taken=[first, second])


def test_what_is_full_says_who_has_it():
    """The message names the need, the rest and the runs that use it (F6)."""
    taken = [
        Claim("shell-a-g1-a1", 1, 3.0, 20 << 30, cpus=(0, 1, 2), run="d/shell/hog/train/-1"),
        Claim("dag-train-g1-a1", 0, 2.0, 10 << 30, cpus=(3, 4)),
    ]
    users = r"in use by shell/hog/train \(node 1\), dag-train-g1-a1 \(node 0\)"

    with pytest.raises(CapacityError, match=rf"needs 2 CPUs.*free are 1 CPUs, 6 GiB.*{users}"):
        fit("mine", 0, Allocation(offer_of(2.0)), machine=MACHINE, taken=taken)


def test_a_shared_slice_is_neither_counted_nor_pinned():
    """It fits on a full machine, and a full machine fits beside it."""
    full = Claim("other", 0, 6.0, 36 << 30, cpus=MACHINE.cpus)
    shared = Offer("local", "", "cpu-2-shared", "on-demand", vcpus=2.0, memory_gib=4.0)

    claim = fit("mine", 0, Allocation(shared), machine=MACHINE, taken=[full])

    assert (claim.vcpus, claim.cpus) == (0.0, ())
    assert fit("next", 0, Allocation(offer_of(6.0)), machine=MACHINE, taken=[claim]).cpus == MACHINE.cpus


@given(sizes=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 6.0]), max_size=12))
def test_slices_never_add_up_to_more_than_the_machine(sizes):
    """For every sequence of requests."""
    taken = []
    for index, size in enumerate(sizes):
        try:
            claim = fit(f"a{index}", 0, Allocation(offer_of(size)), machine=MACHINE, taken=taken)
        except CapacityError:
            continue
        taken.append(claim)

    assert sum(claim.vcpus for claim in taken) <= 6
    assert sum(claim.memory_bytes for claim in taken) <= MACHINE.usable_memory_bytes
    whole = [claim for claim in taken if claim.vcpus >= 1]
    if len(whole) == len(taken):
        pinned = [cpu for claim in taken for cpu in claim.cpus]
        assert len(pinned) == len(set(pinned))


def held_node(root, attempt):
    """Lock the lock file of node 0 of *attempt*, as a live node does."""
    folder = files.node_folder(root / attempt, 0)
    folder.mkdir(parents=True)
    return files.try_lock(folder / files.LOCK)


def test_a_claim_lives_as_long_as_its_lock(tmp_path):
    """Two of six CPUs are free beside a live claim of four; all six once its lock is gone."""
    import os

    dead = []
    slots = Slots(tmp_path, MACHINE, on_dead=dead.append)
    first = held_node(tmp_path, "first")
    slots.claim("first", Allocation(offer_of(4.0)), [0])
    second = held_node(tmp_path, "second")
    with pytest.raises(CapacityError):
        slots.claim("second", Allocation(offer_of(6.0)), [0])

    os.close(first)

    assert slots.claim("second", Allocation(offer_of(6.0)), [0])[0].cpus == MACHINE.cpus
    assert [claim.attempt for claim in dead] == ["first"]
    assert [claim.attempt for claim in slots.live()] == ["second"]
    os.close(second)


def test_nodes_get_their_slices_together_or_not_at_all(tmp_path):
    """Two nodes of four CPUs on six: neither is claimed."""
    slots = Slots(tmp_path, MACHINE)

    with pytest.raises(CapacityError):
        slots.claim("mine", Allocation(offer_of(4.0), 2), [0, 1])

    assert slots.live() == []
    assert files.read_json(tmp_path / "slots-here.json") is None


@pytest.mark.parametrize(("taken", "free"), [([], 4), ([1], 3), ([2, 1], 1), ([4], 0)])
def test_room_is_what_fits_beside_what_is_taken(taken, free):
    """Nodes of one CPU on a machine of four (F10)."""
    machine = Machine(cpus=(0, 1, 2, 3), memory_bytes=64 << 30)
    claims = [Claim("x", node, float(cpus), 1 << 30) for node, cpus in enumerate(taken)]

    assert nodes_that_fit(share_offers(machine)[0], machine=machine, taken=claims) == free
