"""Blocking calls of triggers, away from the triggerer's event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Literal, TypeVar

T = TypeVar("T")

CALL_TIMEOUT_S = 120.0
"""Longest wait for one round of store and backend calls, seconds. Chosen: S3's own retries end before."""
_THREADS = 32
"""Threads for all triggers of this process that do one kind of work. Chosen: a round takes some 20 ms of
every 5 s."""

Kind = Literal["stage", "scaling"]
"""Whose call it is: if another package's policy hangs in a check, leases are still renewed."""


async def in_thread(
    call: Callable[..., T], *args: object, timeout_s: float = CALL_TIMEOUT_S, kind: Kind = "stage"
) -> T:
    """Return the result of ``call(*args)``, run in a thread of our own with this task's context (its log).

    A call that times out keeps its thread; a pool of our own keeps such calls from
    starving other triggers' threads.

    Raises:
        TimeoutError: No result within *timeout_s*.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(_pool(kind), partial(context.run, call, *args))
    return await asyncio.wait_for(future, timeout_s)


@cache
def _pool(kind: Kind) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"envscaler-{kind}")
