"""A fake cluster, backends on it, and questions that tests ask about an attempt."""

import time

import attempts

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Stage, Waiting, Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store

OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0)

KEY = RunKey("deployment", "dag", "run", "train")


class Stagehand:
    """One stage on the cluster, whose owner the test calls itself."""

    def __init__(self, folder, backend, *, budget_usd=None, **spec):
        """Start nothing yet."""
        body = {
            "version": "v1",
            "name": "train",
            "entrypoint": ["python", "train.py"],
            "resources": {"requests": {"cpu": "1", "memory": "64Mi"}},
            **spec,
        }
        self.backend = backend
        self.store = open_store(f"file://{folder}/store")
        check_store(self.store)
        self.log = Run(self.store, KEY).events
        self.owner = Owner(
            run=Run(self.store, KEY),
            backend=backend,
            actor=Actor("ti", 1, 3),
            stage=Stage(EnvSpec.from_dict(body), "train.yaml", value_of_hour=0.0, budget_usd=budget_usd),
        )

    def begin(self):
        """Start it, and wait until all nodes of the first attempt run."""
        self.owner.enter()
        running(self.backend, self.handle)

    @property
    def state(self):
        """State folded from its events."""
        return self.log.load()

    @property
    def handle(self):
        """Handle of the newest attempt."""
        return self.state.attempts[-1].handle

    def node(self):
        """The backend's status of node 0."""
        return self.backend.observe(self.handle).nodes[0]

    def goes_on(self, claim, *, reason="backoff", seconds=30):
        """Call the owner until *claim* is true of the state, as its trigger does on a change."""

        def call():
            got = self.owner.resume(Wake(reason))
            assert isinstance(got, Waiting)
            return self.state

        return eventually(call, claim, seconds=seconds)


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
    return attempts.request(**(fields | changes))


def ours(cluster, kind):
    """Objects of that kind that belong to an attempt."""
    found = cluster.list(kind, "default")
    return [one for one in found if (one["metadata"].get("labels") or {}).get(names.MANAGED_BY)]


def eventually(look, claim, *, seconds=20):
    """The first value of *look* for which *claim* is true."""
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
    """How each node ended, once all have ended."""
    status = eventually(lambda: backend.observe(handle), lambda status: status.is_over)
    return [(node.state, node.reason) for node in status.nodes]


MIXED = Allocation(OFFER, nodes=3, rest=OFFER, rest_nodes=2)


def with_claim(**fields):
    """A spec with one claim."""
    volume = {"name": "d", "source": "pvc://data", "mount_path": "/data", "size": "1Gi", **fields}
    return {"volumes": [volume]}
