"""The owner replaces a node that the backend misses once its status in the store is as old."""

import pytest

from envscaler_airflow.backends.base import SILENT, AttemptStatus, NodeStatus
from envscaler_airflow.errors import SpecError
from envscaler_airflow.owner.foreground import POLL_S
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ScriptedBackend


class Mending(ScriptedBackend):
    """A backend that replaces lost nodes and records the ages that it got."""

    def __init__(self, *offers, **options):
        """Start with nothing recorded."""
        super().__init__(*offers, **options)
        self.quiet = []

    def replace_nodes(self, handle, *, quiet_s):
        """Record the ages and start another pod."""
        self.quiet.append(dict(quiet_s))
        return ("pod",)

    def observe(self, handle):
        """Report another pod once the node was replaced."""
        seen = super().observe(handle)
        return AttemptStatus((NodeStatus(0, "running"),)) if self.quiet else seen


@pytest.fixture
def silent(new_world):
    """A run whose node no longer reports to the cluster, and its owner."""
    world = new_world(backend=Mending)
    owner = world.owner()
    waiting = owner.enter()
    world.say()
    world.backend.set_state(world.handle, "lost", reason=SILENT, detail="node-0 does not answer")
    return world, owner, waiting


def looked(world, watch, seconds, *, speaks):
    """Return the first wake within *seconds*; None when nothing happened."""
    for count in range(int(seconds / POLL_S)):
        if speaks and count % 8 == 0:
            world.say(step=10 + count)
        wake = watch.poll()
        if wake is not None:
            return wake
        world.clock.advance(POLL_S)
    return None


def test_a_node_that_reports_to_the_store_is_not_given_up(silent):
    """Its kubelet is down for ten minutes, its containers keep training: one pod, not two (D1)."""
    world, owner, waiting = silent

    assert looked(world, world.watch(waiting), 600, speaks=True) is None

    owner.resume(Wake("status"))
    assert world.backend.quiet == []
    assert world.state.live.phase == "started"


def test_a_node_that_the_store_does_not_hear_either_is_replaced(silent):
    """Three minutes without a new status: the owner passes the ages to the backend (D1)."""
    world, owner, waiting = silent

    wake = looked(world, world.watch(waiting), 600, speaks=False)
    owner.resume(Wake.from_dict(wake.to_dict()))

    assert wake.detail == "the attempt ended"
    [ages] = world.backend.quiet
    assert 180 <= ages[0] < 190
    assert world.state.live.phase == "started"


def test_the_next_watcher_goes_on_from_the_age_in_the_lease(silent):
    """A triggerer that was restarted had counted two minutes (D1)."""
    world, _, waiting = silent
    first = world.watch(waiting)
    assert looked(world, first, 120, speaks=False) is None
    Run(world.store, world.prefix).lease.renew(holder="t", ages=first.ages())

    second = world.watch(waiting)

    assert looked(world, second, 55, speaks=False) is None
    assert looked(world, second, 20, speaks=False).quiet_s[0] >= 180


def test_time_without_the_store_is_no_age(silent, monkeypatch):
    """The watcher was cut off for ten minutes, so nothing is known of the node (D1)."""
    world, _, waiting = silent
    watch = world.watch(waiting)
    assert looked(world, watch, 30, speaks=True) is None
    with monkeypatch.context() as patch:
        patch.setattr(watch, "_run", None)
        with pytest.raises(AttributeError):
            watch.poll()
        world.clock.advance(600)
        with pytest.raises(AttributeError):
            watch.poll()

    assert watch.poll() is None


def test_a_pod_that_is_gone_is_lost_at_once(world):
    """Deleted by force, or evicted: the backend knows, and needs no age (D1)."""
    waiting = world.owner().enter()
    world.say()
    world.backend.set_state(world.handle, "lost", reason="lost")

    assert world.watch(waiting).poll().detail == "the attempt ended"


def test_a_store_without_exclusive_create_takes_no_nodes_that_are_replaced(new_world):
    """Two pods could each believe that they claimed the node (D1)."""
    world = new_world(backend=Mending)
    world.store.create_is_atomic = False

    with pytest.raises(SpecError, match="two writers can both create one name there"):
        world.owner().enter()

    assert world.state.attempts == ()


def test_one_node_that_nothing_replaces_needs_no_exclusive_create(world):
    """The local backend on a store without exclusive create: as before (D1)."""
    world.store.create_is_atomic = False

    world.owner().enter()

    assert world.state.live.phase == "started"
