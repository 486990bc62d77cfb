"""A simulated cloud that changes the CPU and memory of running nodes, as Kubernetes does."""

from __future__ import annotations

from dataclasses import dataclass

from envscaler_airflow.backends.base import ResizeState
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Handle
from tests.simulation.cloud_client import ReplacingBackend

SLOW_S = (5.0, 900.0)
"""How long a resize takes, seconds. Chosen: a kubelet's round, and longer than an owner waits."""
STATES: tuple[ResizeState, ...] = ("going", "going", "going", "deferred", "infeasible")
"""How a resize may go; each as likely as the others. Chosen."""


def offers() -> tuple[Offer, ...]:
    """Shares of one kind of machine.

    Chosen: at one price, so that no bill depends on the second of a resize, which no provider reports.
    """
    return tuple(
        Offer(
            "aws",
            "us-east-1",
            f"node:cpu-{vcpus}",
            "on-demand",
            vcpus,
            4.0 * vcpus,
            usd_per_hour=0.8,
            price_source="simulated",
        )
        for vcpus in (2.0, 4.0)
    )


@dataclass
class Resize:
    """What a node was asked to become, and how that goes: ``going`` is done at *done_at*, the true time."""

    sizes: tuple[float | None, int | None]
    state: ResizeState
    done_at: float


class ResizingBackend(ReplacingBackend):
    """Also :class:`~envscaler_airflow.backends.base.ResizesInPlace`."""

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """See :meth:`ResizesInPlace.resize`."""
        self._ask(f"resize {handle.name}")
        world, known = self.cloud.world, self.cloud.resizes
        sizes = (vcpus, memory_bytes)
        if handle.name not in known or known[handle.name].sizes != sizes:
            random = world.stream("resizes")
            known[handle.name] = Resize(sizes, random.choice(STATES), world.now + random.uniform(*SLOW_S))
            world.note(f"resizes {handle.name}: {known[handle.name].state}", who="cloud")
        self._answer(f"resize {handle.name}")
        return self._progress(handle)

    def resized(self, handle: Handle) -> ResizeState:
        """See :meth:`ResizesInPlace.resized`."""
        self._ask(f"resized {handle.name}")
        return self._progress(handle)

    def _progress(self, handle: Handle) -> ResizeState:
        resize = self.cloud.resizes.get(handle.name)
        if resize is None:
            return "done"
        is_done = resize.state == "going" and self.cloud.world.now >= resize.done_at
        return "done" if is_done else resize.state
