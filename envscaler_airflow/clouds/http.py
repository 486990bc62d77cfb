"""HTTP for clouds whose API needs no SDK."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.errors import BackendError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 20.0
"""A cloud that does not respond for this long has failed. Chosen: below the 30 s that a worker waits."""

PAGE_S = 60.0
"""A page that is incomplete after this long has failed, even if bytes still trickle in. Chosen: the largest
pages have a few megabytes.
"""

PAGE_BYTES = 64 << 20
"""A page with more bytes is rejected. Chosen: ten times the largest one."""

TRIES = 3
"""How often a page is requested while the response is 429 or 5xx. Chosen: a user waits for it."""

MAX_PAGES = 2000
"""Largest number of pages of one response; more is an endless loop. Chosen: all of Azure has fewer."""


class Caller:
    """Fetches JSON over HTTP with time limits and retries.

    Connections are open for the duration of the ``with`` block.
    """

    def __init__(
        self,
        client: httpx.Client | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use *client*, or create one whose requests time out."""
        self.headers: dict[str, str] = {}
        self._given = client
        self._client = client
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        """Open connections."""
        if self._client is None:
            import httpx  # noqa: PLC0415  (the facts of a cloud need none of it)

            self._client = httpx.Client(timeout=TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections, unless the caller passed the client."""
        if self._client is not None and self._given is None:
            self._client.close()
            self._client = None

    def json(self, url: str, what: str, params: Mapping[str, str] | None = None) -> Any:
        """Fetch the JSON at *url*.

        Raises:
            BackendError: There is no response, an error, or invalid JSON; ``transient`` if a retry may help.
        """
        for tries in range(1, TRIES + 1):
            try:
                return self._once(url, what, params)
            except BackendError as err:
                if tries == TRIES or err.status is None or not err.transient:
                    raise
                self._sleep(wait_s(tries, first_s=1.0, most_s=2.0))
        raise AssertionError

    def _once(self, url: str, what: str, params: Mapping[str, str] | None) -> Any:
        import httpx  # noqa: PLC0415  (as above)

        assert self._client is not None, "within `with` alone"
        try:
            with self._client.stream("GET", url, params=params, headers=self.headers) as answer:
                status, content = answer.status_code, self._content(answer, what)
        except httpx.InvalidURL as err:
            raise BackendError(f"{what}: {url!r:.100} is not a valid URL: {err}", transient=False) from err
        except httpx.HTTPError as err:
            text = f"{what}: no answer within {TIMEOUT_S:g} s: {err or type(err).__name__}"
            raise BackendError(text, transient=True) from err
        if status != httpx.codes.OK:
            is_transient = status == httpx.codes.TOO_MANY_REQUESTS or status >= 500
            body = content[:200].decode(errors="replace")
            raise BackendError(f"{what} answered {status}: {body}", status=status, transient=is_transient)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as err:
            raise BackendError(f"{what}: the answer is not complete JSON: {err}", transient=True) from err

    def _content(self, answer: httpx.Response, what: str) -> bytes:
        """The body, if it arrives within the limits of time and size."""
        begun, parts, size = self._clock(), [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > PAGE_BYTES:
                raise BackendError(f"{what}: a page of more than {PAGE_BYTES >> 20} MiB", transient=False)
            if self._clock() - begun > PAGE_S:
                raise BackendError(f"{what}: a page was not there after {PAGE_S:g} s", transient=True)
        return b"".join(parts)
