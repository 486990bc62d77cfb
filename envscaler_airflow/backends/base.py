"""The seam between the owner and whatever runs an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import OUTCOMES, NodeState, NodeStatus

ResizeState = Literal["going", "done", "deferred", "infeasible"]
"""``deferred``: no room now. ``infeasible``: never here; the next attempt gets it."""


@dataclass(frozen=True, slots=True)
class StoreLogin:
    """Credentials of the run store's connection, for the sidecar of a machine that has none of its own.

    Attributes:
        variables: Of the SDK, with their values. Never written to disk, rendered or logged.
        profile: Name of a profile in the files of the worker's user; None without one.
        refusal: Why the connection's credentials cannot go to a machine; "" where they can.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    profile: str | None = None
    refusal: str = ""

    def check(self, instead: str) -> None:
        """Refuse to start a machine that could not open the store; *instead* is what to write.

        Raises:
            SpecError: The connection's credentials cannot go to a machine.
        """
        if self.refusal:
            raise SpecError(f"{self.refusal}: {instead}")


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """All that a backend needs to start one attempt. Secrets are in ``secret_env`` and ``store_login``.

    Attributes:
        store_url: Run store, as the sidecar opens it.
        run_prefix: The run's folder below the store, ``deployment/dag/run/task/map``.
        run_label: ``dag_id.task_id`` for people and labels; never a path.
        generation, attempt: Which life this is.
        allocation: Offer and nodes.
        command: Entrypoint, already rendered.
        env: Plain variables.
        secret_env: Variables whose values are secrets. Never written to disk, rendered or logged.
        spec: The frozen, resolved spec as JSON.
        spec_name: Name of its file in the run's folder, ``spec-<hash>.json``: what the sidecar reads.
        store_options: Connection options of the store that hold no secret.
        store_login: How the sidecar opens the store where its machine has no identity of its own.
        deadline_s: Each machine ends itself after so many billed seconds and the grace of its last save;
            None: no deadline.
        grace_s: Seconds between a graceful stop and the kill.
        python: Interpreter of the command's own environment on this machine, for the local backend; its
            folder is first on the command's PATH. None: that of this process. Never the sidecar's.
        restore_from: URI of another run's checkpoint that the first attempt begins from.
    """

    store_url: str
    run_prefix: str
    run_label: str
    generation: int
    attempt: int
    allocation: Allocation
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    spec_name: str = ""
    store_options: Mapping[str, Any] = field(default_factory=dict)
    store_login: StoreLogin = field(default_factory=StoreLogin)
    deadline_s: float | None = None
    grace_s: float = 30.0
    python: str | None = None
    restore_from: str | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """Names what was started, for any process that can reach it.

    Attributes:
        backend: ``local``, ``kubernetes``, ``vm``.
        name: Unique name that carries run, generation and attempt.
        details: JSON of the backend's own (host, boot id, pid, start time; uid; instance ids).
    """

    backend: str
    name: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it stands in events and trigger arguments."""
        return {"backend": self.backend, "name": self.name, "details": dict(self.details)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Handle:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: A field is missing.
        """
        try:
            return cls(str(body["backend"]), str(body["name"]), dict(body.get("details", {})))
        except (KeyError, TypeError) as err:
            raise ValueError(f"handle: {err!r}") from err


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How a node ended, as its backend tells it.

    Attributes:
        exit_code: 0 to 255; None when a signal ended it, or nothing of it ran.
        signal: Signal number; None when it exited.
        reason: The row of :data:`~envscaler_airflow.run.outcomes.OUTCOMES`.
        detail: One line for people.

    Raises:
        ValueError: The table has no such row.
    """

    exit_code: int | None
    signal: int | None
    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        """Refuse an end that the owner has no recovery for."""
        if self.reason not in OUTCOMES:
            raise ValueError(f"reason must be a row of OUTCOMES, got {self.reason!r}")

    def of_node(self, node: int) -> NodeStatus:
        """The status of *node*, which ended so."""
        state: NodeState = "lost" if self.reason == "lost" else "ended"
        return NodeStatus(node, state, self.exit_code, self.signal, self.reason, self.detail)


SILENT = "silent"
"""Reason of a ``lost`` node whose machine does not answer: it may live on, cut off from the backend alone."""
QUIET_S = 180.0
"""A node whose status in the store changed within so many seconds is not lost for silence. Chosen: twelve
times the interval of statuses."""


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """All nodes of an attempt, as the backend sees them now."""

    nodes: tuple[NodeStatus, ...]

    @property
    def is_over(self) -> bool:
        """True when every node is ended or lost: nothing of it runs any more, and that is known."""
        return bool(self.nodes) and all(node.state in ("ended", "lost") for node in self.nodes)

    @property
    def waits(self) -> str:
        """What nodes that do not run yet wait for, on one line; "" when none does, or nobody knows."""
        told: dict[str, list[str]] = {}
        for one in self.nodes:
            if one.state in ("pending", "starting") and one.detail:
                words = f"{one.reason}: {one.detail}" if one.reason else one.detail
                told.setdefault(words, []).append(str(one.node))
        if len(self.nodes) == 1:
            return "".join(told)
        return "; ".join(f"node {', '.join(nodes)}: {words}" for words, nodes in told.items())


@dataclass(frozen=True, slots=True)
class UsageInterval:
    """Billed time of one node by the provider's own timestamps, seconds since the epoch.

    Attributes:
        node: Index.
        start: When it was allocated.
        end: When it was released; None while it is allocated.
        now: The provider's own time of its answer, up to which an open interval is billed; None where the
            provider does not report it.
    """

    node: int
    start: float
    end: float | None
    now: float | None = None


class Backend(Protocol):
    """Starts, watches and stops attempts. Every method may be repeated."""

    name: str

    def offers(self) -> tuple[Offer, ...]:
        """What can be had here, priced."""

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """What ``submit`` would send, as JSON and without secrets. Pure; golden-tested."""

    def submit(self, request: AttemptRequest) -> Handle:
        """Start the attempt, or adopt it when this very attempt was started before.

        Raises:
            CapacityError: None to be had now.
            BackendError: The system said no; ``.transient`` tells whether to try again.
            SpecError: The request asks for what this backend can never give.
        """

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle of this attempt if ``submit`` got as far as starting it, else None."""

    def observe(self, handle: Handle) -> AttemptStatus:
        """State of every node. What cannot be told is ``unknown``.

        Raises:
            BackendError: No answer at all.
        """

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask for a graceful end, and kill after *grace_s* seconds; returns at once.

        ``grace_s=0`` kills now. Stopping what is gone is no error.
        """

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """Billed intervals so far, one or more for each node."""

    def logs(self, handle: Handle, *, since: Mapping[int, int] | None = None) -> Iterator[tuple[int, bytes]]:
        """What the nodes printed, ``(node, bytes)``, from byte offset *since* of each node.

        For people near the machine; the run's logs are in the store.
        """

    def release(self, handle: Handle) -> None:
        """Remove what an ended attempt left on the machine. Never touches a live one."""


@runtime_checkable
class OffersLater(Protocol):
    """A backend that waits for machines which take nothing now."""

    def later_offers(self) -> tuple[Offer, ...]:
        """Offers of these machines, for a stage that none of :meth:`Backend.offers` fits. Raises as that."""


@runtime_checkable
class SharesWatch(Protocol):
    """A backend through which a process that looks at many attempts can look at all of them at once."""

    def share_watch(self) -> None:
        """From now on look through the one watch that this process keeps."""


@runtime_checkable
class HasAddress(Protocol):
    """A backend that another process may reach elsewhere than at the usual place."""

    def address(self) -> dict[str, Any]:
        """Arguments of ``create_backend`` by which a later process reaches the same place; no secrets."""


@runtime_checkable
class MendsNodes(Protocol):
    """A backend that can have lost nodes of a live attempt made again."""

    def mend(self, handle: Handle, *, quiet_s: Mapping[int, float]) -> tuple[str, ...]:
        """Delete lost nodes so that the backend replaces them; returns their names. For the owner alone.

        *quiet_s* is how long each node's status in the store has not changed, by a watcher's clock. A node
        that is silent to the backend alone, or whose state is unknown, is not deleted.
        """


@runtime_checkable
class ResizesInPlace(Protocol):
    """A backend that can change CPU and memory of running nodes."""

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Ask for so much per node; None leaves a resource as it is."""

    def resized(self, handle: Handle) -> ResizeState:
        """How far that is, the worst of all nodes."""


@runtime_checkable
class RescalesInPlace(Protocol):
    """A backend that can add and remove nodes of a running attempt whose launcher takes that."""

    def rescale(self, handle: Handle, nodes: int) -> Handle:
        """Let it have *nodes* nodes, of which the first stay what they are; its handle from now on.

        A repeat changes nothing. Nodes that come show as pending under the new handle.

        Raises:
            CapacityError: None to be had now; nothing was changed.
            BackendError: No answer when ``.transient``; else this attempt can never be changed so.
        """


@runtime_checkable
class MarksNodes(Protocol):
    """A backend where somebody may say which nodes are to go first."""

    def removable(self, handle: Handle) -> frozenset[int]:
        """Nodes that are marked so.

        Raises:
            BackendError: No answer.
        """


@runtime_checkable
class RunsMixed(Protocol):
    """A backend whose attempts may have nodes of two offers.

    Attributes:
        runs_mixed: True.
    """

    runs_mixed: bool


@runtime_checkable
class CountsFree(Protocol):
    """A backend that can tell how much more can be had right now."""

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> Mapping[str, int]:
        """Nodes of each offer that are available at once, by its name; absent: unknown.

        Of each offer alone, beside everything that runs but *without*: what an attempt that is to be moved
        uses is free for the one that follows it.

        Raises:
            BackendError: No answer.
        """
