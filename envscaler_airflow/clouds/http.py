"""HTTP to clouds that need no SDK."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from envscaler_airflow.errors import BackendError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 20.0
"""A cloud that says nothing for so long has failed. Chosen: below the 30 s of a worker's patience."""

PAGE_S = 60.0
"""A page that has not come as a whole after so long has failed, though bytes trickle in. Chosen: the largest
pages have a few megabytes."""

PAGE_BYTES = 64 << 20
"""A page with more bytes is none. Chosen: ten times the largest one."""

PAUSES_S = (0.5, 2.0)
"""Pauses before a page is asked for again after 429 or 5xx. Chosen: a person waits for it."""

MAX_PAGES = 2000
"""Pages of one answer; more is an endless loop. Chosen: all of Azure has fewer."""


class Caller:
    """Asks for JSON over HTTP: in time, and again when that may help.

    Connections live as long as ``with``.
    """

    def __init__(
        self,
        client: httpx.Client | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a client, or make one whose requests end in time."""
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
        """Close them, unless they are the giver's."""
        if self._client is not None and self._given is None:
            self._client.close()
            self._client = None

    def json(self, url: str, what: str, params: Mapping[str, str] | None = None) -> Any:
        """The JSON at *url*.

        Raises:
            BackendError: No answer, an error, or no JSON; ``transient`` when it may pass.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                return self._once(url, what, params)
            except BackendError as err:
                if pause_s is None or err.status is None or not err.transient:
                    raise
                self._sleep(pause_s)
        raise AssertionError

    def _once(self, url: str, what: str, params: Mapping[str, str] | None) -> Any:
        import httpx  # noqa: PLC0415  (as above)

        assert self._client is not None, "within `with` alone"
        try:
            with self._client.stream("GET", url, params=params, headers=self.headers) as answer:
                status, content = answer.status_code, self._content(answer, what)
        except httpx.InvalidURL as err:
            raise BackendError(f"{what}: {url!r:.100} is no address: {err}", transient=False) from err
        except httpx.HTTPError as err:
            text = f"{what}: no answer within {TIMEOUT_S:g} s: {err or type(err).__name__}"
            raise BackendError(text, transient=True) from err
        if status != httpx.codes.OK:
            is_transient = status == httpx.codes.TOO_MANY_REQUESTS or status >= 500
            said = content[:200].decode(errors="replace")
            raise BackendError(f"{what} answered {status}: {said}", status=status, transient=is_transient)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as err:
            raise BackendError(f"{what}: the answer is no whole JSON: {err}", transient=True) from err

    def _content(self, answer: httpx.Response, what: str) -> bytes:
        """The body, while it comes in time and within bounds."""
        begun, parts, size = self._clock(), [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > PAGE_BYTES:
                raise BackendError(f"{what}: a page of more than {PAGE_BYTES >> 20} MiB", transient=False)
            if self._clock() - begun > PAGE_S:
                raise BackendError(f"{what}: a page was not there after {PAGE_S:g} s", transient=True)
        return b"".join(parts)
