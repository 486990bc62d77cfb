"""Which signal a draining command gets, and when. Pure: time comes as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple

TERM_SHARE = 0.8
"""Part of the grace after which SIGTERM is sent to code that should stop by itself. Chosen: the rest is for
its clean-up.
"""
ORPHANED = "orphaned"
"""Prefix of a reason in a control that the sidecar wrote because the run is orphaned."""


@dataclass(frozen=True)
class Ask:
    """The request of the owner, or of a signal to the wrapper.

    Attributes:
        action: ``leave`` or ``stop``.
        at: When it was seen, seconds of the wrapper's clock.
        align_timeout_s, grace_s, reason, sequence: As in Control; sequence is -1 for a signal.
        was_leaving: True for a signal that came after the owner's request to drain.
    """

    action: str
    at: float
    align_timeout_s: float = 0.0
    grace_s: float = 30.0
    reason: str = ""
    sequence: int = -1
    was_leaving: bool = False

    @property
    def outcome(self) -> str:
        """``left``, ``stopped`` or ``orphaned``: the reason that the end will have."""
        if self.reason.startswith(ORPHANED):
            return "orphaned"
        return "left" if self.action == "leave" or self.was_leaving else "stopped"


@dataclass(frozen=True)
class Facts:
    """What the wrapper knows about the command at one moment.

    Attributes:
        cooperates: True when it has a Session that calls ``checkpoint``: it stops by itself.
        saving_since: When the save after this request began, None before.
        snapshot_pending: True while the sidecar still has to copy ``checkpoint.path``.
        term_at: When SIGTERM was sent, None before.
    """

    cooperates: bool = False
    saving_since: Optional[float] = None
    snapshot_pending: bool = False
    term_at: Optional[float] = None


def due_signal(ask: Ask, now: float, facts: Facts) -> Optional[str]:
    """Return ``term`` or ``kill`` when it is time for it, else None."""
    term_at, kill_at = _schedule(ask, facts)
    if now >= kill_at:
        return "kill"
    return "term" if facts.term_at is None and now >= term_at else None


def _schedule(ask: Ask, facts: Facts) -> Tuple[float, float]:
    if facts.cooperates:
        began = ask.at
        if ask.action == "leave":
            began += ask.align_timeout_s
            if facts.saving_since is not None:
                began = min(began, facts.saving_since)
        return began + TERM_SHARE * ask.grace_s, began + ask.grace_s
    if ask.action == "stop":
        return ask.at, ask.at + ask.grace_s
    if facts.term_at is not None:
        return facts.term_at, facts.term_at + ask.grace_s
    waits_s = max(ask.align_timeout_s, ask.grace_s) if facts.snapshot_pending else 0.0
    return ask.at + waits_s, math.inf
