"""Machines that stand still at the worst moment: about to complete, to choose or to delete checkpoints.

A machine that does not answer is replaced: a later attempt is intended, or another pod claims its node. While
that is carried out, at one of the next requests to the store, the frozen machine goes on.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tests.simulation.cloud import Node, SimCloud
from tests.simulation.kernel import World
from tests.simulation.store import Effect, SimClient, SimStore

MOST_S = 4 * 3600.0
"""Longest time that a machine stands still, seconds. Chosen: the owner replaces it long before."""
REQUESTS = 24
"""Requests after the intent, or the claim, within which it goes on. Chosen: an owner fences, lists and starts
an attempt within these."""
SLOW_S = 5.0
"""Longest answer to the request at which it goes on, seconds. Chosen: time for some requests of its own."""
REACHED_S = (20.0, 300.0)
"""When the cloud reaches it again after that, seconds. Chosen: a kubelet's next answers."""
MOST = 4
"""Machines of one world that freeze. Chosen: a run still gets on."""
_MANIFEST = re.compile(r"write .+/checkpoints/[^/]+/manifest-c\d+\.json\Z")
_FENCE = re.compile(r"(?:list .+/control|delete .+/manifest-c\d+\.json)\Z")
_NEXT = re.compile(r"(.+)/(?:events/\d{6}|claims/g(\d+)-a(\d+)-n(\d+)-\d{6})\.json\Z")


@dataclass
class _Frozen:
    """One machine that stands still: since when, and at which request of others it goes on."""

    node: Node
    since: float
    requests: int | None = None


class Freezer:
    """Freezes machines of sidecars, as the faults ``freeze`` and ``freeze-save``."""

    def __init__(self, world: World, store: SimStore, cloud: SimCloud) -> None:
        """Watch the requests to *store*."""
        self.world, self.cloud = world, cloud
        self._frozen: list[_Frozen] = []
        self._left = MOST
        store.askers.append(self._asked)
        store.watchers.append(self._changed)

    def end_faults(self) -> None:
        """Let every machine go on."""
        for one in list(self._frozen):
            self._go_on(one)

    def _asked(self, client: SimClient, what: str, name: str) -> None:
        """Freeze the machine that asks, or let another one go on meanwhile."""
        node, actor = self.cloud.by_machine.get(client.machine.name), self.world.current
        for one in [one for one in self._frozen if one.requests is not None]:
            if one.node is not node and name.startswith(one.node.attempt.request.run_prefix):
                assert one.requests is not None
                one.requests -= 1
                if one.requests < 0:
                    self._go_on(one)
                    self.world.sleep(self.world.stream("freeze").uniform(0.0, SLOW_S))
        if node is not None and actor is not None and actor.name.endswith("/heavy"):
            self._freeze_before(node, f"{what} {name}")

    def _freeze_before(self, node: Node, request: str) -> None:
        kind = "freeze-save" if _MANIFEST.match(request) else "freeze" if _FENCE.match(request) else ""
        is_free = kind and self._left and not node.is_over and not self.cloud.is_silent(node)
        if is_free and self.world.strikes(kind, f"before {request}"):
            self._left -= 1
            one = _Frozen(node, self.world.now)
            self._frozen.append(one)
            self.cloud.silence(node, MOST_S)
            self.world.halt(node.machine)
            self.cloud.later(MOST_S, lambda: self._go_on(one), f"end of the freeze of {node.name}")
            self.world.sleep(0.0)

    def _changed(self, effect: Effect) -> None:
        """Choose when each frozen machine of the run goes on, once another one is to take its place."""
        found = _NEXT.match(effect.name) if effect.data is not None and self._frozen else None
        if found is None:
            return
        claimed = None if found[2] is None else tuple(map(int, found.groups()[1:]))
        if claimed is None and json.loads(effect.data or b"")["type"] != "attempt-intended":
            return
        for one in self._frozen:
            request = one.node.attempt.request
            mine = (request.generation, request.attempt, one.node.node)
            if request.run_prefix == found[1] and claimed in (None, mine) and one.requests is None:
                one.requests = self.world.stream("freeze").randrange(REQUESTS)

    def _go_on(self, one: _Frozen) -> None:
        if one not in self._frozen:
            return
        self._frozen.remove(one)
        node = one.node
        node.frozen_s += self.world.now - one.since
        self.world.note(f"{node.name} goes on", who="cloud")
        self.world.go_on(node.machine)
        self.cloud.reach(node, after_s=self.world.stream("freeze").uniform(*REACHED_S))
