"""Metrics of a Prometheus server, for scaling rules with a query."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from envscaler_agent.messages import object_or_empty
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.hooks.connections import HttpServer, http_server, server_of_url
from envscaler_airflow.hooks.settings import setting
from envscaler_airflow.scaling import Ask

TIMEOUT_S = 5.0
"""Chosen: an instant query takes milliseconds, and a check of a stage must not wait for long."""
MOST_BYTES = 4 << 20
"""Longest answer that is read, bytes. Chosen: enough for ten thousand series with their labels."""
MOST_SERIES = 10_000
"""More series than this are not the answer to a useful query. Chosen."""

_WHAT = "a Prometheus server"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str

    @property
    def reason(self) -> str:
        """Return the server's own message."""
        return str(object_or_empty(self.text).get("error", self.text))[:200]


class Prometheus:
    """Requests current values from a Prometheus server, or a server with its HTTP API.

    Blocks: a trigger calls it in a thread.

    Source: prometheus.io/docs/prometheus/latest/querying/api, instant queries.
    """

    def __init__(
        self,
        server: HttpServer,
        *,
        transport: httpx.BaseTransport | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send no request yet.

        Args:
            server: Its address; a user and password are used and never shown.
            transport: Replaces the network.
            monotonic: To end a slow answer.
        """
        self._server = server
        self._shown = shown(server.url.rstrip("/"))
        self._transport = transport
        self._monotonic = monotonic

    def values(self, query: str) -> tuple[float, ...]:
        """Values of every series that *query* selects now, in the server's order, without NaN and infinity.

        Raises:
            SpecError: The server does not understand the query, or its answer contains no numbers.
            BackendError: The server does not answer now.
        """
        try:
            answer = self._get(query)
        except httpx.InvalidURL as err:
            raise SpecError(f"{self._shown}: this is not the URL of a Prometheus server") from err
        except UnicodeError:  # its own message would show the token
            raise SpecError(f"{self._shown}: host or token has letters that cannot be sent") from None
        except httpx.HTTPError as err:
            why = str(err) or type(err).__name__
            raise BackendError(f"{self._shown}: Prometheus does not answer: {why}", transient=True) from err
        if answer.status in (400, 422):
            raise SpecError(f"{self._shown}: {answer.reason}")
        if answer.status != httpx.codes.OK:
            raise BackendError(
                f"{self._shown}: Prometheus answers {answer.status}: {answer.reason}",
                status=answer.status,
                transient=answer.status >= httpx.codes.INTERNAL_SERVER_ERROR,
            )
        return self._read(answer)

    def known(self, query: str) -> tuple[float, ...]:
        """Like :meth:`values`, but never empty.

        Raises:
            SpecError, BackendError: As there.
            BackendError: There is not a number now.
        """
        values = self.values(query)
        if not values:
            raise BackendError(f"{self._shown}: Prometheus has no number for it now")
        return values

    def _get(self, query: str) -> _Answer:
        """Read up to :data:`MOST_BYTES` for :data:`TIMEOUT_S`, even if they arrive slowly."""
        ends = self._monotonic() + TIMEOUT_S
        url, parts = f"{self._server.url.rstrip('/')}/api/v1/query", list[bytes]()
        with (
            httpx.Client(
                transport=self._transport,
                timeout=TIMEOUT_S,
                auth=self._server.auth,
                headers=self._server.headers,
                verify=self._trusted(),
            ) as client,
            client.stream("GET", url, params={"query": query}) as answer,
        ):
            for part in answer.iter_bytes():
                parts.append(part)
                if sum(map(len, parts)) > MOST_BYTES:
                    raise BackendError(f"{self._shown}: Prometheus answers more than {MOST_BYTES >> 20} MiB")
                if self._monotonic() > ends:
                    raise httpx.ReadTimeout(f"no whole answer within {TIMEOUT_S:g} s")
            return _Answer(answer.status_code, b"".join(parts).decode(errors="replace"))

    def _trusted(self) -> bool | ssl.SSLContext:
        verify = self._server.verify
        if isinstance(verify, bool):
            return verify
        folder = Path(verify).is_dir()
        try:
            return ssl.create_default_context(
                cafile=None if folder else verify, capath=verify if folder else None
            )
        except OSError as err:  # includes errors of ssl
            why = err.strerror or err
            raise SpecError(f"{self._shown}: verify: {verify} cannot be read ({why})") from err

    def _read(self, answer: _Answer) -> tuple[float, ...]:
        try:
            found = json.loads(answer.text)["data"]
            kind, result = found["resultType"], found["result"]
            if kind not in ("vector", "scalar"):
                raise SpecError(f"{self._shown}: it answers a {kind!s:.40}; ask for numbers of now")
            pairs = [result] if kind == "scalar" else [item["value"] for item in result[:MOST_SERIES]]
            values = [float(value) for _, value in pairs]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise BackendError(f"{self._shown}: this is not an answer of Prometheus: {err!s:.100}") from err
        return tuple(value for value in values if math.isfinite(value))


def shown(url: str) -> str:
    """Return *url* as it may be shown: without user, password and query."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "prometheus"
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path}"


def asks(conn_id: str | None = None) -> Ask:
    """Return a function that answers queries with connection *conn_id* or ``[envscaler] prometheus_url``.

    It looks up neither before the first query; a missing one fails only that query.
    """
    server: list[Prometheus] = []

    def ask(query: str) -> tuple[float, ...]:
        if not server:
            server.append(_of_connection(conn_id) if conn_id else _of_setting())
        return server[0].known(query)

    return ask


def _of_setting() -> Prometheus:
    url = setting("prometheus_url")
    if url is None:
        raise SpecError(
            "no Prometheus server is named: set [envscaler] prometheus_url, "
            "or give the ScalingSensor a prometheus_conn_id"
        )
    return Prometheus(server_of_url(url, "[envscaler] prometheus_url", _WHAT))


def _of_connection(conn_id: str) -> Prometheus:
    """Return the server of a connection, as ``http_server`` reads it."""
    from airflow.sdk import BaseHook  # noqa: PLC0415  (a shell that only reads settings does without)
    from airflow.sdk.exceptions import AirflowException  # noqa: PLC0415  (as above)

    try:
        connection: Any = BaseHook.get_connection(conn_id)
    except AirflowException as err:
        raise SpecError(f"connection {conn_id!r}: {err!s:.200}") from err
    return Prometheus(http_server(connection, _WHAT))
