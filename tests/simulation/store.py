"""The simulated object store: one truth, and clients that see it through faults.

Each method of a client is two effects, the request and the answer, between which anything may happen.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from envscaler_airflow.errors import StoreError
from envscaler_airflow.store.clock import DatedStore
from envscaler_airflow.store.keys import (
    MAX_BYTES,
    arriving,
    check_name,
    check_prefix,
    check_tree,
    is_manifest,
    join,
)
from envscaler_airflow.store.run_store import Store
from tests.simulation.kernel import Actor, Machine, World

URL = "s3://simulated"
LATE_S = (0.5, 45.0)
"""How long after its time-out a request may still act, seconds. Chosen: an SDK's retries are over by then."""
LAG_S = 8.0
"""Oldest listing that is answered, seconds. Chosen: longer than an NFS client keeps a folder's entries."""
AWAY_S = (20.0, 3 * 3600.0)
"""Shortest and longest time that a store does not answer, seconds. Chosen; most are short."""


@dataclass(slots=True)
class Stored:
    """One object: its bytes, write time by the store's clock, version, and true times of its creation."""

    data: bytes
    at: float
    version: int
    made: float


@dataclass(frozen=True, slots=True)
class Effect:
    """One change of the truth.

    Attributes:
        kind: ``write``, ``create`` or ``delete``.
        name: Of the object.
        data: What it contains now; None once deleted.
        who: Actor whose request it was.
        machine: Where that runs.
    """

    kind: str
    name: str
    data: bytes | None
    who: Actor | None
    machine: Machine


class SimStore:
    """The truth.

    Attributes:
        objects: Every object by name.
        watchers: Called after each change: invariants.
        askers: Called with the client, what it asks for and the name before each request.
        readers: Called with the client, the name and its content after each successful read.
        network: Where late requests are.
        torn: Folders of checkpoints that lost bytes once they were complete.
        skew_s: What the store's clock is ahead of the true time, seconds.
    """

    def __init__(self, world: World, *, skew_s: float = 0.0) -> None:
        """Begin empty."""
        self.world = world
        self.skew_s = skew_s
        self.objects: dict[str, Stored] = {}
        self.watchers: list[Callable[[Effect], None]] = []
        self.askers: list[Callable[[SimClient, str, str], None]] = []
        self.readers: list[Callable[[SimClient, str, bytes | None], None]] = []
        self.torn: set[str] = set()
        self._names: list[str] = []
        self._deleted: list[tuple[float, str, int]] = []
        self._versions = 0
        self.network = Machine("network")
        self.away_until = 0.0
        self.clients: list[SimClient] = []

    def client(self, name: str, machine: Machine) -> SimClient:
        """A client of one process, *name* for the timeline, on *machine*."""
        self.clients.append(SimClient(self, name, machine))
        return self.clients[-1]

    def end_faults(self) -> None:
        """Answer everyone from now on."""
        self.away_until = 0.0
        for client in self.clients:
            client.cut_off_until = client.refused_until = 0.0

    def now(self) -> float:
        """The store's clock."""
        return self.world.now + self.skew_s

    def put(self, kind: str, name: str, data: bytes, who: Actor | None, machine: Machine) -> None:
        """Store *data*."""
        self._versions += 1
        found = self.objects.get(name)
        if found is None:
            bisect.insort(self._names, name)
        made = self.world.now if found is None else found.made
        self.objects[name] = Stored(data, float(int(self.now())), self._versions, made)
        self._changed(Effect(kind, name, data, who, machine))

    def tear(self, folder: str) -> None:
        """Damage one file of a complete checkpoint: it is cut short, or another byte is in it."""
        names = [name for name in self.below(folder) if not is_manifest(name) and "/node-" not in name]
        if names:
            found = self.objects[names[0]]
            last = b"" if self.world.stream("tear").random() < 0.5 else b"?"
            self.objects[names[0]] = replace(found, data=found.data[:-1] + last)
            self.torn.add(folder.rpartition("/")[2])

    def remove(self, name: str, who: Actor | None, machine: Machine) -> None:
        """Delete *name* if it exists."""
        found = self.objects.pop(name, None)
        if found is not None:
            del self._names[bisect.bisect_left(self._names, name)]
            self._deleted.append((self.world.now, name, len(found.data)))
            self._changed(Effect("delete", name, None, who, machine))

    def below(self, prefix: str) -> list[str]:
        """Names below the folder *prefix*, sorted."""
        if not prefix:
            return list(self._names)
        first = bisect.bisect_left(self._names, prefix + "/")
        return self._names[first : bisect.bisect_left(self._names, prefix + "0", first)]

    def listed(self, prefix: str, lag_s: float) -> dict[str, int]:
        """Sizes of the names below *prefix*, as they were *lag_s* seconds ago."""
        until = self.world.now - lag_s
        found = {name: len(self.objects[name].data) for name in self.below(prefix)}
        if not lag_s:
            return found
        start = prefix + "/" if prefix else ""
        shown = {name: size for name, size in found.items() if self.objects[name].made <= until}
        gone = {name: size for at, name, size in self._deleted if at > until and name.startswith(start)}
        return dict(sorted({**gone, **shown}.items()))

    def _changed(self, effect: Effect) -> None:
        for watcher in self.watchers:
            watcher(effect)


class SimClient(DatedStore):
    """The store as one process sees it: :class:`~envscaler_airflow.store.run_store.Store`.

    Attributes:
        cut_off_until: Until this true time no answer comes.
        last_answer: True time of the last answer.
    """

    url = URL
    at_once = 1
    create_is_atomic = True

    def __init__(self, truth: SimStore, name: str, machine: Machine) -> None:
        """See *truth* from *machine*."""
        super().__init__()
        self.truth = truth
        self.name = name
        self.machine = machine
        self.cut_off_until = 0.0
        self.refused_until = 0.0
        self.last_answer = truth.world.now

    # The interface

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """See :meth:`Store.read_dated`."""
        check_name(name)
        self._ask("read", name)
        found = self.truth.objects.get(name)
        self._answer()
        data = None if found is None else found.data
        for reader in self.truth.readers:
            reader(self, name, data)
        if found is None:
            return None
        self._check_size(name, len(found.data), max_bytes)
        return found.data, found.at

    def write(self, name: str, data: bytes) -> None:
        """See :meth:`Store.write`."""
        self._put("write", check_name(name), bytes(data))

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Store.create`."""
        return self._put("create", check_name(name), bytes(data))

    def delete(self, name: str) -> None:
        """See :meth:`Store.delete`."""
        check_name(name)
        self._ask("delete", name)
        self.truth.remove(name, self.truth.world.current, self.machine)
        self._answer(f"delete {name}")

    def delete_tree(self, prefix: str) -> None:
        """See :meth:`Store.delete_tree`: one request for each object, manifests first."""
        names = list(self.sizes(check_tree(prefix)))
        for name in sorted(names, key=lambda one: (not is_manifest(one), one)):
            self.delete(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        """See :meth:`Store.sizes`."""
        prefix = check_prefix(prefix)
        self._ask("list", prefix)
        found = self.truth.listed(prefix, self._lag_s(prefix))
        self._answer()
        return found

    def children(self, prefix: str) -> list[str]:
        """See :meth:`Store.children`."""
        prefix = check_prefix(prefix)
        skip = len(prefix) + 1 if prefix else 0
        return sorted({name[skip:].partition("/")[0] for name in self.sizes(prefix)})

    def size(self, name: str) -> int | None:
        """See :meth:`Store.size`."""
        check_name(name)
        self._ask("size", name)
        found = self.truth.objects.get(name)
        self._answer()
        return None if found is None else len(found.data)

    def version(self, name: str) -> str | None:
        """See :meth:`TellsVersions.version`."""
        check_name(name)
        self._ask("version", name)
        found = self.truth.objects.get(name)
        self._answer()
        return None if found is None else str(found.version)

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """See :meth:`Store.put_file`."""
        if isinstance(source, Path):
            data = source.read_bytes()
        else:
            source.seek(0)
            data = source.read()
        self._put("write", check_name(name), data)

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """See :meth:`Store.get_file`."""
        check_name(name)
        self._ask("read", name)
        found = self.truth.objects.get(name)
        self._answer()
        if found is None:
            raise StoreError(f"{self.uri(name)} is absent")
        if isinstance(target, io.BytesIO):
            target.write(found.data)
            return
        with arriving(target) as stream:
            stream.write(found.data)

    def uri(self, name: str) -> str:
        """See :meth:`Store.uri`."""
        return join(URL, check_prefix(name))

    def _ask_date(self) -> None:
        self._ask("date", "")
        self._answer()

    # Faults

    def cut_off(self, seconds: float) -> None:
        """Give this client no answer for *seconds*."""
        self.cut_off_until = max(self.cut_off_until, self.truth.world.now + seconds)

    def _ask(self, what: str, name: str) -> None:
        world, at = self.truth.world, f"{what} {name}"
        for asker in self.truth.askers:
            asker(self, what, name)
        world.point(at)
        if world.strikes("store-slow", at):
            world.sleep(world.stream("store-slow").uniform(1.0, 60.0))
        if world.strikes("store-away", at):
            self._go_away(world)
        if world.now < max(self.cut_off_until, self.truth.away_until):
            raise StoreError(f"{at}: no answer", transient=True)
        if world.strikes("store-credentials", at):
            self.refused_until = world.now + world.stream("store-credentials").uniform(30.0, 1800.0)
        if world.now < self.refused_until:
            raise StoreError(f"{at}: the credentials have expired", status=403, transient=False)
        if world.strikes("store-refuse", at):
            raise StoreError(f"{at}: 503 slow down", status=503, transient=True)

    def _go_away(self, world: World) -> None:
        stream = world.stream("store-away")
        seconds = AWAY_S[0] * (AWAY_S[1] / AWAY_S[0]) ** (stream.random() ** 2)
        if stream.random() < 0.3:
            self.truth.away_until = max(self.truth.away_until, world.now + seconds)
            world.note(f"the store answers nobody for {seconds:.0f} s")
        else:
            self.cut_off(seconds)
            world.note(f"the store does not answer {self.name} for {seconds:.0f} s")

    def _answer(self, changed: str = "") -> None:
        """The answer comes; one to a request that *changed* something may be lost."""
        world = self.truth.world
        if changed:
            world.point(f"answer to {changed}")
            if world.strikes("store-lost-answer", changed):
                raise StoreError(f"{changed}: no answer", transient=True)
        self.last_answer = world.now
        self._dates.seen(float(int(self.truth.now())))

    def _put(self, kind: str, name: str, data: bytes) -> bool:
        self._ask(kind, name)
        world, who = self.truth.world, self.truth.world.current
        if kind == "create" and world.strikes("store-conflict", name):
            raise StoreError(f"create {name}: 409 conflict", status=409, transient=True)
        if world.strikes("store-late", f"{kind} {name}"):
            self._act_late(kind, name, data, who)
            raise StoreError(f"{kind} {name}: no answer in time", transient=True)
        if world.strikes("store-twice", f"{kind} {name}"):
            self._act_late(kind, name, data, who)
        made = self._act(kind, name, data, who)
        self._answer(f"{kind} {name}")
        return made

    def _act(self, kind: str, name: str, data: bytes, who: Actor | None) -> bool:
        if kind == "create" and name in self.truth.objects:
            return False
        self.truth.put(kind, name, data, who, self.machine)
        return True

    def _act_late(self, kind: str, name: str, data: bytes, who: Actor | None) -> None:
        """Let the request act later, even if its sender has ended."""
        world = self.truth.world

        def act() -> None:
            world.note(f"a late {kind} of {name} by {self.name} acts")
            self._act(kind, name, data, who)

        after_s = world.stream("store-late").uniform(*LATE_S)
        network = self.truth.network
        world.spawn("network", act, machine=network, after_s=after_s, name=f"late {kind} {name}")

    def _lag_s(self, prefix: str) -> float:
        world = self.truth.world
        if not world.strikes("listing-lags", prefix):
            return 0.0
        return world.stream("listing-lags").uniform(0.5, LAG_S)


if TYPE_CHECKING:
    _conforms: Callable[[SimStore], Store] = lambda truth: truth.client("", Machine(""))  # noqa: E731
