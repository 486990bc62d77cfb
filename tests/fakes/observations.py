"""A training as a scaling policy sees it: ten hours left here, five on a machine twice as fast."""

from __future__ import annotations

from envscaler_airflow.planning import Allocation, Offer, Speed, Speedup
from envscaler_airflow.scaling import Observation, Policy


def local(vcpus: int, usd_per_hour: float | None) -> Allocation:
    """A share of one machine."""
    return Allocation(
        Offer(
            cloud="local",
            region="",
            instance_type=f"cpu-{vcpus}",
            capacity_type="on-demand",
            vcpus=vcpus,
            memory_gib=4,
            usd_per_hour=usd_per_hour,
        )
    )


SMALL, LARGE = local(1, 1.0), local(2, 1.5)
ONE_A_SECOND = Speed(1.0, 0.0, "measured", 60)
TWICE = Speedup(LARGE.name, SMALL.name, 2.0, 0.0)
# Ten hours left on the small one, five on the large one: $10 against $7.50.
SEEN = Observation(
    current=SMALL,
    candidates=(SMALL, LARGE),
    elapsed_s=600,
    units_done=0,
    units_total=36_000,
    speeds={SMALL.name: ONE_A_SECOND},
    speedups=(TWICE,),
)
NOW = Policy(stabilization_s=0)
