"""A scripted backend that can change what runs: its size, and the number of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import (
    CountsFree,
    Handle,
    MarksNodes,
    NodeStatus,
    RescalesInPlace,
    ResizesInPlace,
    ResizeState,
    RunsMixed,
)
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.testing.backend import ScriptedBackend


class ElasticBackend(ScriptedBackend):
    """As its base, with every ability that a backend may have to change a running attempt.

    Attributes:
        answers: What :meth:`resize` and :meth:`resized` say, the last for good.
        sizes: ``(vcpus, memory_bytes)`` last asked for, by the attempt's name.
        free: Nodes that could be had, by offer name; absent is unknown.
        marked: Nodes that are to go first.
        new_nodes: State in which nodes come that a rescale adds.
    """

    runs_mixed = True

    def __init__(self, offers: tuple[Offer, ...] | None = None, **options: Any) -> None:
        """As the base; a resize is done at once."""
        super().__init__(offers, **options)
        self.answers: list[ResizeState] = ["done"]
        self.sizes: dict[str, tuple[float | None, int | None]] = {}
        self.free: dict[str, int] = {}
        self.marked: frozenset[int] = frozenset()
        self.new_nodes = NodeStatus(0, "running")

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Note what is asked for, and say what the test wants said."""
        lost = self._enter("resize", handle.name)
        self.sizes[handle.name] = (vcpus, memory_bytes)
        if lost is not None:
            raise lost
        return self._answer()

    def resized(self, handle: Handle) -> ResizeState:
        """The same."""
        self._enter("resized", handle.name)
        return self._answer()

    def _answer(self) -> ResizeState:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def rescale(self, handle: Handle, nodes: int) -> Handle:
        """Give it *nodes* nodes: new ones come as :attr:`new_nodes`, the last ones go."""
        lost = self._enter("rescale", handle.name)
        life = self._life(handle)
        new = range(len(life.nodes), nodes)
        life.nodes = [*life.nodes[:nodes], *(replace(self.new_nodes, node=node) for node in new)]
        if lost is not None:
            raise lost
        return Handle(handle.backend, handle.name, {**handle.details, "nodes": nodes})

    def removable(self, handle: Handle) -> frozenset[int]:
        """What the test marked."""
        self._enter("removable", handle.name)
        return self.marked

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> Mapping[str, int]:
        """What the test says of them, and what *without* has of each."""
        self._enter("free_nodes", "" if without is None else without.name)
        held: dict[str, int] = {}
        if without is not None:
            life = self._life(without)
            held = {part.offer.name: part.nodes for part in life.allocation.parts}
            if len(held) == 1:  # it may have been rescaled since
                held = dict.fromkeys(held, len(life.nodes))
        names = [offer.name for offer in offers if offer.name in self.free]
        return {name: self.free[name] + held.get(name, 0) for name in names}


if TYPE_CHECKING:
    _resizes: ResizesInPlace = ElasticBackend()
    _rescales: RescalesInPlace = ElasticBackend()
    _counts: CountsFree = ElasticBackend()
    _marks: MarksNodes = ElasticBackend()
    _mixes: RunsMixed = ElasticBackend()
