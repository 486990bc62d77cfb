"""Deadline tables that another process wrote: bounded in size and checked; a bad one is ignored."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
import zlib
from array import array
from dataclasses import replace

import pytest

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.owner import policies
from envscaler_airflow.planning import Allocation, Offer, Speed
from envscaler_airflow.scaling import Observation, Policy
from envscaler_airflow.scaling.deadline import SpotJob, Table
from envscaler_airflow.scaling.deadline.cost_table import _ROW
from envscaler_airflow.store.run import Run

JOB = SpotJob(ticks=10, gap_s=600.0, work_s=0.0, overhead_s=60.0, on_demand_usd=3.0, spot_usd=1.0)


def packed(ticks, slack, regimes, costs):
    """Return a table file of these values, which may be invalid."""
    head = struct.pack("<III", len(ticks), len(slack), regimes)
    knots = struct.pack(f"<{len(ticks)}I{len(slack)}d", *ticks, *slack)
    return zlib.compress(head + knots + array("f", costs).tobytes())


def costs(count, value=1.0):
    """Return costs for *count* pairs of knots and one regime."""
    return [value] * (count * _ROW)


GOOD = packed((1, 10), (0.0, 600.0), 1, costs(4))
DEMAND = Offer("scripted", "", "gpu-1", "on-demand", vcpus=8, memory_gib=32, usd_per_hour=3.0)
ON_DEMAND, SPOT = Allocation(DEMAND), Allocation(replace(DEMAND, capacity_type="spot", usd_per_hour=1.0))


def is_decided_by(world, name):
    """Return whether a check on demand, with hours to spare, uses the table of that name."""
    seen = Observation(
        ON_DEMAND,
        (SPOT,),
        units_done=0.0,
        units_total=3600.0,
        speeds={ON_DEMAND.name: Speed(1.0, 0.0, "measured", 3600.0)},
        deadline_left_s=36_000.0,
        deadline_table=name,
    )
    policy = policies.policies_of(Run(world.store, world.prefix))["deadline"]
    return "ticks_of_on_demand" in policy.propose(seen, Policy("deadline")).numbers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"torn",
        GOOD[:-3],
        packed((), (), 0, []),
        packed((1,), (0.0,), 1, costs(1)),
        packed((1, 1), (0.0, 600.0), 1, costs(4)),
        packed((10, 1), (0.0, 600.0), 1, costs(4)),
        packed((1, 10), (0.0, float("nan")), 1, costs(4)),
        packed((1, 10), (0.0, float("inf")), 1, costs(4)),
        packed((1, 10), (0.0, 600.0), 0, []),
        packed((1, 10), (0.0, 600.0), 1, costs(4, float("nan"))),
        packed((1, 10), (0.0, 600.0), 1, costs(3)),
        zlib.compress(struct.pack("<III", 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    ],
    ids=range(13),
)
def test_what_is_no_table_is_none(world, data):
    """Torn, empty, not rising, NaN, or of sizes that cannot be stored."""
    name = f"tables/deadline-{hashlib.sha256(data).hexdigest()[:16]}.bin"
    world.store.write(f"{world.prefix}/{name}", data)

    assert is_decided_by(world, name) is False


def test_a_table_that_unpacks_without_end_takes_no_memory(monkeypatch):
    """A megabyte in the store would unpack to a gigabyte."""
    monkeypatch.setattr("envscaler_airflow.scaling.deadline.cost_table.MAX_UNPACKED", 1 << 20)
    bomb = zlib.compress(bytes(1 << 26), 9)
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        Table.from_bytes(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1 << 23


def test_a_table_under_another_s_name_is_none(world):
    """The name is the hash: a changed table is not used."""
    name = "tables/deadline-0123456789abcdef.bin"
    world.store.write(f"{world.prefix}/{name}", GOOD)

    assert is_decided_by(world, name) is False


@pytest.mark.parametrize("name", ["../../x", "tables/deadline-x.bin", "x" * 3000, "", "/etc/passwd"])
def test_the_file_that_names_the_table_names_nothing_else(world, name):
    """Neither a path nor an endless text gets into every recorded check."""
    body = {"schema": SCHEMA, "table": name, "job": JOB.to_dict()}
    world.store.write(f"{world.prefix}/tables/deadline.json", json.dumps(body).encode())

    assert policies.present_table(Run(world.store, world.prefix), "deadline") == (None, None)


def test_the_good_one_is_read(world):
    """The valid table that the invalid ones above are compared with."""
    name = f"tables/deadline-{hashlib.sha256(GOOD).hexdigest()[:16]}.bin"
    world.store.write(f"{world.prefix}/{name}", GOOD)

    assert is_decided_by(world, name)
