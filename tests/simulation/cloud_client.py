"""The backend of the simulated cloud: what a process can request, with lost, late and stale answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import (
    QUIET_S,
    SILENT,
    AttemptRequest,
    AttemptStatus,
    Backend,
    Leftover,
    ListsLeftovers,
    ReplacesNodes,
)
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Handle, NodeStatus
from envscaler_airflow.run.cost import UsageInterval
from tests.simulation.cloud import NAME, Attempt, SimCloud
from tests.simulation.kernel import Machine


class SimBackend:
    """The cloud as one process sees it: :class:`~envscaler_airflow.backends.base.Backend`."""

    name = NAME

    def __init__(self, cloud: SimCloud, machine: Machine) -> None:
        """See *cloud* from *machine*."""
        self.cloud = cloud
        self.machine = machine
        self._shown: dict[str, tuple[float, AttemptStatus]] = {}

    def offers(self) -> tuple[Offer, ...]:
        """See :meth:`Backend.offers`."""
        self._ask("offers")
        return self.cloud.offers

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """See :meth:`Backend.render`."""
        return {"name": _name(request)}

    def submit(self, request: AttemptRequest) -> Handle:
        """See :meth:`Backend.submit`."""
        name = _name(request)
        self._ask(f"submit {name}")
        cloud, world = self.cloud, self.cloud.world
        if world.strikes("cloud-late", f"submit {name}"):
            after_s = world.stream("cloud-late").uniform(1.0, 90.0)
            cloud.later(after_s, lambda: name in cloud.attempts or cloud.start(request, name), f"late {name}")
            raise BackendError(f"submit {name}: no answer in time", transient=True)
        attempt = cloud.attempts.get(name)
        if attempt is None:
            for part in request.allocation.parts:
                if world.strikes("sold-out", part.offer.name):
                    cloud.sell_out(part.offer)
                if cloud.is_dry(part.offer) and world.stream("fates").random() < 0.5:
                    raise CapacityError(f"{part.offer.name}: InsufficientInstanceCapacity")
            attempt = cloud.start(request, name)
        if attempt.is_released:
            raise BackendError(f"{name}: this attempt has ended and was released")
        self._answer(f"submit {name}")
        return attempt.handle

    def find(self, request: AttemptRequest) -> Handle | None:
        """See :meth:`Backend.find`."""
        self._ask(f"find {_name(request)}")
        found = self.cloud.attempts.get(_name(request))
        return None if found is None or found.is_released else found.handle

    def observe(self, handle: Handle) -> AttemptStatus:
        """See :meth:`Backend.observe`."""
        self._ask(f"observe {handle.name}")
        cloud, world = self.cloud, self.cloud.world
        at, shown = self._shown.get(handle.name, (-math.inf, None))
        if shown is not None and world.now - at < 60.0 and world.strikes("cloud-stale", handle.name):
            return shown
        attempt = self._attempt(handle)
        if attempt.is_released:
            nodes = range(len(attempt.nodes))
            return AttemptStatus(tuple(NodeStatus(node, "lost", reason="killed") for node in nodes))
        if world.strikes("cloud-unknown", handle.name):
            return AttemptStatus(tuple(NodeStatus(node, "unknown") for node in range(len(attempt.nodes))))
        status = AttemptStatus(tuple(cloud.seen(machines[-1]) for machines in attempt.nodes))
        self._shown[handle.name] = (world.now, status)
        return status

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """See :meth:`Backend.stop`."""
        self._ask(f"stop {handle.name}")
        attempt = self.cloud.attempts.get(handle.name)
        if attempt is not None:
            self.cloud.stop(attempt, grace_s)
        self._answer(f"stop {handle.name}")

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """See :meth:`Backend.usage`."""
        self._ask(f"usage {handle.name}")
        found = (self.cloud.interval(node) for node in self._attempt(handle).all_nodes)
        return tuple(one for one in found if one is not None)

    def release(self, handle: Handle) -> None:
        """See :meth:`Backend.release`."""
        self._ask(f"release {handle.name}")
        attempt, world = self._attempt(handle), self.cloud.world
        if world.strikes("release-refuse", handle.name):
            attempt.refused_at = world.now
            is_transient = world.stream("release").random() < 0.5
            raise BackendError(f"release {handle.name}: refused", transient=is_transient)
        self.cloud.release(attempt)
        self._answer(f"release {handle.name}")

    def leftovers(self, store_url: str) -> Iterator[Leftover]:
        """See :meth:`ListsLeftovers.leftovers`."""
        self._ask("leftovers")
        for attempt in list(self.cloud.attempts.values()):
            request = attempt.request
            if attempt.is_released or request.store_url != store_url:
                continue
            yield Leftover(
                attempt.handle,
                request.run_prefix,
                request.generation,
                request.attempt,
                self.cloud.world.now - attempt.made_at,
                not attempt.is_over,
            )

    def remove(self, handle: Handle) -> None:
        """See :meth:`ListsLeftovers.remove`."""
        self._ask(f"remove {handle.name}")
        self.cloud.remove(self._attempt(handle))
        self._answer(f"remove {handle.name}")

    def _attempt(self, handle: Handle) -> Attempt:
        found = self.cloud.attempts.get(handle.name)
        if found is None:
            raise BackendError(f"{handle.name}: was never started here")
        return found

    def _ask(self, what: str) -> None:
        world = self.cloud.world
        world.point(what)
        if world.strikes("cloud-slow", what):
            world.sleep(world.stream("cloud-slow").uniform(1.0, 90.0))
        if world.strikes("cloud-away", what):
            lasts = 30.0 * 240.0 ** world.stream("cloud-away").random()
            self.cloud.away.append((world.now, world.now + lasts))
            world.note(f"the cloud does not answer for {lasts:.0f} s")
        if self.cloud.was_away(world.now) or world.strikes("cloud-refuse", what):
            raise BackendError(f"{what}: no answer", transient=True)

    def _answer(self, what: str) -> None:
        self.cloud.world.point(f"answer to {what}")
        if self.cloud.world.strikes("cloud-lost-answer", what):
            raise BackendError(f"{what}: no answer", transient=True)


class ReplacingBackend(SimBackend):
    """The same, for a cloud that recreates lost nodes."""

    def replace_nodes(self, handle: Handle, *, quiet_s: Mapping[int, float]) -> tuple[str, ...]:
        """See :meth:`ReplacesNodes.replace_nodes`."""
        self._ask(f"replace nodes of {handle.name}")
        found = []
        for machines in self._attempt(handle).nodes:
            node, status = machines[-1], self.cloud.seen(machines[-1])
            is_silent = status.state == "lost" and status.reason == SILENT
            if is_silent and quiet_s.get(node.node, 0.0) >= QUIET_S:
                self.cloud.give_up(node)
                found.append(node.name)
        self._answer(f"replace nodes of {handle.name}")
        return tuple(found)


def _name(request: AttemptRequest) -> str:
    return f"{request.run_prefix}/g{request.generation}-a{request.attempt}"


if TYPE_CHECKING:
    _backend: Callable[[SimBackend], Backend] = lambda one: one  # noqa: E731
    _replaces: Callable[[ReplacingBackend], ReplacesNodes] = lambda one: one  # noqa: E731
    _lists: Callable[[SimBackend], ListsLeftovers] = lambda one: one  # noqa: E731
