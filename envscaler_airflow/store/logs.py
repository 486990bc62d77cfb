"""Read what the nodes of an attempt printed, from closed chunks in the store."""

from __future__ import annotations

from envscaler_airflow import protocol
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.names import join

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk read, bytes. Chosen: four times the largest that is written."""


def read_logs(
    store: Store,
    prefix: str,
    *,
    attempt: tuple[int, int],
    node: int,
    cursor: tuple[int, int] = (1, 0),
    budget: int = 1 << 18,
) -> tuple[bytes, tuple[int, int]]:
    """What *node* printed from *cursor* on, at most *budget* bytes, and the cursor after it.

    A chunk that is not there yet ends the reading: chunks are numbered without gaps from 1.

    Args:
        store: Run store.
        prefix: The run's folder.
        attempt: ``(generation, attempt)``.
        node: Index.
        cursor: ``(chunk, byte offset in it)`` of the first byte wanted.
        budget: Most bytes returned, > 0.
    """
    chunk, offset = cursor
    parts: list[bytes] = []
    while budget > 0:
        name = join(prefix, protocol.log_name(*attempt, node, chunk))
        try:
            data = store.read(name, max_bytes=MAX_CHUNK_BYTES)
        except ProtocolError as err:  # the training's side wrote it: whatever it is, the rest is shown
            data = f"[chunk {chunk} of the log is left out: {err}]\n".encode()
        if data is None:
            break
        part = data[offset : offset + budget]
        parts.append(part)
        budget -= len(part)
        offset += len(part)
        if offset < len(data):
            break
        chunk, offset = chunk + 1, 0
    return b"".join(parts), (chunk, offset)
