"""What comes from the owner: the control, the lease, and whether a later attempt has begun."""

from __future__ import annotations

from collections.abc import Callable

from envscaler_agent.protocol import MAX_JSON_BYTES, Control, control_name
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.sidecar.claim import WHY, standing_of
from envscaler_airflow.sidecar.context import Site, UnheededError
from envscaler_airflow.store.lease import LeaseWatch, read_lease

CONTROL_S = 2.0
"""Between two readings of the control. Chosen: a quarter of the usual step towards a checkpoint."""
LEASE_S = 15.0
"""Between two readings of the lease. Chosen: four in each renewal."""
SUPERSEDED_S = 15.0
"""Between two looks for a later attempt. Chosen: two that train at once cost the price of both; the lease is
read as often."""
LEAVE_S = 60.0
"""Longest wait for a step boundary once nobody owns the run. Chosen: most steps take seconds."""


class OwnerWatch:
    """Hands the owner's control to the wrapper; asks it to go when nobody owns this attempt any more.

    A store that cannot be read changes nothing. What the sidecar asks on its own stays asked.
    """

    def __init__(self, site: Site) -> None:
        """Begin; ages count from now, by the site's clock."""
        self._site = site
        self._lease = LeaseWatch(site.monotonic)
        self._due = {"control": -float("inf"), "lease": -float("inf"), "superseded": -float("inf")}
        self._owners: Control | None = None  # what the spool holds of it the training can change
        self._asked: Control | None = None
        self._asked_at = -float("inf")

    def step(self) -> None:
        """Look at what is due.

        Raises:
            UnheededError: What the sidecar asked on its own was not done in its time, nor in its grace.
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
        now = self._site.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True

    def _try(self, look: Callable[[], None]) -> None:
        try:
            look()
        except (StoreError, ProtocolError, OSError) as err:
            self._site.messages.say("owner", f"the owner is not heard: {err}")
        else:
            self._site.messages.say("owner", None)

    def _hand_over(self) -> None:
        who = self._site.who
        name = control_name(who.generation, who.attempt)
        body = self._site.store.read(name, max_bytes=MAX_JSON_BYTES)
        if body is None:
            return
        control = Control.from_json(body, where=name)
        if control.action == "hold":
            return  # for this side alone: the set-up waits for the owner's list
        if self._owners is not None and control.sequence < self._owners.sequence:
            return  # an owner that slept wrote what it had meant to write before; the later word stands
        self._owners = control
        if self._site.spool.control_text() != body:
            self._site.spool.write(self._site.spool.control, body)

    def _look_at_lease(self) -> None:
        self._lease.seen(read_lease(self._site.store))
        control = self._control()
        if self._lease.unchanged_s >= control.orphan_after_s:
            self._leave(control, f"orphaned: the lease stood still for {self._lease.unchanged_s:.0f} s")

    def _look_for_later(self) -> None:
        """End what is void at once: nothing that it would still save counts."""
        standing = standing_of(self._site)
        if standing in ("over", "replaced"):
            self._ask(_stop(self._control(), f"orphaned: {WHY[standing]}"))

    def _control(self) -> Control:
        return self._owners or self._site.spool.current_control() or Control()

    def _leave(self, control: Control, reason: str) -> None:
        ask = Control(
            sequence=control.sequence + 1,
            action="leave",
            align="step",
            align_timeout_s=LEAVE_S,
            grace_s=control.grace_s,
            reason=reason,
            candidates=control.candidates,
            orphan_after_s=control.orphan_after_s,
        )
        self._ask(ask)

    def _remembered(self) -> Control | None:
        """What an earlier sidecar of this attempt asked on its own."""
        override = self._site.memory.state.override
        try:
            return None if override is None else Control.from_json(override, where="sidecar.json")
        except ProtocolError:
            return None  # another hand wrote it; the lease is looked at anew

    def _ask(self, ask: Control) -> None:
        """From now on *ask* counts, whether or not the disk has room to write it down."""
        self._asked, self._asked_at = ask, self._site.monotonic()
        self._site.messages.say("override", ask.reason)
        self._try(self._write_down)

    def _write_down(self) -> None:
        asked = self._asked
        if asked is None:
            return
        body = asked.to_json()
        if self._site.spool.control_text() != body:
            self._site.spool.write(self._site.spool.control, body)
        if self._site.memory.state.override != body.decode():
            self._site.memory.update(override=body.decode())

    def _carry_on(self, asked: Control) -> None:
        """After the grace, ask harder; after that, give the wrapper up."""
        self._try(self._write_down)
        waited = self._site.monotonic() - self._asked_at
        if asked.action == "leave" and waited >= asked.align_timeout_s + asked.grace_s:
            self._ask(_stop(asked, asked.reason))
        elif asked.action == "stop" and waited >= 2 * asked.grace_s:
            raise UnheededError(f"told to stop {waited:.0f} s ago and still here: {asked.reason}")


def _stop(asked: Control, reason: str) -> Control:
    """The control after *asked*, which ends the training within the grace."""
    return Control(
        sequence=asked.sequence + 1,
        action="stop",
        align="now",
        grace_s=asked.grace_s,
        reason=reason,
        candidates=asked.candidates,
        orphan_after_s=asked.orphan_after_s,
    )
