"""A fake cluster, backends on it, and what tests ask of an attempt."""

import time

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.planning.offers import Allocation, Offer

OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0)


def request_for(**changes):
    """A request for one small node; *changes* are fields."""
    fields = {
        "store_url": "file:///store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 1,
        "allocation": Allocation(OFFER),
        "command": ("train",),
        "secret_env": {"TOKEN": "canary"},
    }
    return AttemptRequest(**(fields | changes))


def ours(cluster, kind):
    """Objects of that kind that an attempt made."""
    found = cluster.list(kind, "default")
    return [one for one in found if (one["metadata"].get("labels") or {}).get(names.MANAGED_BY)]


def eventually(look, claim, *, seconds=20):
    """The first value of *look* of which *claim* holds."""
    until = time.monotonic() + seconds
    while not claim(value := look()):
        assert time.monotonic() < until, value
        time.sleep(0.02)
    return value


def running(backend, handle):
    """Wait until every node runs."""
    return eventually(
        lambda: backend.observe(handle), lambda status: all(n.state == "running" for n in status.nodes)
    )


def over(backend, handle):
    """How each node ended, once all did."""
    status = eventually(lambda: backend.observe(handle), lambda status: status.is_over)
    return [(node.state, node.reason) for node in status.nodes]


MIXED = Allocation(OFFER, nodes=3, rest=OFFER, rest_nodes=2)


def with_claim(**fields):
    """A spec with one claim."""
    volume = {"name": "d", "source": "pvc://data", "mount_path": "/data", "size": "1Gi", **fields}
    return {"volumes": [volume]}
