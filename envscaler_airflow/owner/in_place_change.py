"""Carry out an accepted move: in place, at the next start, or by a new attempt now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from envscaler_airflow.backends.base import Backend, MarksNodes, RescalesInPlace, ResizesInPlace
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.owner import stop
from envscaler_airflow.owner.choose import least_memory_bytes
from envscaler_airflow.owner.owned_run import OwnedRun, live_of
from envscaler_airflow.owner.stage import Waiting
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.run import Action, AttemptState, Change, Handle, RunState
from envscaler_airflow.run.event_bodies import Changed, ChangeUndone, NodeDrain
from envscaler_airflow.scaling import all_policies


def order_of_drain(
    allocation: Allocation,
    count: int,
    *,
    removable: Collection[int] = (),
    step_s: Mapping[int, float] | None = None,
) -> tuple[NodeDrain, ...]:
    """Return the *count* nodes to remove, in that order; never node 0, which reports for the training.

    Order: nodes marked removable; then spot before on-demand; then the slowest; then the highest index.

    Args:
        allocation: What the attempt has.
        count: How many to remove; fewer than the attempt has.
        removable: Nodes that a user or system marked for removal.
        step_s: Seconds of a step by node, as far as they are known.
    """
    if not 0 <= count < allocation.nodes:
        raise ValueError(f"count must be >= 0 and < {allocation.nodes}, got {count!r}")
    speeds = step_s or {}
    slowest = max(speeds.values(), default=0.0)

    def rank(node: int) -> tuple[bool, bool, float, int]:
        is_spot = allocation.offer_of(node).capacity_type == "spot"
        return (node not in removable, not is_spot, -speeds.get(node, 0.0), -node)

    chosen = sorted(range(1, allocation.nodes), key=rank)[:count]
    return tuple(NodeDrain(node, _why(allocation, node, removable, speeds, slowest)) for node in chosen)


def _why(
    allocation: Allocation,
    node: int,
    removable: Collection[int],
    speeds: Mapping[int, float],
    slowest: float,
) -> str:
    if node in removable:
        return "it is marked removable"
    if allocation.is_mixed and allocation.offer_of(node).capacity_type == "spot":
        return "it is spot, and others are on demand"
    if node in speeds and speeds[node] == slowest and len(set(speeds.values())) > 1:
        return f"it is the slowest: {speeds[node]:.3g} s a step"
    if node in speeds and len(set(speeds.values())) > 1:
        return f"it is among the slowest: {speeds[node]:.3g} s a step"
    return "it is the last, and nothing else tells them apart"


CHANGE_S = 600.0
"""Longest wait for a change in place, seconds. Chosen: as long as a node may be silent."""

Way = Literal["move", "resize", "rescale", "next-start"]


def way_of(spec: EnvSpec, live: AttemptState, target: Allocation, backend: Backend) -> Way:
    """Return how the attempt gets *target*.

    More CPU or memory on the same nodes changes in place if the policy changes in place and the backend can.
    Less of them waits for the next start, since removing it now gains nothing. Another number of the same
    nodes changes in place if the launcher is elastic and the backend can. Everything else needs a new
    attempt. That includes more CPUs under another policy: a training that sized itself by its CPUs at the
    start would not use them.
    """
    here = live.allocation
    if _changes_in_place(spec) and _is_resize(here, target):
        if _is_no_more(here.offer, target.offer):
            return "next-start"
        return "resize" if isinstance(backend, ResizesInPlace) else "move"
    is_rescale = here.offer == target.offer and not here.is_mixed and not target.is_mixed
    if is_rescale and _is_elastic(spec) and isinstance(backend, RescalesInPlace):
        return "rescale"
    return "move"


def _is_resize(here: Allocation, target: Allocation) -> bool:
    if here.is_mixed or target.is_mixed or here.nodes != target.nodes or here.name == target.name:
        return False
    return _kind(here.offer) == _kind(target.offer)


def _kind(offer: Offer) -> Offer:
    """Return *offer* without its size: ``node:cpu-1`` and ``node:cpu-2`` are shares of one machine."""
    kind = offer.instance_type.partition(":")[0] if ":" in offer.instance_type else offer.instance_type
    return replace(offer, instance_type=kind, vcpus=1.0, memory_gib=1.0, usd_per_hour=None, price_source="")


def _is_no_more(here: Offer, target: Offer) -> bool:
    return target.vcpus <= here.vcpus and target.memory_gib <= here.memory_gib


def _changes_in_place(spec: EnvSpec) -> bool:
    policy = None if spec.scaling is None else all_policies().get(spec.scaling.policy)
    return policy is not None and policy.changes_in_place


def _is_elastic(spec: EnvSpec) -> bool:
    distributed = spec.distributed
    return distributed is not None and distributed.elastic and distributed.launcher == "torchrun"


@dataclass(frozen=True, slots=True)
class Sizes:
    """CPU and memory per node of an attempt; None: the spec's values."""

    vcpus: float | None = None
    memory_bytes: int | None = None


def sizes_of(spec: EnvSpec, allocation: Allocation, *, had_bytes: int | None = None) -> Sizes:
    """Return the whole share, within the spec's limits; memory may stay at *had_bytes* if that is more."""
    limits = spec.resources.alternatives[0].limits
    vcpus = min(part.offer.vcpus for part in allocation.parts)
    memory = least_memory_bytes(allocation)
    if limits.cpu_cores is not None:
        vcpus = min(vcpus, limits.cpu_cores)
    if limits.memory_bytes is not None:
        memory = min(memory, max(limits.memory_bytes, had_bytes or 0))
    return Sizes(vcpus, memory)


def sizes_after(spec: EnvSpec, first: Allocation | None, allocation: Allocation) -> Sizes:
    """Sizes of an attempt whose policy changes in place, once it chose another share than the first."""
    if not _changes_in_place(spec) or first is None or first.name == allocation.name:
        return Sizes()
    return sizes_of(spec, allocation)


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """Progress of a change.

    ``done``. ``going``: check again. ``undone``: the attempt is unchanged, and the reason says why. ``move``:
    not possible in place, or not now; the next attempt gets the target.

    Attributes:
        state: See above.
        reason: For the event.
        handle: The attempt's new handle; None: unchanged.
        sizes: The new ones after a resize.
    """

    state: Literal["done", "going", "undone", "move"]
    reason: str = ""
    handle: Handle | None = None
    sizes: Sizes = Sizes()


def carry_out(
    backend: Backend, live: AttemptState, change: Change, sizes: Sizes, *, is_overdue: bool
) -> ChangeResult:
    """Ask the backend for *change*, possibly again, and return its progress.

    Raises:
        BackendError: No answer; try again.
    """
    if live.handle is None:
        raise RuntimeError("only a started attempt can be changed")
    if change.kind == "resize":
        return _resize(backend, live.handle, sizes, is_overdue=is_overdue)
    return _rescale(backend, live.handle, live, change, is_overdue=is_overdue)


def _resize(backend: Backend, handle: Handle, sizes: Sizes, *, is_overdue: bool) -> ChangeResult:
    if not isinstance(backend, ResizesInPlace):
        return ChangeResult("move", "nothing here can be resized in place")
    try:
        state = backend.resize(handle, vcpus=sizes.vcpus, memory_bytes=sizes.memory_bytes)
    except BackendError as err:
        if err.transient:
            raise
        return ChangeResult("move", f"not in place: {err}")
    if state == "done":
        return ChangeResult("done", sizes=sizes)
    if state == "going" and not is_overdue:
        return ChangeResult("going", "the machine is being resized")
    why = f"it is not done within {CHANGE_S:.0f} s" if state == "going" else f"in place it is {state}"
    return ChangeResult("move", why)


def _rescale(
    backend: Backend, handle: Handle, live: AttemptState, change: Change, *, is_overdue: bool
) -> ChangeResult:
    if not isinstance(backend, RescalesInPlace):
        return ChangeResult("move", "nothing here can be rescaled in place")
    nodes = change.target.nodes
    try:
        found = backend.rescale(handle, nodes)
    except CapacityError as err:
        return ChangeResult("undone", str(err))
    except BackendError as err:
        if err.transient:
            raise
        return ChangeResult("move", f"not in place: {err}")
    seen = backend.observe(found).nodes
    missing = next((one.detail for one in seen if one.state == "pending" and one.reason == "capacity"), None)
    if missing is None and is_overdue and any(one.state != "running" for one in seen):
        missing = f"not all nodes ran within {CHANGE_S:.0f} s"
    if missing is not None:
        return _undo(backend, handle, live, missing)
    if all(one.state == "running" for one in seen):
        return ChangeResult("done", handle=found)
    return ChangeResult("going", f"{nodes} nodes are awaited", handle=found)


def _undo(backend: RescalesInPlace, handle: Handle, live: AttemptState, missing: str) -> ChangeResult:
    """Restore the attempt's previous nodes; if that also fails, the target is left to the next attempt."""
    try:
        backend.rescale(handle, live.allocation.nodes)
    except (CapacityError, BackendError) as err:
        if isinstance(err, BackendError) and err.transient:
            raise
        return ChangeResult("move", f"neither available nor undone: {missing}; {err}")
    return ChangeResult("undone", f"not available: {missing}")


def are_last(drained: Collection[NodeDrain], live: AttemptState, target: Allocation) -> bool:
    """True if the nodes to remove are the last ones, or there are none."""
    return {item.node for item in drained} == set(range(target.nodes, live.allocation.nodes))


def change(owned: OwnedRun, state: RunState, action: Action) -> RunState | Waiting:
    """Advance a change in place: it is done, undone, awaited, or left to the next attempt."""
    live = live_of(state)
    change = live.change
    if change is None:
        raise RuntimeError("nothing is being changed")
    owned.check_still_owner(state)
    sizes = sizes_of(owned.spec(state), change.target, had_bytes=live.memory_bytes)
    is_overdue = bool(action.extra.get("is_overdue"))
    got = carry_out(owned.backend, live, change, sizes, is_overdue=is_overdue)
    if got.state == "going":
        return _waiting_for_change(owned, state, got)
    reason = f"{change.reason}; {got.reason}" if got.reason else change.reason
    if got.state == "move":
        moved = replace(action, stop_reason="move", reason=reason)
        body = stop.stop_event(owned, state, moved, owned.spec(state).checkpoint_align, change.target)
        return stop.record_stop(owned, state, body)
    key: dict[str, Any] = {"generation": live.generation, "attempt": live.number, "kind": change.kind}
    if got.state == "undone":
        return owned.append(state, ChangeUndone(**key, reason=reason))
    status = owned.run.status(live.key)
    changed = Changed(
        **key,
        reason=reason,
        target=change.target,
        handle=got.handle,
        vcpus=got.sizes.vcpus,
        memory_bytes=got.sizes.memory_bytes,
        step=None if status is None else status.progress.step,
    )
    return owned.append(state, changed)


def _waiting_for_change(owned: OwnedRun, state: RunState, got: ChangeResult) -> Waiting:
    live, waiting = live_of(state), stop.waiting(owned, state, got.reason)
    assert live.change is not None
    watching = replace(
        waiting.watching,
        changing=live.change.kind,
        age=f"change-{live.change.number}",
        overdue_after_s=CHANGE_S,
    )
    if got.handle is not None:
        watching = replace(watching, handle=got.handle, nodes=live.change.target.nodes)
    return Waiting(watching, got.reason)


def nodes_to_drain(owned: OwnedRun, live: AttemptState, target: Allocation) -> tuple[NodeDrain, ...]:
    """Return the nodes to remove if *target* has fewer, by what each node reports of its steps."""
    fewer = live.allocation.nodes - target.nodes
    if fewer <= 0:
        return ()
    step_s = {}
    for node in range(live.allocation.nodes):
        status = owned.run.status(live.key, node)
        if status is not None and status.progress.step_time_s is not None:
            step_s[node] = status.progress.step_time_s
    return order_of_drain(live.allocation, fewer, removable=_marked(owned, live), step_s=step_s)


def has_session(owned: OwnedRun, live: AttemptState) -> bool:
    """Return True if a Session restores the training: restarting several nodes repeats the attempt.

    A Session reports the seconds of its saves, even before the first.
    """
    status = owned.run.status(live.key)
    return status is not None and status.progress.save_s is not None


def _marked(owned: OwnedRun, live: AttemptState) -> frozenset[int]:
    """Nodes marked for removal first; none if the backend cannot mark nodes or does not answer."""
    if live.handle is None or not isinstance(owned.backend, MarksNodes):
        return frozenset()
    try:
        return owned.backend.removable(live.handle)
    except BackendError:
        return frozenset()
