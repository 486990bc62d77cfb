"""Metrics of a Prometheus server, for scaling rules with a query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import httpx

from envscaler_airflow.errors import BackendError, SpecError

TIMEOUT_S = 5.0
"""Chosen: an instant query takes milliseconds, and a check of a stage must not wait for long."""
MOST_SERIES = 10_000
"""More series than this are an answer to another question. Chosen."""


class Prometheus:
    """Asks a Prometheus server, or what speaks its HTTP API, for values now.

    Blocks: from a trigger it is called in a thread.

    Source: prometheus.io/docs/prometheus/latest/querying/api, instant queries.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Ask nothing yet; *headers* are for a server that wants a token."""
        self._url = url.rstrip("/")
        self._headers = dict(headers or {})

    def values(self, query: str) -> tuple[float, ...]:
        """Value of every series that *query* selects now, in the server's order; NaN and infinity left out.

        Raises:
            SpecError: The server does not understand the query, or it answers no numbers.
            BackendError: The server cannot be asked now.
        """
        try:
            answer = httpx.get(
                f"{self._url}/api/v1/query",
                params={"query": query},
                headers=self._headers,
                timeout=TIMEOUT_S,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as err:
            raise BackendError(f"{self._url}: Prometheus does not answer: {err}", transient=True) from err
        if answer.status_code in (400, 422):
            raise SpecError(f"prometheus: {query!r:.200}: {_said(answer)}")
        if answer.status_code != httpx.codes.OK:
            raise BackendError(
                f"{self._url}: Prometheus answers {answer.status_code}: {_said(answer)}",
                status=answer.status_code,
                transient=answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR,
            )
        return self._read(answer, query)

    def _read(self, answer: httpx.Response, query: str) -> tuple[float, ...]:
        try:
            found = answer.json()["data"]
            kind, result = found["resultType"], found["result"]
            if kind not in ("vector", "scalar"):
                raise SpecError(f"prometheus: {query!r:.200}: answers a {kind}; ask for numbers of now")
            pairs = [result] if kind == "scalar" else [item["value"] for item in result[:MOST_SERIES]]
            values = [float(value) for _, value in pairs]
        except (KeyError, TypeError, ValueError) as err:
            raise BackendError(f"{self._url}: this is no answer of Prometheus: {err}") from err
        return tuple(value for value in values if math.isfinite(value))


def _said(answer: httpx.Response) -> Any:
    try:
        return answer.json()["error"]
    except (KeyError, TypeError, ValueError):
        return answer.text[:200]
