"""What an owner asks of a running attempt: to stop, or to change in place; and what it then waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from envscaler_agent.protocol import Control, Progress
from envscaler_airflow.backends.base import MarksNodes
from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner import in_place_change, limits
from envscaler_airflow.owner.in_place_change import who_leaves
from envscaler_airflow.owner.ownership import Owner, live_of
from envscaler_airflow.owner.stage import Waiting, Watching
from envscaler_airflow.owner.usage import spans_of
from envscaler_airflow.planning import Allocation
from envscaler_airflow.run import Action, AttemptState, RunState
from envscaler_airflow.run.event_bodies import Alignment, AttemptStopping, Changed, ChangeUndone, Leaving

RELEASE_AGAIN_S = 600.0
"""Between two tries to release an ended attempt while the next one runs, seconds. Chosen: some seconds of
a worker six times an hour, for machines that may still be billed."""
OVERDUE_MARGIN_S = 60.0
"""Wait beyond alignment and grace before the kill, seconds. Chosen: the last uploads of a node."""


class Asking(Owner):
    """An owner with a running attempt."""

    def _stopping(
        self, state: RunState, action: Action, align: Alignment, target: Allocation | None = None
    ) -> AttemptStopping:
        """Return the request to save and stop, for *action*, with the grace that its checkpoints need."""
        live = live_of(state)
        said = self._run.status(live.key)
        if said is not None and action.why == "stalled":
            said = replace(said, progress=Progress())  # no further step is expected of it
        return AttemptStopping(
            generation=live.generation,
            attempt=live.number,
            why=action.why,
            reason=action.reason,
            align=align,
            grace_s=limits.grace_s(state, said),
            request=None if action.request is None else action.request.number,
            target=target,
        )

    def _ask_to_go(self, state: RunState) -> RunState:
        """Write the control of a stopping attempt; every execution repeats it until the attempt has ended."""
        live, spec = live_of(state), self._spec(state)
        before = self._run.control(live.key)
        control = Control(
            sequence=live.stop_number,
            action="stop" if live.stop_why == "stalled" else "leave",
            align=live.stop_align,
            align_timeout_s=spec.checkpoint_align_timeout_s,
            grace_s=live.stop_grace_s,
            reason=live.stop_reason,
            candidates=None if before is None else before.candidates,
            restore_from=state.begun.restore_from,
            orphan_after_s=self._spec(state).failure.orphan_after_s,
        )
        self._check_still_owner(state)
        self._run.write_control(live.key, control)
        return state

    def _leaving(self, live: AttemptState, target: Allocation) -> tuple[Leaving, ...]:
        """Return the nodes to remove if *target* has fewer, by what each node reports of its steps."""
        fewer = live.allocation.nodes - target.nodes
        if fewer <= 0:
            return ()
        step_s = {}
        for node in range(live.allocation.nodes):
            said = self._run.status(live.key, node)
            if said is not None and said.progress.step_time_s is not None:
                step_s[node] = said.progress.step_time_s
        return who_leaves(live.allocation, fewer, removable=self._marked(live), step_s=step_s)

    def _would_begin_anew(self, live: AttemptState) -> bool:
        """Return True if a Session restores the training: restarting several nodes repeats the attempt.

        A Session reports the seconds of its saves, even before the first.
        """
        said = self._run.status(live.key)
        return said is not None and said.progress.save_s is not None

    def _marked(self, live: AttemptState) -> frozenset[int]:
        """Nodes marked for removal first; none if the backend cannot mark nodes or does not answer."""
        if live.handle is None or not isinstance(self._backend, MarksNodes):
            return frozenset()
        try:
            return self._backend.removable(live.handle)
        except BackendError:
            return frozenset()

    def _change(self, state: RunState, action: Action) -> RunState | Waiting:
        """Advance a change in place: it is done, undone, awaited, or left to the next attempt."""
        live = live_of(state)
        change = live.change
        if change is None:
            raise RuntimeError("nothing is being changed")
        self._check_still_owner(state)
        sizes = in_place_change.sizes_of(self._spec(state), change.target, had_bytes=live.memory_bytes)
        is_overdue = bool(action.extra.get("is_overdue"))
        got = in_place_change.carry_out(self._backend, live, change, sizes, is_overdue=is_overdue)
        if got.state == "going":
            return self._waiting_for_change(state, got)
        reason = f"{change.reason}; {got.reason}" if got.reason else change.reason
        if got.state == "move":
            moved = replace(action, why="move", reason=reason)
            body = self._stopping(state, moved, self._spec(state).checkpoint_align, change.target)
            after = self._append(state, body)
            return self._ask_to_go(after) if after.live and after.live.phase == "stopping" else after
        key: dict[str, Any] = {"generation": live.generation, "attempt": live.number, "kind": change.kind}
        if got.state == "undone":
            return self._append(state, ChangeUndone(**key, reason=reason))
        said = self._run.status(live.key)
        changed = Changed(
            **key,
            reason=reason,
            target=change.target,
            handle=got.handle,
            vcpus=got.sizes.vcpus,
            memory_bytes=got.sizes.memory_bytes,
            step=None if said is None else said.progress.step,
        )
        return self._append(state, changed)

    def _waiting_for_change(self, state: RunState, got: in_place_change.ChangeResult) -> Waiting:
        live, waiting = live_of(state), self._waiting(state, got.reason)
        assert live.change is not None
        watching = replace(
            waiting.watching,
            changing=live.change.kind,
            age=f"change-{live.change.number}",
            overdue_after_s=in_place_change.CHANGE_S,
        )
        if got.handle is not None:
            watching = replace(watching, handle=got.handle.to_dict(), nodes=live.change.target.nodes)
        return Waiting(watching, got.reason)

    def _waiting(self, state: RunState, reason: str) -> Waiting:
        live = live_of(state)
        stopping = live.phase == "stopping"
        overdue = None
        if stopping:
            align = self._spec(state).checkpoint_align_timeout_s if live.stop_align == "epoch" else 0.0
            overdue = align + live.stop_grace_s + OVERDUE_MARGIN_S
        watching = Watching(
            number=state.number,
            generation=live.generation,
            attempt=live.number,
            nodes=live.allocation.nodes,
            handle=None if live.handle is None else live.handle.to_dict(),
            stopping=stopping,
            age=f"stopping-g{live.generation}-a{live.number}" if stopping else "",
            overdue_after_s=overdue,
            usd_left=None if stopping else self._usd_left(state, live),
            checkpoint_s=limits.measured_s(state),
            release_after_s=RELEASE_AGAIN_S if any(one.unreleased for one in state.attempts) else None,
            orphan_after_s=self._spec(state).failure.orphan_after_s,
            spans=[span.to_dict() for span in spans_of(live)],
            started_at=live.started_at,
        )
        return Waiting(watching, reason)
