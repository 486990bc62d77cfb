"""The interface between the owner and the system that runs an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import OUTCOMES, Handle, NodeState, NodeStatus
from envscaler_airflow.run.cost import UsageInterval

if TYPE_CHECKING:
    from envscaler_airflow.envspec.models import EnvSpec
    from envscaler_airflow.images.artefacts import Artefact
    from envscaler_airflow.launch import Launch

SIDECAR_IMAGE = "envscaler/sidecar:latest"
"""Name of the sidecar image where no other is given."""
ResizeState = Literal["going", "done", "deferred", "infeasible"]
"""``deferred``: no capacity now. ``infeasible``: never possible here; the next attempt gets it."""


def _nothing() -> Launch:
    """Nothing to run; imported here, since each process of a node imports this module and no spec."""
    from envscaler_airflow.launch import Launch  # noqa: PLC0415  (half of a node's start)

    return Launch()


@dataclass(frozen=True, slots=True)
class StoreLogin:
    """Credentials of the run store's connection, for the sidecar of a machine that has none.

    Attributes:
        variables: Variables of the SDK, with their values. Never written to disk, rendered or logged.
        profile: Name of a profile in the files of the worker's user; None without one.
        refusal: Why the connection's credentials cannot be sent to a machine; "" where they can.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    profile: str | None = None
    refusal: str = ""

    def check(self, instead: str) -> None:
        """Refuse to start a machine that could not open the store; *instead* is what to write.

        Raises:
            SpecError: The connection's credentials cannot be sent to a machine.
        """
        if self.refusal:
            raise SpecError(f"{self.refusal}: {instead}")


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """What a backend needs to start one attempt. Secrets are in ``secret_env`` and ``store_login``.

    Attributes:
        store_url: Run store, as the sidecar opens it.
        run_prefix: The run's folder below the store, ``deployment/dag/run/task/map``.
        run_label: ``dag_id.task_id`` for messages and labels; never a path.
        generation, attempt: Their numbers.
        allocation: Offer and nodes.
        launch: What every node runs; by default nothing, which is enough to find an attempt.
        secret_env: Variables whose values are secrets. Never written to disk, rendered or logged.
        store_options: Connection options of the store that contain no secret.
        store_login: How the sidecar opens the store where its machine has no identity of its own.
        deadline_s: Each machine stops itself after this many billed seconds plus the grace of its last save;
            None: no deadline.
        grace_s: Seconds between a graceful stop and the kill.
        python: Interpreter of the command's own environment on this machine, for the local backend; its
            folder is first on the command's PATH. None: that of this process. Never the sidecar's.
        restore_from: URI of another run's checkpoint that the first attempt starts from.
    """

    store_url: str
    run_prefix: str
    run_label: str
    generation: int
    attempt: int
    allocation: Allocation
    launch: Launch = field(default_factory=_nothing)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    store_options: Mapping[str, Any] = field(default_factory=dict)
    store_login: StoreLogin = field(default_factory=StoreLogin)
    deadline_s: float | None = None
    grace_s: float = 30.0
    python: str | None = None
    restore_from: str | None = None

    def env(self, *, spool: str, cpus: float, local: Callable[[str], str] = str) -> dict[str, str]:
        """Variables that the backend sets for the training, whose paths *local* maps to those of the node."""
        return {
            "ENVSCALER_SPOOL": spool,
            "ENVSCALER_RUN": self.run_prefix,
            "ENVSCALER_GENERATION": str(self.generation),
            "ENVSCALER_ATTEMPT": str(self.attempt),
            "ENVSCALER_NODES": str(self.allocation.nodes),
            "ENVSCALER_CPUS": str(max(1, int(cpus))),
        } | self.launch.paths.env(local)

    def sidecar_options(self, spool: str, layout: str, **of_node: int) -> list[str]:
        """Options of the sidecar: which attempt it serves, and what the backend adds *of_node*."""
        values = {
            "spool": spool,
            "store": self.store_url,
            "prefix": self.run_prefix,
            "generation": self.generation,
            "attempt": self.attempt,
            "nodes": self.allocation.nodes,
            "layout": layout,
        } | {name.replace("_", "-"): value for name, value in of_node.items()}
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How a node ended, as its backend reports it.

    Attributes:
        exit_code: 0 to 255; None when a signal ended it, or it never ran.
        signal: Signal number; None when it exited.
        reason: A row of :data:`~envscaler_airflow.run.outcomes.OUTCOMES`.
        detail: One human-readable line.

    Raises:
        ValueError: The table has no such row.
    """

    exit_code: int | None
    signal: int | None
    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        """Refuse a reason that the owner has no recovery for."""
        if self.reason not in OUTCOMES:
            raise ValueError(f"reason must be a row of OUTCOMES, got {self.reason!r}")

    def of_node(self, node: int) -> NodeStatus:
        """The status of *node*, which ended this way."""
        state: NodeState = "lost" if self.reason == "lost" else "ended"
        return NodeStatus(node, state, self.exit_code, self.signal, self.reason, self.detail)


SILENT = "silent"
"""Reason of a ``lost`` node whose machine does not answer: it may keep running, cut off from the backend."""
QUIET_S = 180.0
"""A node whose status in the store changed within this many seconds is not treated as lost. Chosen: twelve
times the status interval.
"""


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """All nodes of an attempt, as the backend sees them now."""

    nodes: tuple[NodeStatus, ...]

    @property
    def is_over(self) -> bool:
        """True when every node is known to have ended or to be lost."""
        return bool(self.nodes) and all(node.state in ("ended", "lost") for node in self.nodes)

    @property
    def waits(self) -> str:
        """What pending nodes wait for, on one line; "" when no node waits, or the reason is unknown."""
        told: dict[str, list[str]] = {}
        for one in self.nodes:
            if one.state in ("pending", "starting") and one.detail:
                words = f"{one.reason}: {one.detail}" if one.reason else one.detail
                told.setdefault(words, []).append(str(one.node))
        if len(self.nodes) == 1:
            return "".join(told)
        return "; ".join(f"node {', '.join(nodes)}: {words}" for words, nodes in told.items())


class Backend(Protocol):
    """Starts, watches and stops attempts. Every method may be repeated."""

    name: str

    def offers(self) -> tuple[Offer, ...]:
        """The offers that are available here, with prices."""

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """What ``submit`` would send, as JSON without secrets. Pure; golden-tested."""

    def submit(self, request: AttemptRequest) -> Handle:
        """Start the attempt, or adopt it when it was already started.

        Raises:
            CapacityError: No capacity now.
            BackendError: The system refused; ``.transient`` says whether to retry.
            SpecError: The request needs something that this backend never provides.
        """

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle of this attempt if ``submit`` got as far as starting it, else None."""

    def observe(self, handle: Handle) -> AttemptStatus:
        """State of every node; ``unknown`` where the backend cannot determine it.

        Raises:
            BackendError: No answer at all.
        """

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Request a graceful stop, and kill after *grace_s* seconds; returns immediately.

        ``grace_s=0`` kills immediately. Stopping an attempt that no longer exists does nothing.
        """

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """Billed intervals so far, one or more for each node."""

    def release(self, handle: Handle) -> None:
        """Remove what an ended attempt left on the machine. Never touches a running one."""


@runtime_checkable
class OffersLater(Protocol):
    """A backend that can wait for machines that accept no work now."""

    def later_offers(self) -> tuple[Offer, ...]:
        """Offers of these machines, for a stage that fits none of :meth:`Backend.offers`; raises the same."""


@runtime_checkable
class PreparesSpecs(Protocol):
    """A backend that completes a spec before a run is begun with it."""

    def prepare(self, spec: EnvSpec) -> EnvSpec:
        """*spec* with what its attempts need here, such as the name of an image.

        Raises:
            SpecError: The spec lacks it, and so does the deployment.
        """


@runtime_checkable
class ShowsAttempts(Protocol):
    """A backend that shows what it would start without a request to its system, for `envscaler render`."""

    def sample_offer(self, spec: EnvSpec) -> Offer:
        """An offer of any machines that have what *spec* requests."""

    def artefacts(self, request: AttemptRequest) -> list[Artefact]:
        """What ``submit`` sends for *request*, human-readable. Raises SpecError if it would refuse it."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A part of an attempt that exists and was not released.

    Attributes:
        handle: Handle of that part.
        prefix: Folder of its run in the store.
        generation, attempt: Numbers of the attempt.
        age_s: Time since it was created, by the backend's clock, seconds.
        runs: True when something of it may still run.
    """

    handle: Handle
    prefix: str
    generation: int
    attempt: int
    age_s: float = field(compare=False)
    runs: bool


@runtime_checkable
class ListsLeftovers(Protocol):
    """A backend where `reap` finds attempts that no run owns."""

    def leftovers(self, store_url: str) -> Iterator[Leftover]:
        """Everything of runs of the store at *store_url* that exists and was not released.

        Raises:
            BackendError: No answer, or the backend does not report the time.
        """

    def remove(self, handle: Handle) -> None:
        """Remove what the handle of a leftover names. Raises BackendError."""


@runtime_checkable
class SharesWatch(Protocol):
    """A backend that lets a process watch many attempts through one shared watch."""

    def share_watch(self) -> None:
        """Use this process's shared watch from now on."""


@runtime_checkable
class HasAddress(Protocol):
    """A backend that may be at another address than the default."""

    def address(self) -> dict[str, Any]:
        """Settings with which a later process reaches the same address; no secrets."""


@runtime_checkable
class ReplacesNodes(Protocol):
    """A backend that can replace lost nodes of a running attempt."""

    def replace_nodes(self, handle: Handle, *, quiet_s: Mapping[int, float]) -> tuple[str, ...]:
        """Delete lost nodes so that the backend replaces them; returns their names. Only the owner calls it.

        *quiet_s* is how long each node's status in the store has not changed, by a watcher's clock. A node
        that only the backend cannot reach, or whose state is unknown, is not deleted.
        """


@runtime_checkable
class ResizesInPlace(Protocol):
    """A backend that can change CPU and memory of running nodes."""

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Request these amounts per node; None leaves a resource unchanged."""

    def resized(self, handle: Handle) -> ResizeState:
        """The progress of that request: the worst state of all nodes."""


NodeFault = Literal["lose-node", "kill-sidecar", "oom", "stall", "store-away"]
"""What can be broken on a node: its machine, its sidecar, its memory, its training, its sidecar's store."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that a backend has injected.

    Attributes:
        did: What was done, on one line.
        undo: Takes it back; does nothing if the node has ended since.
        by_hand: Command that takes it back if this process is killed first; "" if it ends by itself.
        lasts_s: Seconds until the fault ends by itself; 0 for one that is over at once or is taken back.
    """

    did: str
    undo: Callable[[], None] = lambda: None
    by_hand: str = ""
    lasts_s: float = 0.0


@runtime_checkable
class InjectsFaults(Protocol):
    """A backend that can break a node of a running attempt on purpose, for `envscaler drill`."""

    def obstacle(self, handle: Handle, fault: NodeFault, *, node: int) -> str:
        """Why *fault* cannot be injected into *node* from this process; "" if it can. Changes nothing.

        Raises:
            BackendError: No answer.
        """

    def inject(self, handle: Handle, fault: NodeFault, *, node: int) -> Injection:
        """Break *node*.

        Raises:
            BackendError: It was not injected; there may be an obstacle.
        """


@runtime_checkable
class RescalesInPlace(Protocol):
    """A backend that can add and remove nodes of a running attempt whose launcher supports it."""

    def rescale(self, handle: Handle, nodes: int) -> Handle:
        """Change it to *nodes* nodes without touching the first ones; returns its new handle.

        Repeating the call changes nothing. Added nodes are pending under the new handle.

        Raises:
            CapacityError: No capacity now; nothing was changed.
            BackendError: No answer if ``.transient``; otherwise this attempt can never be rescaled.
        """


@runtime_checkable
class MarksNodes(Protocol):
    """A backend where a user can mark the nodes to remove first."""

    def removable(self, handle: Handle) -> frozenset[int]:
        """Indexes of the marked nodes.

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
    """A backend that can count the nodes that are available right now."""

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> Mapping[str, int]:
        """Nodes of each offer that are available now, by its name; absent: unknown.

        Each offer is counted by itself, beside everything that runs except *without*: an attempt that moves
        frees its nodes for the next one.

        Raises:
            BackendError: No answer.
        """
