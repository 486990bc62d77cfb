"""What the owner promises to the next attempt: it fences off the older ones first, then lists.

A sidecar that deletes does the reverse: it lists, then reads the controls, then deletes. So from ``hold`` on
no deletion begins, and one that was on its way spares the newest.

All functions take the store of the run (``for_run``).
"""

from __future__ import annotations

from dataclasses import replace

from envscaler_airflow.protocol import Control, control_name, parse_checkpoint_name
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_control

MAX_CANDIDATES = 16
"""Checkpoints that a start may fall back on. Chosen: five times what is kept by default."""
_BEFORE_THE_START = ("hold", "run")


def hold(store: Store, control: Control, *, generation: int, attempt: int) -> None:
    """Let every older attempt publish and delete nothing from its next reading on.

    Written only when no control is there: a stop that came first stands, and so does an earlier promise.

    Raises:
        StoreError: The store does not answer.
    """
    held = replace(control, action="hold", candidates=None)
    store.create(control_name(generation, attempt), held.to_json())


def list_candidates(store: Store, *, generation: int, attempt: int) -> tuple[str, ...]:
    """Checkpoints that *attempt* may resume from, best first.

    Those of the attempt before, then those that it was itself allowed. What an older attempt saved after a
    newer one began is in neither, so it is void. An attempt whose list was never made adds none.

    Raises:
        StoreError: The store does not answer.
    """
    complete = complete_checkpoints(store, generation)
    found: list[str] = []
    for number in range(attempt - 1, 0, -1):
        found += [name for name in complete if (key := parse_checkpoint_name(name)) and key[2] == number]
        control = read_control(store, control_name(generation, number))
        if control is not None and control.candidates is not None:
            found += control.candidates
            break
    return tuple(dict.fromkeys(found))[:MAX_CANDIDATES]


def promise(
    store: Store, control: Control, candidates: tuple[str, ...], *, generation: int, attempt: int
) -> None:
    """Write *candidates* into the control of the attempt, which runs from now on unless it was stopped.

    Raises:
        StoreError: The store does not answer.
    """
    name = control_name(generation, attempt)
    found = read_control(store, name)
    base = control if found is None or found.action in _BEFORE_THE_START else found
    store.write(name, replace(base, candidates=candidates).to_json())
