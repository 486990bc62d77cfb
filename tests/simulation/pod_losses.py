"""Pods beside that of node 0 that are lost once a checkpoint is complete: their successors resume from it."""

from __future__ import annotations

import re

from tests.simulation.cloud import SimCloud
from tests.simulation.kernel import World
from tests.simulation.store import Effect, SimStore

AFTER_S = (1.0, 60.0)
"""Time from the checkpoint to the loss, seconds. Chosen: before the next one."""
_MANIFEST = re.compile(r"(.+)/checkpoints/[^/]+/manifest-c\d+\.json\Z")


class PodLosses:
    """The fault ``lose-pod``, at each checkpoint of several nodes that the cloud recreates."""

    def __init__(self, world: World, store: SimStore, cloud: SimCloud) -> None:
        """Watch the changes of *store*."""
        self.world, self.cloud = world, cloud
        store.watchers.append(self._changed)

    def _changed(self, effect: Effect) -> None:
        found = _MANIFEST.match(effect.name) if effect.data is not None and self.cloud.replaces else None
        mine = self.cloud.by_machine.get(effect.machine.name)
        if found is None or mine is None:
            return
        beside = [machines[-1] for machines in mine.attempt.nodes[1:] if machines[-1].phase == "running"]
        if not beside or not self.world.strikes("lose-pod", mine.attempt.short):
            return
        stream = self.world.stream("pods")
        node = stream.choice(beside)
        self.cloud.later(stream.uniform(*AFTER_S), lambda: self.cloud.lose(node), f"pod of {node.name}")
