"""The simulated cloud: machines that start late, run out, are lost, do not answer and return; and the bill.

A cloud of one seed is like a cluster, which recreates lost nodes, or like plain machines, which are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from envscaler_airflow.backends.base import SILENT, AttemptRequest, NodeEnd
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Handle, NodeStatus
from envscaler_airflow.run.cost import UsageInterval
from tests.simulation.kernel import Machine, World

if TYPE_CHECKING:
    from tests.simulation.cloud_client import SimBackend

NAME = "simulated"
START_S = (20.0, 300.0)
"""How long a machine takes to start, seconds. Chosen: a warm node, and a VM with an image pull."""
AGAIN_S = 10.0
"""Pause before a lost node is recreated, seconds. Source: the back-off of a Kubernetes Job."""
SILENT_S = 600.0
"""A machine that does not answer for this long is reported as silent, seconds. Chosen: as in Kubernetes."""
UNSEEN_S = 40.0
"""Until then it is still reported as running, seconds. Source: node-monitor-grace-period of Kubernetes."""
NO_MACHINE_S = 600.0
"""A node that waits this long for a machine is reported as without capacity, seconds. Chosen."""
DRY_S = (600.0, 6 * 3600.0)
"""How long an offer is sold out, seconds. Chosen."""

Phase = Literal["pending", "starting", "running", "ended", "lost"]


class Life(Protocol):
    """What runs on a machine: ``tests.simulation.node.SimNode``."""

    end: NodeEnd | None

    def begin(self) -> None:
        """Start sidecar and wrapper."""

    def lose(self) -> None:
        """Everything on the machine is gone."""

    def cut_off(self, seconds: float) -> None:
        """Leave it running without an answer of the store."""

    def signal(self, grace_s: float) -> None:
        """Ask it to stop within *grace_s*."""

    def kill(self) -> None:
        """End it at once."""


NodeType = Callable[..., Life]


@dataclass(eq=False)
class Node:
    """One machine that was requested for a node of an attempt: the truth.

    Attributes:
        attempt: What it belongs to.
        node: Index.
        number: Which machine of this index, from 1.
        phase: Its true phase.
        asked_at, began_at, ended_at: True times; billed from *began_at* to *ended_at*.
        end: How it ended.
        silent_from, silent_until: The cloud does not reach it from and until then.
        given_up_at: True time at which it was deleted while it did not answer: no longer billed, and what
            runs there may run on; None if it was not.
        is_doomed: It is killed as soon as it is reached again.
        has_no_machine: It waits for capacity.
        life: What runs on it; None before.
        frozen_s: Seconds that it stood still.
    """

    attempt: Attempt
    node: int
    number: int
    offer: Offer
    machine: Machine
    asked_at: float
    phase: Phase = "pending"
    began_at: float | None = None
    ended_at: float | None = None
    end: NodeEnd | None = None
    silent_from: float = math.inf
    silent_until: float = -math.inf
    given_up_at: float | None = None
    is_doomed: bool = False
    has_no_machine: bool = False
    life: Life | None = None
    frozen_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """True once it ended or was lost."""
        return self.phase in ("ended", "lost")

    def was_silent(self, at: float) -> bool:
        """True if the cloud did not reach it at *at*."""
        return self.silent_from <= at < self.silent_until

    def held_s(self, now: float) -> float:
        """Billed seconds until *now*."""
        if self.began_at is None:
            return 0.0
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.began_at)

    @property
    def name(self) -> str:
        """``g1-a2-n0.3``."""
        return f"{self.attempt.short}-n{self.node}.{self.number}"


@dataclass(eq=False)
class Attempt:
    """What one ``submit`` made.

    Attributes:
        refused_at: True time of the last refusal to release it; None without one.
    """

    name: str
    short: str
    request: AttemptRequest
    handle: Handle
    made_at: float
    nodes: list[list[Node]] = field(default_factory=list)
    is_stopped: bool = False
    is_released: bool = False
    released_at: float | None = None
    refused_at: float | None = None

    @property
    def all_nodes(self) -> Iterator[Node]:
        """Every machine of it, ever."""
        return (one for machines in self.nodes for one in machines)

    @property
    def is_over(self) -> bool:
        """True when nothing of it runs or comes."""
        return all(machines[-1].is_over for machines in self.nodes)


class SimCloud:
    """The truth.

    Attributes:
        attempts: By name; ``by_machine``: machines by name.
        away: True times from which and until which it answers no call.
        offers: What is on offer.
        skew_s: What its clock is ahead of the true time, seconds.
        replaces: True for one that recreates lost nodes.
        tells_time: True for one that reports its own time with each bill.
        resizes: Changes in place, by the attempt's name: see ``tests.simulation.in_place``.
    """

    def __init__(
        self,
        world: World,
        store: Any,
        *,
        offers: tuple[Offer, ...],
        node_type: NodeType,
        replaces: bool,
        backend_type: type[SimBackend],
        tells_time: bool = True,
        skew_s: float = 0.0,
    ) -> None:
        """Begin without machines; *store* is the simulated store, a process's client is a *backend_type*."""
        self.world = world
        self.store = store
        self.offers = offers
        self.node_type = node_type
        self.replaces = replaces
        self.tells_time = tells_time
        self.resizes: dict[str, Any] = {}
        self._backend_type = backend_type
        self.skew_s = skew_s
        self.attempts: dict[str, Attempt] = {}
        self.by_machine: dict[str, Node] = {}
        self.away: list[tuple[float, float]] = []
        self.dry_until: dict[str, float] = {}
        self._machine = Machine("cloud")
        self._machines = 0

    @property
    def nodes(self) -> list[Node]:
        """Every machine, ever."""
        return [node for attempt in self.attempts.values() for node in attempt.all_nodes]

    def client(self, machine: Machine) -> SimBackend:
        """A client of one process on *machine*."""
        return self._backend_type(self, machine)

    def end_faults(self) -> None:
        """Answer from now on, reach every machine, and have every offer."""
        now = self.world.now
        self.away = [(start, min(end, now)) for start, end in self.away]
        self.dry_until.clear()
        for node in self.nodes:
            if self.is_silent(node):
                node.silent_until = now
                self.later(0.0, lambda node=node: self._reached(node), f"return of {node.name}")

    def was_away(self, at: float) -> bool:
        """True if it answered no call at *at*."""
        return any(start <= at < end for start, end in self.away)

    def now(self) -> float:
        """The cloud's clock, in whole seconds, as its timestamps have it."""
        return float(int(self.world.now + self.skew_s))

    # Machines

    def start(self, request: AttemptRequest, name: str) -> Attempt:
        """Make the machines of an attempt."""
        short = f"g{request.generation}-a{request.attempt}"
        handle = Handle(NAME, name, {"uid": str(len(self.attempts) + 1)})
        attempt = Attempt(name, short, request, handle, self.world.now)
        self.attempts[name] = attempt
        for node in range(request.allocation.nodes):
            attempt.nodes.append([])
            self._add(attempt, node, after_s=0.0)
        return attempt

    def _add(self, attempt: Attempt, index: int, *, after_s: float) -> None:
        world, random = self.world, self.world.stream("machines")
        self._machines += 1
        skew = random.choice((0.0, 0.0, random.uniform(-200.0, 200.0)))
        offer = attempt.request.allocation.offer_of(index)
        number = len(attempt.nodes[index]) + 1
        machine = Machine(f"m{self._machines}", skew, world.now - 100.0)
        node = Node(attempt, index, number, offer, machine, world.now)
        attempt.nodes[index].append(node)
        self.by_machine[machine.name] = node
        world.spawn(
            "cloud",
            lambda: self._bring_up(node),
            machine=self._machine,
            after_s=after_s,
            name=f"cloud/{node.name}",
        )

    def _bring_up(self, node: Node) -> None:
        """Find a machine, start it, and let it be lost if that is its fate."""
        world, random = self.world, self.world.stream("machines")
        while self.is_dry(node.offer):
            node.has_no_machine = True
            world.sleep(60.0)
            if node.is_over:
                return
        node.has_no_machine = False
        if node.is_over:
            return
        node.phase = "starting"
        node.began_at = world.now
        self._plan_deadline(node)
        start_s = START_S[0] * (START_S[1] / START_S[0]) ** random.random()
        world.sleep(start_s * (10.0 if world.strikes("slow-start", node.name) else 1.0))
        if node.is_over:
            return
        node.phase = "running"
        node.life = self.node_type(
            world, self.store, node.attempt.request, node.node, node.machine, lambda: self._ended(node)
        )
        world.note(f"{node.name} runs on {node.machine.name}", who="cloud")
        node.life.begin()
        self._plan_fate(node)

    def is_dry(self, offer: Offer) -> bool:
        """True while no machine of *offer* is available."""
        return self.world.now < self.dry_until.get(offer.name, 0.0)

    def _plan_deadline(self, node: Node) -> None:
        """Let it end itself once it and its predecessors have been billed for the attempt's deadline."""
        deadline_s = node.attempt.request.deadline_s
        if deadline_s is not None and deadline_s < 7 * 86400.0:
            held_s = sum(one.held_s(self.world.now) for one in node.attempt.nodes[node.node])
            self.later(max(0.0, deadline_s - held_s), lambda: self._expire(node), f"deadline of {node.name}")

    def _expire(self, node: Node) -> None:
        if node.is_over:
            return
        self.world.note(f"{node.name} reached its own deadline", who="cloud")
        if node.life is None:
            self._over(node, "ended", NodeEnd(None, None, "deadline-exceeded", "before it ran"))
            return
        grace_s = node.attempt.request.grace_s
        node.life.signal(grace_s)
        end = NodeEnd(None, 9, "deadline-exceeded", "the machine's own deadline")
        self.later(grace_s, lambda: self._kill(node, end), f"end of {node.name}")

    def _plan_fate(self, node: Node) -> None:
        world, random = self.world, self.world.stream("fates")
        if node.offer.capacity_type == "spot" and world.strikes("preempt", node.name):
            self.later(random.expovariate(1 / 3600.0), lambda: self._preempt(node), f"spot of {node.name}")
        if world.strikes("hardware", node.name):
            self.later(random.expovariate(1 / 7200.0), lambda: self.lose(node), f"disk of {node.name}")
        if world.strikes("cut-off", node.name):
            lasts = random.choice((60.0, 300.0, 1200.0, 4000.0)) * random.uniform(0.5, 1.5)
            at = random.expovariate(1 / 3600.0)
            self.later(at, lambda: self.cut_off(node, lasts), f"network of {node.name}")

    def later(self, after_s: float, act: Callable[[], object], name: str) -> None:
        """Let *act* happen in the cloud *after_s* seconds from now; the timeline shows *name*."""
        self.world.spawn("cloud", act, machine=self._machine, after_s=after_s, name=f"cloud/{name}")

    def _preempt(self, node: Node) -> None:
        """Take a spot machine back; a storm takes all of its type."""
        victims = [node]
        if self.world.strikes("storm", node.offer.name):
            victims = [one for one in self.nodes if one.offer == node.offer and not one.is_over]
        if self.world.strikes("sold-out", node.offer.name):
            self.sell_out(node.offer)
        for victim in victims:
            if victim.is_over or victim.life is None:
                continue
            if self.world.stream("fates").random() < 0.5:
                self.world.note(f"{victim.name} gets the notice of its preemption", who="cloud")
                victim.life.signal(30.0)
                self.later(30.0, lambda victim=victim: self.lose(victim), f"preemption of {victim.name}")
            else:
                self.lose(victim)

    def sell_out(self, offer: Offer) -> None:
        """Let no machine of *offer* be available for a while."""
        lasts = self.world.stream("fates").uniform(*DRY_S)
        self.dry_until[offer.name] = max(self.dry_until.get(offer.name, 0.0), self.world.now + lasts)
        self.world.note(f"{offer.name} is sold out for {lasts:.0f} s", who="cloud")

    def lose(self, node: Node) -> None:
        """The machine is gone."""
        if node.is_over:
            return
        self.world.note(f"{node.name} is lost", who="cloud")
        if node.life is not None:
            node.life.lose()
        self._over(node, "lost", None)
        if self.replaces and not node.attempt.is_stopped and node.given_up_at is None:
            self._add(node.attempt, node.node, after_s=AGAIN_S)

    def cut_off(self, node: Node, seconds: float) -> None:
        """Cut the machine off: neither cloud nor store reach it; it runs on and comes back."""
        if node.is_over or node.life is None:
            return
        self.world.note(f"{node.name} is cut off for {seconds:.0f} s", who="cloud")
        if self.world.stream("fates").random() < 0.7:  # else only the cloud does not reach it
            node.life.cut_off(seconds)
        self.silence(node, seconds)

    def silence(self, node: Node, seconds: float) -> None:
        """Let the cloud not reach the machine for *seconds*."""
        now = self.world.now
        node.silent_from = node.silent_from if self.is_silent(node) else now
        node.silent_until = max(node.silent_until, now + seconds)
        self.later(seconds, lambda: self._reached(node), f"return of {node.name}")

    def reach(self, node: Node, *, after_s: float) -> None:
        """Let the cloud reach the machine in *after_s* seconds, if not before."""
        if node.silent_until > self.world.now + after_s:
            node.silent_until = self.world.now + after_s
            self.later(after_s, lambda: self._reached(node), f"return of {node.name}")

    def _reached(self, node: Node) -> None:
        if node.is_doomed and self.world.now >= node.silent_until:
            self._kill(node, NodeEnd(None, 9, "killed", "killed once it was reached"))

    def is_silent(self, node: Node) -> bool:
        """True while the cloud does not reach it."""
        return node.was_silent(self.world.now)

    def _ended(self, node: Node) -> None:
        """What runs on the machine ended by itself."""
        if node.is_over or node.life is None:
            return
        end = node.life.end or NodeEnd(None, 9, "killed")
        self._over(node, "ended", end)
        if end.reason not in ("succeeded", "drained", "stopped", "orphaned") and self.replaces:
            node.attempt.is_stopped = True  # as a Job that has failed stops its other pods
            for machines in node.attempt.nodes:
                self.stop_node(machines[-1], node.attempt.request.grace_s)

    def _kill(self, node: Node, end: NodeEnd) -> None:
        if node.is_over:
            return
        if self.is_silent(node):
            node.is_doomed = True
            return
        if node.life is not None:
            node.life.kill()
        self._over(node, "ended", end)

    def _over(self, node: Node, phase: Phase, end: NodeEnd | None) -> None:
        if node.is_over:
            return
        node.phase, node.end = phase, end
        if node.ended_at is None:
            node.ended_at = self.world.now
        words = phase if end is None else f"{phase}: {end.reason} {end.detail}"
        self.world.note(f"{node.name} {words}".rstrip(), who="cloud")

    def stop_node(self, node: Node, grace_s: float) -> None:
        """Ask a machine to stop, and kill it after *grace_s*."""
        if node.is_over:
            return
        if node.life is None:
            is_unmet = node.has_no_machine and self.world.now - node.asked_at >= NO_MACHINE_S
            reason = "capacity" if is_unmet else "stopped"
            self._over(node, "ended", NodeEnd(None, None, reason, "before it ran"))
            return
        if grace_s > 0:
            if not self.is_silent(node):
                node.life.signal(grace_s)
            end = NodeEnd(None, 9, "killed", "the grace is over")
            self.later(grace_s, lambda: self._kill(node, end), f"grace of {node.name}")
        else:
            self._kill(node, NodeEnd(None, 9, "killed", "at once"))

    def stop(self, attempt: Attempt, grace_s: float) -> None:
        """Stop an attempt: no node of it is recreated."""
        attempt.is_stopped = True
        for node in list(attempt.all_nodes):
            self.stop_node(node, grace_s)

    def give_up(self, node: Node) -> None:
        """Delete a machine that does not answer, and recreate it; what runs there may run on."""
        node.is_doomed = True
        node.given_up_at = node.ended_at = self.world.now  # no longer billed
        self.world.note(f"{node.name} is deleted without its answer", who="cloud")
        if not node.attempt.is_stopped:
            self._add(node.attempt, node.node, after_s=AGAIN_S)

    def release(self, attempt: Attempt) -> None:
        """Forget an attempt that is over."""
        if attempt.is_over and not attempt.is_released:
            attempt.is_released = True
            attempt.released_at = self.world.now

    def remove(self, attempt: Attempt) -> None:
        """Kill and forget; what does not answer is no longer billed."""
        self.stop(attempt, 0.0)
        for node in attempt.all_nodes:
            if not node.is_over and node.ended_at is None:
                node.given_up_at = node.ended_at = self.world.now
        attempt.is_released = True
        attempt.released_at = self.world.now

    # What it reports

    def seen(self, node: Node) -> NodeStatus:
        """State of one node, as the cloud sees it."""
        index = node.node
        if node.phase == "lost":
            return NodeStatus(index, "lost", reason="killed", detail="the machine is gone")
        if node.phase == "ended" and node.end is not None:
            return replace(node.end.of_node(index))
        if self.is_silent(node):
            silent_s = self.world.now - node.silent_from
            if silent_s >= SILENT_S:
                return NodeStatus(index, "lost", reason=SILENT, detail="its machine does not answer")
            if silent_s >= UNSEEN_S:
                return NodeStatus(index, "unknown", detail="its machine does not answer")
        if node.phase == "pending":
            waits = self.world.now - node.asked_at
            reason = "capacity" if node.has_no_machine and waits >= NO_MACHINE_S else "scheduling"
            return NodeStatus(index, "pending", reason=reason, detail="waits for a machine")
        if node.phase == "starting":
            return NodeStatus(index, "starting", reason="pulling")
        return NodeStatus(index, "running")

    def interval(self, node: Node) -> UsageInterval | None:
        """Billed time of one machine, by the cloud's clock in whole seconds; None if it never began."""
        if node.began_at is None:
            return None
        ended = node.ended_at
        end = None if ended is None else float(int(ended + self.skew_s))
        now = self.now() if self.tells_time else None
        return UsageInterval(node.node, float(int(node.began_at + self.skew_s)), end, now)
