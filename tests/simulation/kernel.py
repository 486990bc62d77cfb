"""Actors, clocks and faults of one simulated world: all of it follows from one seed.

Each actor is a greenlet that runs the project's own synchronous code. It gives up control where it sleeps
and at each effect (:meth:`World.point`), so that every interleaving can occur; idle time is skipped.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import greenlet

_T = TypeVar("_T")
EPOCH = 1_800_000_000.0
"""True time at which a world begins, seconds since the epoch. Chosen."""
SWITCH = 0.15
"""Share of effects between which another actor may run. Chosen: most code runs on, as on a real machine."""
PAUSE_S = (600.0, 5400.0)
"""How long a paused process stands still, seconds. Chosen: longer than every age that the protocol knows."""


class Crash(BaseException):
    """Unwinds an actor at the end of its world."""


class Violation(AssertionError):  # noqa: N818  (the field's word)
    """An invariant does not hold."""


@dataclass
class Machine:
    """A machine with clocks of its own.

    Attributes:
        name: For the timeline.
        skew_s: What its wall clock is ahead of the true time, seconds.
        booted_at: True time of its boot, seconds since the epoch; its monotonic clock begins there.
        is_halted: No actor on it goes on; its clocks do. :meth:`World.go_on` ends that.
    """

    name: str
    skew_s: float = 0.0
    booted_at: float = EPOCH - 1000.0
    is_halted: bool = False


@dataclass(eq=False, repr=False)
class Actor:
    """One process or thread.

    Attributes:
        name: For the timeline, unique.
        kind: What crashes are counted and chosen by, such as ``worker``.
        machine: Where it runs.
        dies_with: Actors that end when this one is killed, such as threads of its process.
        within: The main actor of its process, if it is a thread; such a one never dies before its process.
        paused_until: True time until which it stands still, seconds since the epoch.
    """

    name: str
    kind: str
    machine: Machine
    dies_with: list[Actor] = field(default_factory=list)
    within: Actor | None = None
    is_dead: bool = False
    is_done: bool = False
    paused_until: float = 0.0
    _glet: Any = None
    _wake: int = -1
    _error: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        """True until its code has returned or it was killed."""
        return not (self.is_dead or self.is_done)


@dataclass(frozen=True)
class Line:
    """One line of the timeline: when (true time), who, what."""

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        """Show it with the seconds since the world's beginning."""
        return f"{self.at - EPOCH:10.2f}  {self.who:24}  {self.what}"


class World:
    """Everything that one seed decides.

    Attributes:
        seed: The seed.
        now: The true time, seconds since the epoch. No actor can read it.
        lines: The timeline.
        after_step: Invariants: called after each step of an actor; they raise :class:`Violation`.
        after_death: Called with each actor that is killed.
        rates: Chance of each kind of fault, by name; a missing one never occurs.
        muted: Faults, as ``kind#number``, that do not occur in this run: shrinking sets them.
        struck: Faults that occurred, in order.
        counts: How often what occurred, for statistics.
        violation: The first invariant that an effect broke; an actor may have swallowed it.
    """

    def __init__(
        self, seed: int, *, rates: dict[str, float] | None = None, muted: frozenset[str] = frozenset()
    ) -> None:
        """Begin with an empty world."""
        self.seed = seed
        self.now = EPOCH
        self.lines: list[Line] = []
        self.after_step: list[Callable[[], None]] = []
        self.after_death: list[Callable[[Actor], None]] = []
        self.rates = dict(rates or {})
        self.muted = muted
        self.struck: list[str] = []
        self.counts: Counter[str] = Counter()
        self.current: Actor | None = None
        self.violation: str | None = None
        self._streams: dict[str, random.Random] = {}
        self._drawn: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Actor]] = []
        self._halted: list[tuple[int, Actor]] = []
        self._begun: set[Actor] = set()
        self._order = itertools.count()
        self._names: Counter[str] = Counter()
        self._only: dict[type, Any] = {}
        self._faults_end = float("inf")

    def only(self, kind: type[_T]) -> _T:
        """The world's only object of *kind*, made at the first use: what several parts share."""
        if kind not in self._only:
            self._only[kind] = kind()
        found: _T = self._only[kind]
        return found

    # What a seed decides

    def stream(self, name: str) -> random.Random:
        """Random numbers of one purpose: muting a fault leaves those of the others as they are."""
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self.seed}/{name}")
        return self._streams[name]

    def strikes(self, kind: str, detail: str = "") -> bool:
        """True if a fault of this kind occurs now, with the chance in ``rates``; notes it."""
        rate = self.rates.get(kind, 0.0)
        if not rate or self.now >= self._faults_end or self.stream(f"fault {kind}").random() >= rate:
            return False
        self._drawn[kind] += 1
        name = f"{kind}#{self._drawn[kind]}"
        if name in self.muted:
            return False
        self.struck.append(name)
        self.counts[f"fault {kind}"] += 1
        self.note(f"FAULT {name} {detail}".rstrip())
        return True

    def end_faults(self) -> None:
        """From now on no fault occurs: what was accepted must end."""
        self._faults_end = self.now
        self.note("no fault occurs from here on", who="world")

    @property
    def faults_ended_at(self) -> float | None:
        """True time from which on no fault occurs; None before."""
        return self._faults_end if self._faults_end < float("inf") else None

    def note(self, what: str, *, who: str | None = None) -> None:
        """Add a line to the timeline."""
        actor = self.current.name if self.current is not None else "world"
        self.lines.append(Line(self.now, who or actor, what))

    # Actors

    def spawn(
        self,
        kind: str,
        call: Callable[[], object],
        *,
        machine: Machine,
        after_s: float = 0.0,
        name: str = "",
        within: Actor | None = None,
    ) -> Actor:
        """Start an actor after *after_s* seconds; what *call* raises ends the world.

        *within* is an actor of the process whose thread it is: it ends with the process.
        """
        base = name or kind
        self._names[base] += 1
        main = within if within is None else within.within or within
        actor = Actor(
            f"{base}-{self._names[base]}" if self._names[base] > 1 else base, kind, machine, within=main
        )
        if main is not None:
            main.dies_with[:] = [*(one for one in main.dies_with if one.is_alive), actor]

        def body() -> None:
            try:
                call()
            except Crash:
                pass
            finally:
                actor.is_done = True
                self._begun.discard(actor)

        actor._glet = greenlet.greenlet(body)
        self._push(self.now + after_s, actor)
        return actor

    def kill(self, actor: Actor, why: str) -> None:
        """End an actor and its process, as SIGKILL does: no handler of it runs before :meth:`close`."""
        killed = self._mark_dead(actor.within or actor, why)
        for one, notice in itertools.product(killed, self.after_death):
            notice(one)
        if self.current in killed:
            greenlet.getcurrent().parent.switch()
            raise Crash

    def _mark_dead(self, actor: Actor, why: str) -> list[Actor]:
        """Mark it and the threads of its process, which may run on after its own code has returned."""
        found = [actor] if actor.is_alive else []
        if found:
            actor.is_dead = True
            self.note(f"killed: {why}", who=actor.name)
            self.counts[f"kill {actor.kind}"] += 1
        for other in actor.dies_with:
            found += self._mark_dead(other, f"with {actor.name}")
        return found

    def sleep(self, seconds: float) -> None:
        """Let the current actor sleep; others run meanwhile."""
        self._give_up(max(0.0, float(seconds)))

    def point(self, what: str) -> None:
        """An effect of the current actor comes now: others may run first, the actor may crash or pause."""
        actor = self.current
        if actor is None:
            return
        if actor.is_dead:
            raise Crash
        self.counts["points"] += 1
        if self.strikes(f"crash-{actor.kind}", f"before {what}"):
            self.kill(actor, f"before {what}")
        if self.strikes(f"pause-{actor.kind}", f"before {what}"):
            seconds = self.stream("pause").uniform(*PAUSE_S)
            actor.paused_until = self.now + seconds
            self._give_up(seconds)
        elif (chance := self.stream("switch").random()) < SWITCH:
            self._give_up(chance / SWITCH * self.stream("switch").choice((0.0, 0.1, 1.0, 5.0)))

    def wait(self, is_so: Callable[[], bool], *, every_s: float, most_s: float = float("inf")) -> bool:
        """Let the current actor poll until *is_so*; False once *most_s* have passed."""
        until = self.now + most_s
        while not is_so():
            if self.now >= until:
                return False
            self.sleep(every_s)
        return True

    def park(self, *, most_s: float = float("inf")) -> None:
        """Let the current actor wait until another one wakes it, at most *most_s* seconds."""
        self._give_up(most_s)

    def wake(self, actor: Actor, error: BaseException | None = None) -> None:
        """Let *actor* go on now instead of later, and raise *error* in it; one that stands still stays so."""
        if actor.is_alive and actor is not self.current:
            actor._error = error or actor._error
            self._push(max(self.now, actor.paused_until), actor)

    def pause(self, actor: Actor, seconds: float) -> None:
        """Let *actor* and the threads of its process stand still for *seconds*."""
        for one in (actor, *actor.dies_with):
            one.paused_until = max(one.paused_until, self.now + seconds)

    def halt(self, machine: Machine) -> None:
        """Let every actor on *machine* stand still; the current one from its next wait on."""
        machine.is_halted = True

    def go_on(self, machine: Machine) -> None:
        """Let the actors on *machine* go on: now, if they would have done something meanwhile."""
        machine.is_halted = False
        due = [(order, actor) for order, actor in self._halted if actor.machine is machine]
        self._halted = [item for item in self._halted if item[1].machine is not machine]
        for order, actor in due:
            if order == actor._wake and actor.is_alive:
                self._push(max(self.now, actor.paused_until), actor)

    def _give_up(self, seconds: float) -> None:
        actor = self.current
        if actor is None:
            raise RuntimeError("only an actor can wait")
        if actor.is_dead:
            raise Crash
        self._push(self.now + seconds, actor)
        greenlet.getcurrent().parent.switch()
        if actor.is_dead:
            raise Crash
        if actor._error is not None:
            error, actor._error = actor._error, None
            raise error

    def _push(self, at: float, actor: Actor) -> None:
        """Let *actor* go on at *at* and at no other time."""
        actor._wake = next(self._order)
        if at < float("inf"):
            heapq.heappush(self._queue, (at, actor._wake, actor))

    def run(self, *, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run every actor in turn until *is_over*, the true time *until*, or the end of all of them."""
        while self._queue and not is_over():
            at, order, actor = self._queue[0]
            if at > until:
                break
            heapq.heappop(self._queue)
            if order != actor._wake or not actor.is_alive:
                continue
            self.now = max(self.now, at)
            if actor.machine.is_halted:
                self._halted.append((order, actor))
            elif actor.paused_until > self.now:
                self._push(actor.paused_until, actor)
            else:
                self._step(actor)
        self.now = max(self.now, until) if not is_over() else self.now

    def _step(self, actor: Actor) -> None:
        self.current = actor
        if actor not in self._begun:  # its parent is the loop, not the actor that spawned it
            self._begun.add(actor)
            actor._glet.parent = greenlet.getcurrent()
        try:
            actor._glet.switch()
        finally:
            self.current = None
        self.counts["steps"] += 1
        for check in self.after_step:
            check()

    def close(self) -> None:
        """Unwind every actor, so that no greenlet outlives the world."""
        begun = sorted(self._begun, key=lambda one: one.name)
        for actor in begun:
            actor.is_dead = True
        for actor in begun:
            if actor._glet and not actor.is_done:
                self.current = actor
                actor._glet.switch()
        self._queue.clear()
        self.current = None
        for shared in self._only.values():
            if hasattr(shared, "close"):
                shared.close()


class Lock:
    """A lock of one world: an actor that waits for it gives up control, and one that waits for ever fails."""

    def __init__(self, world: World, *, is_reentrant: bool) -> None:
        """Begin free."""
        self._world, self._is_reentrant = world, is_reentrant
        self._owner: Actor | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  # as threading's
        """Wait for it, at most *timeout* seconds; False if it is still taken.

        Raises:
            RuntimeError: Its owner ended, was killed, or is the actor itself: a deadlock.
        """
        world, me = self._world, self._world.current
        until = world.now + timeout if timeout >= 0 else float("inf")
        while self._count and not (self._is_reentrant and self._owner is me):
            if not blocking or world.now >= until:
                return False
            if self._owner is me or self._owner is None or not self._owner.is_alive:
                names = [one.name if one else "the loop" for one in (me, self._owner)]
                raise RuntimeError(f"deadlock: {names[0]} waits for a lock of {names[1]}")
            world.sleep(0.05)
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """Give it back."""
        if not self._count:
            raise RuntimeError("release of a lock that is free")
        self._count -= 1

    def locked(self) -> bool:
        """True while an actor has it."""
        return self._count > 0

    def __enter__(self) -> bool:
        """Wait for it."""
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.release()


# The clocks of the machine that the current actor runs on


def wall(world: World) -> float:
    """What ``time.time`` says on the current actor's machine."""
    machine = world.current.machine if world.current else None
    return world.now + (machine.skew_s if machine else 0.0)


def monotonic(world: World) -> float:
    """What ``time.monotonic`` says on the current actor's machine."""
    machine = world.current.machine if world.current else None
    return world.now - (machine.booted_at if machine else EPOCH - 1000.0)
