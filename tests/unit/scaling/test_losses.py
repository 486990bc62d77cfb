"""Expected losses of an allocation, by its number of spot nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed
from envscaler_airflow.scaling import Observation, Policy, decide

NODE = Offer(
    cloud="aws",
    region="us-east-1",
    instance_type="cpu-1",
    capacity_type="on-demand",
    vcpus=1,
    memory_gib=4,
    usd_per_hour=1.0,
)
ONE_A_SECOND = Speed(1.0, 0.0, "measured", 60)


def test_every_spot_node_may_be_lost_those_of_a_mixed_allocation_too():
    """Losses of one node per hour, times the spot nodes: four of four, or three beside one on demand."""
    spot = replace(NODE, capacity_type="spot", usd_per_hour=0.3)
    four, mixed = Allocation(spot, 4), Allocation(NODE, 4, rest=spot, rest_nodes=3)

    def interruption_s(current: Allocation, rate: float) -> float:
        seen = Observation(
            current=current,
            units_done=0,
            units_total=36_000,
            speeds={current.name: ONE_A_SECOND},
            overheads=Overheads(start_s=60, checkpoint_s=1, checkpoint_every_s=600),
            interruptions_per_hour={spot.name: rate},
        )
        return float(
            decide(seen, Policy(stabilization_s=0, max_nodes=4)).numbers["staying"]["interruption_s"]
        )

    one = Allocation(spot)
    assert interruption_s(four, 0.1) == interruption_s(one, 0.4) > interruption_s(one, 0.1) > 0
    assert interruption_s(mixed, 0.1) == pytest.approx(interruption_s(one, 0.3))
