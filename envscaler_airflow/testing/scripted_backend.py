"""A backend whose machines follow the test's script, and a clock that moves only when a test moves it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import (
    AttemptRequest,
    AttemptStatus,
    Backend,
    CountsFree,
    MarksNodes,
    RescalesInPlace,
    ResizesInPlace,
    ResizeState,
    RunsMixed,
)
from envscaler_airflow.errors import BackendError, CapacityError, NoOfferError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Handle, NodeState, NodeStatus
from envscaler_airflow.run.cost import UsageInterval


class ManualClock:
    """Manual wall and monotonic time; pass ``clock.time`` or ``clock.monotonic`` as a clock."""

    def __init__(self, time: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        """Start at *time* (seconds since the epoch) and *monotonic* (seconds since any point)."""
        self._time = time
        self._monotonic = monotonic
        self.slept: list[float] = []

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._time

    def monotonic(self) -> float:
        """Seconds that never decrease."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Advance both times by *seconds*.

        Raises:
            ValueError: Time does not go back; see :meth:`set_wall`.
        """
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds!r}")
        self._time += seconds
        self._monotonic += seconds

    def set_wall(self, time: float) -> None:
        """Set only the wall clock, as an administrator or NTP would."""
        self._time = time

    def sleep(self, seconds: float) -> None:
        """Replacement for ``time.sleep``: time passes at once, and is recorded in ``slept``."""
        self.slept.append(seconds)
        self.advance(seconds)


def cpu_offer(vcpus: int = 1, *, usd_per_hour: float | None = 0.05, memory_gib: float | None = None) -> Offer:
    """``scripted/cpu-<n>``, by default with 4 GiB for each CPU."""
    return Offer(
        cloud="scripted",
        region="",
        instance_type=f"cpu-{vcpus}",
        capacity_type="on-demand",
        vcpus=float(vcpus),
        memory_gib=memory_gib if memory_gib is not None else 4.0 * vcpus,
        usd_per_hour=usd_per_hour,
        price_source="scripted",
    )


@dataclass(slots=True)
class _Life:
    """Current state of one attempt."""

    handle: Handle
    nodes: list[NodeStatus]
    started: float
    vcpus: float
    allocation: Allocation
    ended: dict[int, float] = field(default_factory=dict)
    is_hidden: bool = False
    is_released: bool = False


class ScriptedBackend:
    """Satisfies :class:`~envscaler_airflow.backends.base.Backend` without starting anything.

    Nodes run from ``submit`` on (or remain in *start_state*) until a test calls ``end``, ``lose`` or
    ``hide``, or they are stopped. ``fail_next`` scripts the answer to a call; ``calls`` has all calls.
    """

    def __init__(
        self,
        offers: tuple[Offer, ...] | None = None,
        *,
        clock: ManualClock | None = None,
        vcpus: float | None = None,
        start_state: NodeState = "running",
        ends_on_stop: bool = True,
        name: str = "scripted",
    ) -> None:
        """Offer *offers* (None: 1, 2 and 4 CPUs), with at most *vcpus* in total at once (None: no limit)."""
        self.name = name
        self.clock = clock or ManualClock()
        self.calls: list[tuple[str, str]] = []
        self._offers = offers if offers is not None else (cpu_offer(1), cpu_offer(2), cpu_offer(4))
        self._vcpus = vcpus
        self._start_state = start_state
        self._ends_on_stop = ends_on_stop
        self._lives: dict[str, _Life] = {}
        self._faults: dict[str, list[tuple[Exception, bool]]] = {}
        self._uids = itertools.count(1)

    # What a test scripts

    def fail_next(self, method: str, error: Exception, *, after: bool = False) -> None:
        """Raise *error* at the next call of *method*; *after*: once it took effect, so the answer is lost."""
        self._faults.setdefault(method, []).append((error, after))

    def set_state(
        self,
        handle: Handle,
        state: NodeState,
        *,
        node: int | None = None,
        reason: str = "",
        detail: str = "",
    ) -> None:
        """Move *node* (None: all) to a live state: pending, starting or running."""
        self._change(handle, NodeStatus(0, state, reason=reason, detail=detail), node)

    def end(
        self,
        handle: Handle,
        *,
        node: int | None = None,
        exit_code: int | None = 0,
        signal: int | None = None,
        reason: str = "succeeded",
        detail: str = "",
    ) -> None:
        """End *node* (None: every live one)."""
        self._change(handle, NodeStatus(0, "ended", exit_code, signal, reason, detail), node)

    def lose(self, handle: Handle, *, node: int | None = None, reason: str = "killed") -> None:
        """Lose *node* (None: every live one), like a spot machine."""
        self._change(handle, NodeStatus(0, "lost", reason=reason, detail="scripted loss"), node)

    def hide(self, handle: Handle) -> None:
        """Make its state unknown until :meth:`show`; it keeps running."""
        self._life(handle).is_hidden = True

    def show(self, handle: Handle) -> None:
        """Undo :meth:`hide`."""
        self._life(handle).is_hidden = False

    @property
    def live(self) -> list[Handle]:
        """Attempts with a live node; a test of "at most one" counts these."""
        lives = self._lives.values()
        return [life.handle for life in lives if not AttemptStatus(tuple(life.nodes)).is_over]

    # The backend interface

    def offers(self) -> tuple[Offer, ...]:
        """The test's offers."""
        self._enter("offers", "")
        return self._offers

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """The request without its secrets."""
        return {
            "name": _name(request),
            "allocation": request.allocation.to_dict(),
            "command": list(request.launch.command),
            "env": dict(request.launch.env),
            "secret_names": sorted(request.secret_env),
        }

    def submit(self, request: AttemptRequest) -> Handle:
        """Start it, or adopt it."""
        name = _name(request)
        lost = self._enter("submit", name)
        life = self._lives.get(name) or self._start(request, name)
        if life.is_released:
            raise BackendError(f"{name}: this attempt has ended and was released")
        if lost is not None:
            raise lost
        return life.handle

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle when it was started."""
        self._enter("find", _name(request))
        life = self._lives.get(_name(request))
        return life.handle if life is not None and not life.is_released else None

    def observe(self, handle: Handle) -> AttemptStatus:
        """The state that the test set last."""
        self._enter("observe", handle.name)
        life = self._life(handle)
        if life.is_hidden:
            return AttemptStatus(tuple(NodeStatus(node.node, "unknown") for node in life.nodes))
        if life.is_released:
            return AttemptStatus(tuple(NodeStatus(node.node, "lost") for node in life.nodes))
        return AttemptStatus(tuple(life.nodes))

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """End live nodes, unless the test keeps them alive during the grace period."""
        lost = self._enter("stop", handle.name)
        if grace_s <= 0:
            self.end(handle, exit_code=None, signal=9, reason="killed")
        elif self._ends_on_stop:
            self.end(handle, exit_code=87, reason="stopped")
        if lost is not None:
            raise lost

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """From submit to the end, on the test's clock."""
        self._enter("usage", handle.name)
        life = self._life(handle)
        now = self.clock.time()
        return tuple(UsageInterval(n.node, life.started, life.ended.get(n.node), now) for n in life.nodes)

    def release(self, handle: Handle) -> None:
        """Forget an ended attempt."""
        self._enter("release", handle.name)
        life = self._life(handle)
        if not life.is_hidden and AttemptStatus(tuple(life.nodes)).is_over:
            life.is_released = True

    def _enter(self, method: str, name: str) -> Exception | None:
        """Record the call; raise its scripted error, or return the one to raise afterwards."""
        self.calls.append((method, name))
        faults = self._faults.get(method)
        if not faults:
            return None
        error, is_after = faults.pop(0)
        if is_after:
            return error
        raise error

    def _start(self, request: AttemptRequest, name: str) -> _Life:
        offer, nodes, parts = request.allocation.offer, request.allocation.nodes, request.allocation.parts
        asked = sum(part.offer.vcpus * part.nodes for part in parts)
        known = {one.name for one in self._offers}
        for part in parts:
            if part.offer.name not in known:
                raise NoOfferError(f"{part.offer.name}: is not offered here")
        taken = sum(self._lives[handle.name].vcpus for handle in self.live)
        if self._vcpus is not None:
            if asked > self._vcpus:
                raise NoOfferError(f"{offer.name}: {asked:g} CPUs requested of {self._vcpus:g}")
            if taken + asked > self._vcpus:
                raise CapacityError(f"{offer.name}: {self._vcpus - taken:g} CPUs are free")
        handle = Handle(self.name, name, {"uid": next(self._uids)})
        states = [NodeStatus(node, self._start_state) for node in range(nodes)]
        self._lives[name] = _Life(handle, states, self.clock.time(), asked, request.allocation)
        return self._lives[name]

    def _life(self, handle: Handle) -> _Life:
        try:
            return self._lives[handle.name]
        except KeyError:
            raise BackendError(f"{handle.name}: was never started here") from None

    def _change(self, handle: Handle, to: NodeStatus, node: int | None) -> None:
        life = self._life(handle)
        for index, old in enumerate(life.nodes):
            if node in (None, index) and old.state not in ("ended", "lost"):
                life.nodes[index] = NodeStatus(index, to.state, to.exit_code, to.signal, to.reason, to.detail)
                if to.state in ("ended", "lost"):
                    life.ended[index] = self.clock.time()


def _name(request: AttemptRequest) -> str:
    return f"{request.store_url}|{request.run_prefix}|g{request.generation}-a{request.attempt}"


class ElasticBackend(ScriptedBackend):
    """:class:`ScriptedBackend` with every optional ability to change a running attempt.

    Attributes:
        answers: Results of :meth:`resize` and :meth:`resized`; the last one repeats.
        sizes: ``(vcpus, memory_bytes)`` of the last request, by the attempt's name.
        free: Free nodes, by offer name; a missing one is unknown.
        marked: Nodes to remove first.
        new_nodes: Initial state of nodes that a rescale adds.
    """

    runs_mixed = True

    def __init__(self, offers: tuple[Offer, ...] | None = None, **options: Any) -> None:
        """As the base class; a resize completes at once."""
        super().__init__(offers, **options)
        self.answers: list[ResizeState] = ["done"]
        self.sizes: dict[str, tuple[float | None, int | None]] = {}
        self.free: dict[str, int] = {}
        self.marked: frozenset[int] = frozenset()
        self.new_nodes = NodeStatus(0, "running")

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Record the request and return the scripted answer."""
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
        """Change it to *nodes* nodes: new ones start as :attr:`new_nodes`, and the last ones are removed."""
        lost = self._enter("rescale", handle.name)
        life = self._life(handle)
        new = range(len(life.nodes), nodes)
        life.nodes = [*life.nodes[:nodes], *(replace(self.new_nodes, node=node) for node in new)]
        if lost is not None:
            raise lost
        return Handle(handle.backend, handle.name, {**handle.details, "nodes": nodes})

    def removable(self, handle: Handle) -> frozenset[int]:
        """The nodes that the test marked."""
        self._enter("removable", handle.name)
        return self.marked

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> Mapping[str, int]:
        """The test's free nodes plus the nodes of *without*, by offer name."""
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
    _conforms: Backend = ScriptedBackend()
    _resizes: ResizesInPlace = ElasticBackend()
    _rescales: RescalesInPlace = ElasticBackend()
    _counts: CountsFree = ElasticBackend()
    _marks: MarksNodes = ElasticBackend()
    _mixes: RunsMixed = ElasticBackend()
