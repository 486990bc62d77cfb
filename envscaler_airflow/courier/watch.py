"""What comes from the owner: the control, the lease, and whether a later attempt has begun."""

from __future__ import annotations

from collections.abc import Callable

from envscaler_airflow.courier.site import Site
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.protocol import MAX_JSON_BYTES, Control, control_name
from envscaler_airflow.store.checkpoints import is_superseded
from envscaler_airflow.store.lease import LeaseWatch, read_lease

CONTROL_S = 2.0
"""Between two readings of the control. Chosen: a quarter of the usual step towards a checkpoint."""
LEASE_S = 15.0
"""Between two readings of the lease. Chosen: four in each renewal."""
SUPERSEDED_S = 60.0
"""Between two looks for a later attempt. Chosen: only a machine that was declared lost finds one."""
LEAVE_S = 60.0
"""Longest wait for a step boundary once nobody owns the run. Chosen: most steps take seconds."""


class OwnerWatch:
    """Hands the owner's control to the wrapper; asks it to go when nobody owns this attempt any more.

    A store that cannot be read changes nothing. What the courier asks on its own stays asked.
    """

    def __init__(self, site: Site) -> None:
        """Begin; ages count from now, by the site's clock."""
        self._site = site
        self._lease = LeaseWatch(site.monotonic)
        self._due = {"control": -float("inf"), "lease": -float("inf"), "superseded": -float("inf")}
        self._asked_at: float | None = None

    def step(self) -> None:
        """Look at what is due."""
        override = self._site.memory.state.override
        if override is not None:
            self._carry_on(Control.from_json(override, where="courier.json"))
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
        Control.from_json(body, where=name)
        path = self._site.exchange.control
        if not path.exists() or path.read_bytes() != body:
            self._site.exchange.write(path, body)

    def _look_at_lease(self) -> None:
        self._lease.seen(read_lease(self._site.store))
        control = self._site.exchange.current_control() or Control()
        if self._lease.unchanged_s >= control.orphan_after_s:
            self._leave(control, f"orphaned: the lease stood still for {self._lease.unchanged_s:.0f} s")

    def _look_for_later(self) -> None:
        who = self._site.who
        if is_superseded(self._site.store, who.generation, who.attempt):
            control = self._site.exchange.current_control() or Control()
            self._leave(control, "orphaned: a later attempt has begun; what this one writes is void")

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

    def _ask(self, ask: Control) -> None:
        body = ask.to_json()
        self._site.memory.update(override=body.decode())
        self._site.exchange.write(self._site.exchange.control, body)
        self._site.messages.say("override", ask.reason)
        self._asked_at = self._site.monotonic()

    def _carry_on(self, asked: Control) -> None:
        """After a restart, ask again; after the grace, ask harder."""
        if self._asked_at is None:
            self._ask(asked)
        elif asked.action == "leave":
            waited = self._site.monotonic() - self._asked_at
            if waited >= asked.align_timeout_s + asked.grace_s:
                self._ask(_harder(asked))


def _harder(asked: Control) -> Control:
    return Control(
        sequence=asked.sequence + 1,
        action="stop",
        align="now",
        grace_s=asked.grace_s,
        reason=asked.reason,
        candidates=asked.candidates,
        orphan_after_s=asked.orphan_after_s,
    )
