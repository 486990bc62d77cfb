"""How far a training is, on one line."""

from __future__ import annotations

from envscaler_airflow.controller.report import run_bill
from envscaler_airflow.lifecycle import RunState
from envscaler_airflow.lifecycle.narration import transfer_text
from envscaler_airflow.planning.amounts import duration_text, usd_text
from envscaler_airflow.protocol import Status

_PHASES = {
    "setup": "preparing: code and inputs come",
    "restoring": "restoring a checkpoint",
    "running": "runs, no step so far",
    "checkpointing": "saving",
    "leaving": "saving, then stopping",
    "uploading": "storing outputs",
    "ended": "ended",
}
"""What a node does, as shown."""
_SLOW = ("checkpointing", "leaving", "uploading")
"""Phases that are shown beside the step."""


def progress_line(status: Status | None, state: RunState, *, now: float) -> str:
    """How far the live attempt is, and what the run has cost, as far as it is known.

    ``step 120 of 1,584 (8 %), 18.3 steps/s, 1 min 20 s left, loss 0.7123, $0.0031``; empty before the
    training has said anything.
    """
    live = state.live
    if status is None or live is None or status.attempt != live.number:
        return ""
    cost = run_bill(state, now=now).usd
    parts = progress_parts(status)
    moving = transfer_text(status)
    if not _says_phase(status, moving) and (not parts or status.phase in _SLOW):
        parts.append(_PHASES.get(status.phase, status.phase))
    if moving:
        parts.append(moving)
    if cost is not None:
        parts.append(usd_text(cost))
    return ", ".join(parts)


def _says_phase(status: Status, moving: str) -> bool:
    """True where *moving* describes what the phase does, so that one of them is enough."""
    return bool(moving) and status.phase in ("setup", "restoring", "uploading")


def progress_parts(status: Status) -> list[str]:
    """Step, share, speed, time to the end and loss; none before the first step."""
    progress = status.progress
    step, total, speed = progress.step, progress.total_steps, progress.steps_per_s
    if not step:
        return []
    parts = [f"step {step:,}"]
    if total:
        parts = [f"step {step:,} of {total:,} ({100 * step // total} %)"]
    if speed:
        parts.append(f"{speed:,.3g} steps/s" if speed < 1000 else f"{speed:,.0f} steps/s")
        if total and total > step:
            parts.append(f"{duration_text((total - step) / speed)} left")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    return parts
