"""Read the output of an attempt's nodes from closed chunks in the store."""

from __future__ import annotations

from envscaler_agent import protocol
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.claims import newest_claim

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk read, bytes. Chosen: four times the largest that is written."""
CLAIM_CHUNKS = 10**9
"""Positions that a cursor reserves for the chunks of one claim. Chosen: one each 10 s for 300 years."""


def read_logs(
    run: Store,
    *,
    attempt: tuple[int, int],
    node: int,
    cursor: tuple[int, int] = (1, 0),
    budget: int = 1 << 18,
) -> tuple[bytes, tuple[int, int]]:
    """Return the output of *node* from *cursor* on, at most *budget* bytes, and the cursor after it.

    Reading stops at the first absent chunk: chunks are numbered without gaps from 1. If another pod has
    claimed the node since, its chunks follow.

    Args:
        run: The run's folder.
        attempt: ``(generation, attempt)``.
        node: Index of the node.
        cursor: ``(position, byte offset in it)`` of the first byte to return. Positions are the chunks of the
            first claim, from 1; those of claim 2 begin at :data:`CLAIM_CHUNKS` + 1.
        budget: Largest number of bytes to return, > 0.
    """
    position, offset = cursor
    parts: list[bytes] = []
    while budget > 0:
        before, chunk = divmod(position, CLAIM_CHUNKS)
        name = protocol.log_name(*attempt, node, chunk, before + 1)
        try:
            data = run.read(name, max_bytes=MAX_CHUNK_BYTES)
        except ProtocolError as err:  # the training side wrote it: skip what cannot be read and show the rest
            data = f"[chunk {chunk} of the log is left out: {err}]\n".encode()
        if data is None:
            if not _is_replaced(run, attempt, node, before + 1):
                break
            position, offset = (before + 1) * CLAIM_CHUNKS + 1, 0
            continue
        part = data[offset : offset + budget]
        parts.append(part)
        budget -= len(part)
        offset += len(part)
        if offset < len(data):
            break
        position, offset = position + 1, 0
    return b"".join(parts), (position, offset)


def _is_replaced(run: Store, attempt: tuple[int, int], node: int, claim: int) -> bool:
    """True when another pod has claimed the node since."""
    generation, number = attempt
    return newest_claim(run, generation=generation, attempt=number, node=node, known=claim) > claim
