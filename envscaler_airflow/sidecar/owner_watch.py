"""What the sidecar reads from the owner, the control and the lease, and whether its work still counts.

It counts while this sidecar has the newest claim to the node and the owner has begun no later attempt.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from envscaler_agent.messages import MAX_JSON_BYTES
from envscaler_agent.protocol import Control
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.sidecar.context import SidecarContext, UnheededError
from envscaler_airflow.store.checkpoints import Fence, fence_of
from envscaler_airflow.store.lease import Claim, LeaseFile, LeaseWatch, take_claim

Standing = Fence | Literal["replaced"]
"""``replaced``: another pod has claimed the node since."""
WHY: dict[Standing, str] = {
    "held": "the owner prepares a later attempt",
    "over": "a later attempt has begun; what this one writes is void",
    "replaced": "another pod has claimed this node; what this one writes is void",
}
"""Why nothing more of this attempt, or of this pod, counts."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Source: Linux, proc_sys_kernel(5); in a container it is the machine's."""


def claim_node(context: SidecarContext) -> None:
    """Claim the node, once per uid; ``context.who`` then contains the claim.

    Raises:
        StoreError: The store does not answer; repeat the call.
    """
    state = context.memory.state
    uid = context.uid or state.uid or uuid.uuid4().hex
    number = state.claim if state.uid == uid else 0
    if not number:
        who = context.who
        number = take_claim(
            context.run,
            Claim(uid, _boot_id()),
            generation=who.generation,
            attempt=who.attempt,
            node=who.node,
        )
        context.memory.update(uid=uid, claim=number)
    context.who = dataclasses.replace(context.who, claim=number)


def standing_of(context: SidecarContext) -> Standing:
    """Check whether a publication still counts; called before each one.

    Raises:
        StoreError: The store does not answer.
    """
    who = context.who
    newest = context.newest_claim(who.node, known=who.claim)
    return "replaced" if newest > who.claim else fence_of(context.run, who.generation, who.attempt)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


CONTROL_S = 2.0
"""Time between two readings of the control. Chosen: a quarter of the usual step towards a checkpoint."""
LEASE_S = 15.0
"""Time between two readings of the lease. Chosen: four per renewal."""
SUPERSEDED_S = 15.0
"""Time between two checks for a later attempt. Chosen: two attempts that train at once cost the price of
both; the lease is read as often.
"""
LEAVE_S = 60.0
"""Longest wait for a step boundary once the run is orphaned. Chosen: most steps take seconds."""


class OwnerWatch:
    """Passes the owner's control to the wrapper; stops the wrapper when the attempt is orphaned.

    A store that cannot be read changes nothing. The sidecar does not withdraw its own requests.
    """

    def __init__(self, context: SidecarContext) -> None:
        """Begin; ages count from now, by the sidecar's own clock."""
        self._context = context
        self._lease = LeaseWatch(context.monotonic)
        self._due = {"control": -float("inf"), "lease": -float("inf"), "superseded": -float("inf")}
        self._owners: Control | None = None  # the training can change the spool's copy
        self._asked: Control | None = None
        self._asked_at = -float("inf")

    def step(self) -> None:
        """Do the checks that are due.

        Raises:
            UnheededError: The wrapper did not follow the sidecar's own request in time, nor within the grace.
        """
        if self._asked is None and (remembered := self._remembered()) is not None:
            self._ask(remembered)
        if self._asked is not None:
            self._carry_on(self._asked)
            return
        if self._is_due("control", CONTROL_S):
            self._try(self._hand_over)
        if self._is_due("lease", LEASE_S):
            self._try(self._look_at_lease)
        if self._is_due("superseded", SUPERSEDED_S):
            self._try(self._look_for_later)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = self._context.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True

    def _try(self, look: Callable[[], None]) -> None:
        try:
            look()
        except (StoreError, ProtocolError, OSError) as err:
            self._context.messages.say("owner", f"the owner's requests cannot be read: {err}")
        else:
            self._context.messages.say("owner", None)

    def _hand_over(self) -> None:
        name = self._context.who.control_name
        body = self._context.run.read(name, max_bytes=MAX_JSON_BYTES)
        if body is None:
            return
        control = Control.from_json(body, where=name)
        if control.action == "hold":
            return  # only on this side: the set-up waits for the owner's list
        if self._owners is not None and control.sequence < self._owners.sequence:
            return  # an owner that was suspended wrote an outdated control; the later one counts
        self._owners = control
        if self._context.spool.control_text() != body:
            self._context.spool.write(self._context.spool.control, body)

    def _look_at_lease(self) -> None:
        self._lease.seen(LeaseFile(self._context.run).read())
        control = self._control()
        if self._lease.unchanged_s >= control.orphan_after_s:
            self._leave(control, f"orphaned: the lease stood still for {self._lease.unchanged_s:.0f} s")

    def _look_for_later(self) -> None:
        """Stop an attempt that no longer counts immediately: nothing that it would still save counts."""
        standing = standing_of(self._context)
        if standing in ("over", "replaced"):
            self._ask(_stop(self._control(), f"orphaned: {WHY[standing]}"))

    def _control(self) -> Control:
        return self._owners or self._context.spool.current_control() or Control()

    def _leave(self, control: Control, reason: str) -> None:
        ask = Control(
            sequence=control.sequence + 1,
            action="drain",
            align="step",
            align_timeout_s=LEAVE_S,
            grace_s=control.grace_s,
            reason=reason,
            candidates=control.candidates,
            orphan_after_s=control.orphan_after_s,
        )
        self._ask(ask)

    def _remembered(self) -> Control | None:
        """The request that an earlier sidecar of this attempt made on its own."""
        override = self._context.memory.state.override
        try:
            return None if override is None else Control.from_json(override, where="sidecar.json")
        except ProtocolError:
            return None  # another process wrote it; the lease is read again

    def _ask(self, ask: Control) -> None:
        """Make *ask* count from now on, even if the disk is too full to record it."""
        self._asked, self._asked_at = ask, self._context.monotonic()
        self._context.messages.say("override", ask.reason)
        self._try(self._write_down)

    def _write_down(self) -> None:
        asked = self._asked
        if asked is None:
            return
        body = asked.to_json()
        if self._context.spool.control_text() != body:
            self._context.spool.write(self._context.spool.control, body)
        if self._context.memory.state.override != body.decode():
            self._context.memory.update(override=body.decode())

    def _carry_on(self, asked: Control) -> None:
        """After the grace, request a harder stop; after that, stop waiting for the wrapper."""
        self._try(self._write_down)
        waited = self._context.monotonic() - self._asked_at
        if asked.action == "drain" and waited >= asked.align_timeout_s + asked.grace_s:
            self._ask(_stop(asked, asked.reason))
        elif asked.action == "stop" and waited >= 2 * asked.grace_s:
            raise UnheededError(f"asked to stop {waited:.0f} s ago and still here: {asked.reason}")


def _stop(asked: Control, reason: str) -> Control:
    """The control after *asked*; it stops the training within the grace."""
    return Control(
        sequence=asked.sequence + 1,
        action="stop",
        align="now",
        grace_s=asked.grace_s,
        reason=reason,
        candidates=asked.candidates,
        orphan_after_s=asked.orphan_after_s,
    )
