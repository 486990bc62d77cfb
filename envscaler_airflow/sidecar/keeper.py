"""Keeps one node's sidecar process running, on the side of the process that starts it.

Imports little: this process runs as long as the node, beside the training's memory.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from envscaler_agent.messages import MAX_JSON_BYTES, SCHEMA, object_or_empty
from envscaler_agent.protocol import Ended, Status
from envscaler_agent.spool import Spool
from envscaler_airflow.backoff import Backoff
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.local_files import read_bytes, write_atomic

FIRST_WAIT_S, MOST_WAIT_S = 1.0, 30.0
"""Waits before the sidecar is restarted, seconds. Chosen: quick after one crash, quiet in a crash loop."""
SETUP_TRIES = 5
"""How often the sidecar may die before the training has started. Chosen: about 30 s of crashes."""


class Keeper:
    """Restarts the sidecar until it is done. Nothing here waits: call :meth:`keep` again and again.

    Attributes:
        process: The sidecar; None while none runs.
        has_failed: True once it has crashed so often before the start that ``start.json`` reports it.
    """

    def __init__(
        self,
        spool: Spool,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        monotonic: Callable[[], float],
        output: str,
    ) -> None:
        """Start it with *start* at the first :meth:`keep`; messages name *output* as its log."""
        self.process: subprocess.Popen[bytes] | None = None
        self.has_failed = False
        self._spool, self._start, self._output = spool, start, output
        self._monotonic = monotonic
        self._backoff = Backoff(monotonic, first_s=FIRST_WAIT_S, most_s=MOST_WAIT_S)
        self._born = 0.0

    @property
    def is_done(self) -> bool:
        """True when it reports that everything is uploaded."""
        try:
            body = read_bytes(self._spool.sidecar, MAX_JSON_BYTES) or b""
        except OSError:
            return False
        return object_or_empty(body).get("phase") == "done"

    def keep(self) -> None:
        """Start it when it does not run and its back-off is over."""
        if self.process is not None or not self._backoff.is_ready:
            return
        self._born = self._monotonic()
        try:
            self.process = self._start()
        except (OSError, subprocess.SubprocessError) as err:
            print(f"sidecar: {err}", flush=True)  # noqa: T201  # the log of this process is its output
            self.died()

    def died(self) -> None:
        """Record a death: deaths in quick succession lengthen the wait, and end a set-up."""
        self.process = None
        if self._monotonic() - self._born > 2 * MOST_WAIT_S:
            self._backoff.worked()
        self._backoff.failed()
        if self._backoff.failures >= SETUP_TRIES and not self._spool.start.exists():
            reason = f"the sidecar died {self._backoff.failures} times before the start; see {self._output}"
            with suppress(OSError):  # the next death tries again
                body = json.dumps({"schema": SCHEMA, "failed": reason}).encode()
                write_atomic(self._spool.start, body, follow=False)
                self.has_failed = True


def reported_end(spool: Spool) -> Ended | None:
    """The end in the wrapper's last status; None when it reports none, or cannot be read."""
    return _last(spool).ended


def report_end(spool: Spool, ended: Ended) -> None:
    """Complete the last status of a wrapper that was killed before it could report its end.

    Raises:
        OSError: It cannot be written.
    """
    last = _last(spool)
    if last.ended is None:
        body = replace(last, sequence=last.sequence + 1, phase="ended", ended=ended).to_json()
        write_atomic(spool.wrapper, body, follow=False)


def _last(spool: Spool) -> Status:
    with suppress(OSError, ProtocolError):
        return Status.from_json(read_bytes(spool.wrapper, MAX_JSON_BYTES) or b"", where=spool.wrapper.name)
    return Status()
