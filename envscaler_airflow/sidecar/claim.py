"""Whether this sidecar's publications still count: its claim to the node, and the owner's later attempts."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Literal

from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.store.checkpoints import Fence, fence_of
from envscaler_airflow.store.claims import Claim, newest_claim, take_claim

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


def take(context: SidecarContext) -> None:
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
    newest = newest_claim(
        context.run, generation=who.generation, attempt=who.attempt, node=who.node, known=who.claim
    )
    return "replaced" if newest > who.claim else fence_of(context.run, who.generation, who.attempt)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
