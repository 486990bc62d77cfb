"""The rounds of a running sidecar: what it reads, what it reports, and the end.

It has three threads, so that nothing quick waits for anything long: this one (control, lease, chunks,
status), one for the set-up and the uploads, one for snapshots.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from envscaler_agent.protocol import Ended, Status, status_name
from envscaler_airflow.backoff import Backoff
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.launch import SessionSettings
from envscaler_airflow.sidecar import owner_watch, setup
from envscaler_airflow.sidecar.context import SidecarContext, WorkInterruptedError
from envscaler_airflow.sidecar.owner_watch import OwnerWatch
from envscaler_airflow.sidecar.replaced import Regroup
from envscaler_airflow.sidecar.snapshots import Snapshots
from envscaler_airflow.sidecar.spool_state import State
from envscaler_airflow.sidecar.uploads import Checkpoints, Chunks, Outputs, WriteBack
from envscaler_airflow.store.run_store import read_message

ROUND_S = 0.5
"""Time between two rounds. Chosen: half of the wrapper's second."""
STATUS_S = 15.0
"""Time between two statuses without a change, seconds. Chosen: a stall is seen within a minute, at 240 writes
per hour and node.
"""
WRAPPER_S = 120.0
"""How long a wrapper may be silent after the set-up failed, before the sidecar reports its end. Chosen."""

log = logging.getLogger(__name__)


class Heavy:
    """The long tasks, one after another: set-up, then checkpoints, then outputs."""

    def __init__(self, context: SidecarContext) -> None:
        """Continue where an earlier sidecar stopped."""
        self._context = context
        self._checkpoints: Checkpoints | None = None
        self._regroup: Regroup | None = None
        self._outputs = Outputs(context)
        self._volumes = WriteBack(context)
        self.session: SessionSettings | None = None

    def step(self) -> None:
        """Do the next task.

        Raises:
            WorkInterruptedError: The sidecar must end.
        """
        context = self._context
        if not context.memory.state.is_laid_out:
            setup.lay_out(context)
        if not context.who.claim:
            owner_watch.claim_node(context)  # the set-up did not, or this sidecar was restarted after it
        if context.memory.state.is_drained:
            return
        if context.memory.state.failed is not None:
            context.memory.update(is_drained=True)
            return
        if self._checkpoints is None or self._regroup is None:
            self.session = setup.session_of(context, setup.first_control(context))
            self._checkpoints = Checkpoints(context, context.layout.keep, volumes=self._volumes)
            self._regroup = Regroup(context, self._checkpoints)
        self._regroup.step()
        has_left = self._checkpoints.step()
        if has_left and context.memory.state.is_final_snapshot_done:
            ended = context.ended()
            # Check again: the last snapshot may have come after the step above.
            if ended is not None and self._checkpoints.step() and self._are_outputs_done(ended):
                context.memory.update(is_drained=True)

    def _are_outputs_done(self, ended: Ended) -> bool:
        if ended.reason != "succeeded":
            return True
        return self._volumes.step() and (self._context.who.node != 0 or self._outputs.step())


class Speaker:
    """Writes the node's status: every 15 s, and immediately after a change that others act on."""

    def __init__(self, context: SidecarContext) -> None:
        """Continue the sequence of an earlier sidecar, even of one on a machine that no longer exists."""
        self._context = context
        self._backoff = Backoff(context.monotonic)
        self._said: Status | None = None
        self._said_at = -float("inf")
        self._sequence: int | None = None

    @property
    def _name(self) -> str:
        who = self._context.who
        return status_name(who.generation, who.attempt, who.node, who.claim)

    def step(self, status: Status) -> bool:
        """Write *status* when it is time; True when the store has every part of it that matters."""
        now = self._context.monotonic()
        matter = _matter(status)
        has_changed = matter != self._said
        if not has_changed and now - self._said_at < STATUS_S:
            return True
        if not self._backoff.is_ready:
            return False
        try:
            self._sequence = self._next_sequence()
            self._context.run.write(
                self._name, dataclasses.replace(status, sequence=self._sequence).to_json()
            )
        except (StoreError, OSError) as err:
            self._backoff.failed()
            log.warning("status not written error=%s", err)
            return False
        self._backoff.worked()
        self._said, self._said_at = matter, now
        return True

    def _next_sequence(self) -> int:
        """One more than the last number written, as far as this disk and the store know."""
        last = self._sequence if self._sequence is not None else self._last_in_store()
        sequence = max(last, self._context.memory.state.sequence) + 1
        try:
            self._context.memory.update(sequence=sequence)
        except OSError as err:  # a full disk must not silence the node
            self._context.messages.say("sidecar", f"sidecar.json: {err}")
        else:
            self._context.messages.say("sidecar", None)
        return sequence

    def _last_in_store(self) -> int:
        try:
            status = read_message(self._context.run, self._name, Status)
        except ProtocolError:
            return 0  # readers only ask whether it changed
        return 0 if status is None else status.sequence


def _matter(status: Status) -> Status:
    """The parts of a status whose change is written immediately."""
    progress = dataclasses.replace(type(status.progress)(), epoch=status.progress.epoch)
    return dataclasses.replace(
        status, sequence=0, progress=progress, cpu_seconds=None, usage={}, transfer=None
    )


def compose(context: SidecarContext, said: Status | None, *, is_over: bool) -> Status:
    """This node's current status: the wrapper's part and the sidecar's; ``ended`` only when *is_over*."""
    state, who = context.memory.state, context.who
    base = said or Status()
    ended, phase = _end(state, base) if is_over else (None, _phase(state, base))
    message = "; ".join(part for part in (state.failed, context.messages.text(), base.message) if part)
    return dataclasses.replace(
        base,
        generation=who.generation,
        attempt=who.attempt,
        node=who.node,
        claim=who.claim,
        address=context.address or base.address,
        phase=phase,
        ended=ended,
        transfer=None if is_over else context.transferring(),
        start_step=state.start_step,
        restored_from=state.restored_from,
        restored_claim=state.restored_claim,
        resume=state.resume,
        restore_s=state.restore_s,
        checkpoint_s=state.checkpoint_s if state.checkpoint_s is not None else base.checkpoint_s,
        rejected=state.rejected,
        last_checkpoint=state.last_checkpoint,
        last_checkpoint_step=state.last_checkpoint_step,
        checkpoints=state.checkpoints,
        outputs=dict(state.outputs) if ended is not None and ended.reason == "succeeded" else {},
        message=message[:2000],
    )


def _phase(state: State, base: Status) -> str:
    if base.ended is not None:
        return "uploading"
    if not state.is_laid_out:
        return "restoring" if state.is_restoring else "setup"
    return base.phase


def _end(state: State, base: Status) -> tuple[Ended | None, str]:
    if base.ended is None:
        return Ended(reason=state.failed_as, detail=state.failed or "the wrapper never began"), "ended"
    if state.failed is not None and base.ended.reason == "succeeded":
        return dataclasses.replace(base.ended, reason="failed", detail=state.failed), "ended"
    return base.ended, "ended"


class Sidecar:
    """One sidecar: :meth:`run` until everything is uploaded or it is stopped."""

    def __init__(self, context: SidecarContext) -> None:
        """Serve *context*."""
        self._context = context
        self.heavy = Heavy(context)
        self._watch = OwnerWatch(context)
        self._chunks = Chunks(context)
        self._speaker = Speaker(context)
        self._said: Status | None = None
        self._failed_at: float | None = None
        self._failure: BaseException | None = None
        self._snapshots: Snapshots | None = None

    def run(self) -> bool:
        """Run until the end; True when everything is done, False when the sidecar was stopped."""
        if self._context.memory.state.phase == "done":
            return True
        threads = [self._thread(self.heavy.step, "heavy"), self._thread(self.snapshot, "snapshots")]
        try:
            while not self.step():
                if self._context.ending.wait(ROUND_S):
                    break
        finally:
            self._context.ending.set()
            for thread in threads:
                thread.join(timeout=20)
        if self._failure is not None:
            raise self._failure
        return self._context.memory.state.phase == "done"

    def _thread(self, step: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._rounds, args=(step, name), name=name, daemon=True)
        thread.start()
        return thread

    def _rounds(self, step: Callable[[], None], name: str) -> None:
        try:
            while not self._context.ending.is_set():
                try:
                    step()
                except (StoreError, OSError) as err:  # for example a full disk: reported, and retried
                    self._context.messages.say(name, f"{type(err).__name__}: {err}")
                    self._context.ending.wait(5)
                else:
                    self._context.messages.say(name, None)
                self._context.ending.wait(ROUND_S)
        except WorkInterruptedError:
            pass
        except BaseException as err:  # noqa: BLE001 - the thread's outermost edge: handed to run()
            self._failure = err
            self._context.ending.set()

    def snapshot(self) -> None:
        """One round of snapshots, once their interval is known."""
        if self._snapshots is None:
            if self.heavy.session is None and self._context.memory.state.failed is None:
                return
            every = self.heavy.session.every if self.heavy.session else None
            self._snapshots = Snapshots(self._context, every)
        self._snapshots.step()

    def step(self) -> bool:
        """One quick round; True when everything is done and reported. Before its claim it writes nothing."""
        context = self._context
        if not context.who.claim:
            return False
        said = self._hear()
        has_ended = said is not None and said.ended is not None
        if not has_ended:
            self._watch.step()
        is_empty = self._chunks.step(has_ended=has_ended)
        state = context.memory.state
        is_over = state.is_drained and is_empty and (has_ended or self._is_abandoned())
        is_said = self._speaker.step(compose(context, said, is_over=is_over))
        phase = "setup" if not state.is_laid_out else "draining" if has_ended else "running"
        # Only now: a process that reads "done" may release the machine.
        self._enter("done" if is_over and is_said else phase)
        return is_over and is_said

    def _hear(self) -> Status | None:
        try:
            self._said = self._context.spool.wrapper_status() or self._said
        except (ProtocolError, OSError) as err:
            self._context.messages.say("wrapper", str(err))
        else:
            self._context.messages.say("wrapper", None)
        return self._said

    def _enter(self, phase: str) -> None:
        if phase != self._context.memory.state.phase:
            try:
                self._context.memory.update(phase=phase)
            except OSError as err:
                self._context.messages.say("sidecar", str(err))

    def _is_abandoned(self) -> bool:
        """True when the set-up failed and the wrapper never reacted to it."""
        if self._failed_at is None:
            self._failed_at = self._context.monotonic()
        return self._context.monotonic() - self._failed_at >= WRAPPER_S
