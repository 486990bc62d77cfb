"""Which pod or node process represents a node of an attempt: the one with the highest claim.

A pod claims its node before it writes anything else: ``claims/g1-a3-n0-000002.json``, create-only, with
its uid and the boot id of its machine. Numbers have no gaps. A uid claims once: a restarted sidecar finds its
own claim and keeps it. Everything that a pod with a lower claim writes is void. Its sidecar ends the training
as soon as it reads a higher claim.

All functions take the folder of the run (``Run``).
"""

from __future__ import annotations

from dataclasses import dataclass

from envscaler_agent.messages import Message
from envscaler_agent.protocol import claim_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.run_store import Store, read_message

MOST_CLAIMS = 10_000
"""Most claims to one node of an attempt; later ones are void. Chosen: a pod every five minutes for a month.
Without a bound, one sidecar could keep every reader of its claims busy.
"""


@dataclass(frozen=True)
class Claim(Message):
    """One pod's claim to a node.

    Attributes:
        uid: Unique id of the pod or node process.
        boot_id: Boot id of its machine, for display; "" when unknown.
    """

    uid: str = ""
    boot_id: str = ""


def creates_exclusively(store: Store) -> bool:
    """True if exactly one of two creators of a name wins. Without that, two pods could have one claim."""
    return bool(getattr(store, "create_is_atomic", True))


def newest_claim(store: Store, *, generation: int, attempt: int, node: int, known: int = 0) -> int:
    """Number of the valid claim, 0 before the first; reads one name more than there are claims.

    *known* is the number of a claim that is known to exist.

    Raises:
        StoreError: The store does not answer.
    """
    number = known
    while number < MOST_CLAIMS and store.size(claim_name(generation, attempt, node, number + 1)) is not None:
        number += 1
    return number


def take_claim(store: Store, claim: Claim, *, generation: int, attempt: int, node: int) -> int:
    """Take *claim* and return its number: the one that its uid already has, otherwise the next free one.

    The caller checks with :func:`newest_claim` that it is still valid.

    Raises:
        StoreError: The store does not answer, or it is unknown whether the claim exists; repeat the call.
        ProtocolError: There are :data:`MOST_CLAIMS` others.
    """
    for number in range(1, MOST_CLAIMS + 1):
        name = claim_name(generation, attempt, node, number)
        found = _uid_of(store, name)
        if found == claim.uid or (found is None and _create(store, name, claim)):
            return number
    raise ProtocolError(f"node {node} was claimed {MOST_CLAIMS} times; cancel the run")


def _create(store: Store, name: str, claim: Claim) -> bool:
    """True when *claim* is stored at *name*. Another pod may have been faster."""
    return store.create(name, claim.to_json()) or _uid_of(store, name) == claim.uid


def _uid_of(store: Store, name: str) -> str | None:
    try:
        claim = read_message(store, name, Claim)
    except ProtocolError:
        return ""  # of a later version, or torn: in either case another pod's
    return None if claim is None else claim.uid
