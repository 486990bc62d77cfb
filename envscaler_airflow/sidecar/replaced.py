"""All nodes of an attempt continue from one checkpoint once the pod of one was replaced.

The command runs on in the other pods: its launcher waits for the new pod, then starts every worker again.
Node 0 sees the new claim, chooses the newest checkpoint of the attempt, and names it in its status with the
claims that it knows. Every node fetches it, rewrites ``start.json``, removes its own saves beyond it, and
names it in turn. The new pod begins its command only when every node has named that choice, or has ended: no
worker can begin from another one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

from envscaler_agent.protocol import Control, Resume
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.sidecar.context import SetupCancelledError, SidecarContext
from envscaler_airflow.sidecar.restore import (
    Restored,
    claims_of,
    counts_for,
    fetch_checkpoint,
    is_regrouped,
    restore,
    status_of,
)
from envscaler_airflow.sidecar.uploads import Checkpoints
from envscaler_airflow.store import checkpoints

CHECK_S = 10.0
"""Time between two checks for a new claim or a new choice. Chosen: a new pod takes longer to be scheduled; a
request per node, against four statuses written per minute.
"""
POLL_S = 2.0
"""Time between two reads of what the others name, by a new pod. Chosen: no other node trains meanwhile."""


def restore_with_others(context: SidecarContext, control: Control) -> Restored | None:
    """Restore, and wait until every node of the attempt has taken the same choice, if there was a new one.

    Raises:
        CheckpointError: No valid checkpoint, as for :func:`~envscaler_airflow.sidecar.restore.restore`.
        SetupCancelledError: The attempt, or node 0, was stopped.
        StoreError: The store did not answer in time.
    """
    found = restore(context, control)
    while (resume := context.memory.state.resume) is not None:
        late = [
            node
            for node in range(context.who.nodes)
            if node != context.who.node and not _has_taken(context, node, resume)
        ]
        if not late:
            break
        context.messages.say("restore", f"waits until nodes {late} have taken the same checkpoint")
        context.ending.wait(POLL_S)
        context.wanted()
        if not _is_newest(context, resume):
            found = restore(context, control)
    context.messages.say("restore", None)
    return found


def _has_taken(context: SidecarContext, node: int, resume: Resume) -> bool:
    """True once the node's newest pod has taken *resume*, or has ended: that one begins nothing any more."""
    claim, status = status_of(context, node)
    if status is None:
        return False
    return status.phase == "ended" or (status.resume == resume and resume.claims[node] == claim)


def _is_newest(context: SidecarContext, resume: Resume) -> bool:
    """False once node 0 has chosen, or must choose, for a later pod; a pod of node 0 may have yet to come."""
    if context.who.node == 0:
        return claims_of(context) == resume.claims
    claim, status = status_of(context, 0)
    if status is None or not counts_for(context.who, status.resume, claim):
        return resume.claims[0] == claim
    return status.resume == resume


class Regroup:
    """A running node's part: node 0 chooses for a new pod, the others follow."""

    def __init__(self, context: SidecarContext, saves: Checkpoints) -> None:
        """Look from now on; *saves* are this node's."""
        self._context, self._saves = context, saves
        self._due = -float("inf")

    def step(self) -> None:
        """Take a new choice, if one is due.

        Raises:
            StoreError, OSError: Not taken yet; the call can be repeated.
            WorkInterruptedError: The sidecar must end; the next one continues.
        """
        context = self._context
        now = context.monotonic()
        if now < self._due or not is_regrouped(context) or context.has_ended():
            return
        self._due = now + CHECK_S
        try:
            resume = self._chosen() if context.who.node == 0 else self._named()
            if resume is not None:
                self._take(resume)
        except (CheckpointError, ProtocolError) as err:  # the training can write to start.json, too
            context.messages.say("replaced", f"cannot continue with the other nodes: {err}")
        except SetupCancelledError:
            pass  # the owner asks for the end: nothing begins again
        else:
            context.messages.say("replaced", None)

    @property
    def _current(self) -> Resume:
        """What the command last began from."""
        state, nodes = self._context.memory.state, self._context.who.nodes
        return state.resume or Resume(
            (1,) * nodes, state.restored_from, state.restored_claim, state.start_step
        )

    def _chosen(self) -> Resume | None:
        """Node 0's choice for the claims that it sees now; None if it has chosen for them."""
        context, current = self._context, self._current
        claims = claims_of(context)
        if claims == current.claims:
            return None
        context.wanted()
        said = context.spool.wrapper_status()
        reached = said.progress.step if said is not None else None
        chosen = self._newest_save() or current
        repeated = 0
        if reached is not None and reached != current.reached:  # it has trained since the last choice
            repeated = max(0, reached - (chosen.step or 0))
        return replace(
            chosen, claims=claims, reached=reached, repeated_steps=current.repeated_steps + repeated
        )

    def _newest_save(self) -> Resume | None:
        """The newest valid checkpoint that the attempt's training saved itself."""
        context, who = self._context, self._context.who
        complete = context.patiently(
            lambda: checkpoints.complete_checkpoints(context.run, who.generation), what="checkpoints"
        )
        for name in checkpoints.resume_order(
            complete, generation=who.generation, attempt=who.attempt, candidates=()
        ):
            try:
                return self._saved(name)
            except CheckpointError as err:
                context.messages.say("replaced", f"{name}: {err}")
        return None

    def _saved(self, name: str) -> Resume | None:
        """Checkpoint *name*, fetched; None for one that code without the library made: that reads its own."""
        context = self._context
        claim = context.patiently(partial(checkpoints.manifest_claim, context.run, name), what=name)
        read = partial(checkpoints.read_checkpoint, context.run, name, claim=claim)
        if not context.patiently(read, what=name).cooperative:
            return None
        return Resume((), name, claim, fetch_checkpoint(context, name, claim).manifest.step)

    def _named(self) -> Resume | None:
        """Node 0's choice; None if this node has taken it, or if it is not for this pod."""
        claim, status = status_of(self._context, 0)
        resume = None if status is None else status.resume
        is_new = resume is not None and resume != self._context.memory.state.resume
        return resume if is_new and counts_for(self._context.who, resume, claim) else None

    def _take(self, resume: Resume) -> None:
        """Let the command's next start begin from *resume*; in an order that a kill may cut anywhere."""
        context, before = self._context, self._current
        if (resume.checkpoint, resume.manifest_claim) != (before.checkpoint, before.manifest_claim):
            if resume.checkpoint is None:
                raise CheckpointError(
                    "node 0 starts again from the beginning, and this node from a checkpoint"
                )
            self._rewrite_start(fetch_checkpoint(context, resume.checkpoint, resume.manifest_claim))
            self._remove_others(resume.checkpoint)
        if resume.step is not None:
            self._saves.forget_after(resume.step)
        context.memory.update(resume=resume)

    def _rewrite_start(self, found: Restored) -> None:
        context = self._context
        body = context.memory.start() or context.spool.read_json(context.spool.start)
        if body is None:
            raise CheckpointError("start.json is gone, and with it the rest of what the command begins with")
        env = {**body.get("env", {}), "ENVSCALER_RESTORE": str(found.path)}
        body |= {"env": env, "restore": found.to_start()}
        context.memory.keep_start(body)
        context.spool.write_json(context.spool.start, body)

    def _remove_others(self, kept: str) -> None:
        """Remove the checkpoints that the command began from before."""
        spool = self._context.spool
        for path in list(spool.restored.iterdir()):
            if path.name != kept:
                with suppress(OSError):
                    spool.remove(path)
