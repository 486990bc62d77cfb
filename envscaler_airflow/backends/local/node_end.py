"""How a node ended, told from its exit code, what the wrapper said and what the kernel counted. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Any

from envscaler_agent.protocol import (
    END_REASONS,
    EXIT_LEFT,
    EXIT_NOT_FOUND,
    EXIT_ORPHANED,
    EXIT_SETUP_FAILED,
    EXIT_STOPPED,
    Ended,
    Status,
)
from envscaler_airflow.errors import ProtocolError

_BY_EXIT_CODE = {
    0: "succeeded",
    EXIT_LEFT: "left",
    EXIT_ORPHANED: "orphaned",
    EXIT_STOPPED: "stopped",
    EXIT_SETUP_FAILED: "setup-failed",
    EXIT_NOT_FOUND: "not-found",
}
_NOT_BY_MEMORY = ("succeeded", "left", "orphaned", "stopped", "setup-failed", "not-found")
"""Ends that a kill for want of memory (of a data-loading worker, say) did not bring about."""


_BY_NODE_MAIN = ("deadline-exceeded", "orphaned")
"""Ends that node main itself brought about by a kill, whatever the exit code says."""


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """What end.json says of the end itself.

    Attributes:
        exit_code: 0 to 255; None when a signal ended the wrapper.
        signal: Signal number; None when it exited.
        reason: One of protocol.END_REASONS, or ``deadline-exceeded``.
        detail: One line for people.
    """

    exit_code: int | None
    signal: int | None
    reason: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it stands in end.json."""
        return {name: getattr(self, name) for name in self.__slots__}


def tell_end(
    returncode: int | None,
    *,
    said: Ended | None = None,
    oom_kills: int | None = None,
    ended_by: tuple[str, str] | None = None,
) -> NodeEnd:
    """The end of a node.

    Args:
        returncode: Of the wrapper as ``subprocess`` counts; None when it had to be killed.
        said: What the wrapper said of the command.
        oom_kills: Kills for want of memory that the kernel counted; None: not counted.
        ended_by: Reason and detail when node main itself ended it (deadline, end of the grace).
    """
    code = returncode if returncode is not None and returncode >= 0 else None
    number = int(signal.SIGKILL) if returncode is None else -returncode if returncode < 0 else None
    reason = said.reason if said else _BY_EXIT_CODE.get(code, "failed") if code is not None else "killed"
    detail = said.detail if said else ""
    if said and said.signal is not None:
        code, number = None, said.signal
    if oom_kills and reason not in _NOT_BY_MEMORY:
        return NodeEnd(
            code, number, "out-of-memory", f"the kernel killed {oom_kills} process(es) at the memory limit"
        )
    if ended_by and ended_by[0] == "killed" and number == signal.SIGTERM:
        return NodeEnd(code, number, "stopped", "ended at the first word")
    if (
        ended_by and ended_by[0] == "killed" and number == signal.SIGKILL
    ):  # the wrapper may have said it first
        return NodeEnd(code, number, *ended_by)
    if ended_by and reason != "succeeded" and (returncode is None or ended_by[0] in _BY_NODE_MAIN):
        return NodeEnd(code, number, *ended_by)
    return NodeEnd(code, number, reason, detail)


def read_said(text: bytes | None) -> Ended | None:
    """What the wrapper's status says of the end; None when it says nothing that can be read."""
    if text is None:
        return None
    try:
        return Status.from_json(text, where="wrapper.json").ended
    except ProtocolError:
        return None


def say_end(text: bytes | None, end: NodeEnd) -> Status:
    """The last status of a wrapper that was killed before it could tell its end: *text*, with *end*."""
    try:
        last = Status.from_json(text or b"", where="wrapper.json")
    except ProtocolError:
        last = Status()
    reason = end.reason if end.reason in END_REASONS else "killed"
    ended = Ended(exit_code=end.exit_code, signal=end.signal, reason=reason, detail=end.detail)
    return replace(last, sequence=last.sequence + 1, phase="ended", ended=ended)
