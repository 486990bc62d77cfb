"""Unit tests of the packaged prices and of shadow prices."""

import pytest

from envscaler_airflow.catalog.accelerators import canonical_gpu
from envscaler_airflow.catalog.packaged import PRICES_AS_OF, listed_offers, scaled_price, shadow_offer


def test_every_packaged_row_has_a_published_price_and_its_date():
    """No row is free, unknown or without a source."""
    offers = listed_offers()

    assert len(offers) == 81
    assert len({offer.name for offer in offers}) == len(offers)
    for offer in offers:
        assert offer.usd_per_hour is not None
        assert offer.usd_per_hour > 0
        assert offer.price_source == f"list price of {PRICES_AS_OF}"
        assert offer.capacity_type == "on-demand"


def test_a_laptop_is_priced_as_the_nearest_type():
    """Two vCPUs with 5 GiB are nearer to 4 GiB (c7i.large, $0.08925) than to 8 GiB (m7i.large)."""
    shadow = shadow_offer(2, 5)

    assert shadow is not None
    assert shadow.instance_type == "c7i.large"
    assert shadow.usd_per_hour == 0.08925


def test_a_machine_of_arm_is_not_priced_as_one_of_x86():
    """The same size on arm64 is a c7g.large."""
    shadow = shadow_offer(2, 4, arch="arm64")

    assert shadow is not None
    assert shadow.instance_type == "c7g.large"


def test_a_gpu_machine_takes_the_number_of_gpus_before_the_size():
    """The H200 is only sold in groups of eight; its share costs an eighth of $63.296."""
    shadow = shadow_offer(16, 128, gpu_name="H200", gpus=1)

    assert shadow is not None
    assert shadow.instance_type == "p5en.48xlarge"
    assert scaled_price(shadow, vcpus=16, gpus=1) == pytest.approx(7.912)


def test_one_gpu_of_many_sizes_takes_the_nearest_size():
    """A T4 with 8 vCPUs and 32 GiB is a g4dn.2xlarge."""
    shadow = shadow_offer(8, 32, gpu_name="T4", gpus=1)

    assert shadow is not None
    assert shadow.instance_type == "g4dn.2xlarge"


def test_a_gpu_without_a_published_price_has_no_shadow():
    """An unknown price stays unknown; it never becomes free."""
    assert shadow_offer(8, 32, gpu_name="RTX4090", gpus=1) is None


def test_half_of_the_vcpus_cost_half():
    """One vCPU of c7i.large at $0.08925 for two costs $0.044625."""
    shadow = shadow_offer(2, 4)

    assert shadow is not None
    assert scaled_price(shadow, vcpus=1) == pytest.approx(0.044625)


@pytest.mark.parametrize(
    ("said", "memory_gb", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", None, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 42.9, "A100"),
        ("NVIDIA A100-PCIE", 85.0, "A100-80GB"),
        ("Tesla T4", 16.1, "T4"),
        ("Tesla V100-SXM2-16GB", 17.2, "V100"),
        ("Tesla V100-SXM2-32GB", 34.4, "V100-32GB"),
        ("NVIDIA H200", 150.0, "H200"),
        ("NVIDIA H100 80GB HBM3", 85.0, "H100"),
        ("NVIDIA A10G", 24.1, "A10G"),
        ("NVIDIA GeForce RTX 4090", 24.1, "RTX4090"),
    ],
)
def test_names_of_drivers_become_names_of_the_tables(said, memory_gb, name):
    """NVML's name is looked up by the name that the price tables use."""
    assert canonical_gpu(said, memory_gb) == name
