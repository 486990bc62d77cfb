"""Which pod, or node process, speaks for a node of an attempt: the one with the highest claim.

A pod claims its node before anything else that it writes: ``claims/g1-a3-n0-000002.json``, create-only, with
its uid and the boot id of its machine. Numbers have no gaps. A uid claims once: a restarted sidecar finds its
own claim and keeps it. What a lower claim writes is void; its sidecar ends the training as soon as it reads
of a higher one.

All functions take the store of the run (``for_run``).
"""

from __future__ import annotations

from dataclasses import dataclass

from envscaler_agent.protocol import MAX_JSON_BYTES, Message, claim_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.base import Store


@dataclass(frozen=True)
class Claim(Message):
    """One pod's claim to a node.

    Attributes:
        uid: Of the pod or node process; no two have the same.
        boot_id: Of the machine that it runs on, to be shown; "" when unknown.
    """

    uid: str = ""
    boot_id: str = ""


def creates_exclusively(store: Store) -> bool:
    """True where of two creators of one name one wins: without that two pods could have one claim."""
    return bool(getattr(store, "create_is_atomic", True))


def newest_claim(store: Store, *, generation: int, attempt: int, node: int, known: int = 0) -> int:
    """Number of the claim that is valid, 0 before the first; one look more than there are claims.

    *known* is the number of a claim that is known to exist.

    Raises:
        StoreError: The store does not answer.
    """
    number = known
    while store.size(claim_name(generation, attempt, node, number + 1)) is not None:
        number += 1
    return number


def take_claim(store: Store, claim: Claim, *, generation: int, attempt: int, node: int) -> int:
    """Number of *claim*: that which its uid already has, else a new one above all others.

    The caller looks with :func:`newest_claim` whether it is still the valid one.

    Raises:
        StoreError: The store does not answer, or does not say whether the claim is there; repeat the call.
    """
    number = 1
    while True:
        name = claim_name(generation, attempt, node, number)
        found = _uid_of(store, name)
        if found == claim.uid or (found is None and _create(store, name, claim)):
            return number
        number += 1


def _create(store: Store, name: str, claim: Claim) -> bool:
    """True when *claim* stands at *name*: another pod may have been quicker."""
    return store.create(name, claim.to_json()) or _uid_of(store, name) == claim.uid


def _uid_of(store: Store, name: str) -> str | None:
    body = store.read(name, max_bytes=MAX_JSON_BYTES)
    try:
        return None if body is None else Claim.from_json(body, where=name).uid
    except ProtocolError:
        return ""  # of a later version, or torn: another pod's in any case
