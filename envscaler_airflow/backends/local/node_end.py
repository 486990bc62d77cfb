"""How a node ended, from its exit code, the wrapper's report and the kernel's counters. Pure."""

from __future__ import annotations

import signal

from envscaler_agent.ending import EXIT_CODES, reason_of
from envscaler_agent.protocol import END_REASONS, Ended
from envscaler_airflow.backends.base import NodeEnd


def tell_end(
    returncode: int | None,
    *,
    said: Ended | None = None,
    oom_kills: int | None = None,
    ended_by: tuple[str, str] | None = None,
) -> NodeEnd:
    """The end of a node.

    Args:
        returncode: Exit code of the wrapper as in ``subprocess``; None when it had to be killed.
        said: What the wrapper reported about the command.
        oom_kills: Out-of-memory kills that the kernel counted; None: not counted.
        ended_by: Reason and detail when node main itself ended it (deadline, end of the grace).
    """
    code = returncode if returncode is not None and returncode >= 0 else None
    number = int(signal.SIGKILL) if returncode is None else -returncode if returncode < 0 else None
    reason = said.reason if said else "killed" if code is None else reason_of(code)
    detail = said.detail if said else ""
    if said and said.signal is not None:
        code, number = None, said.signal
    if oom_kills and reason != "succeeded" and reason not in EXIT_CODES:
        return NodeEnd(
            code, number, "out-of-memory", f"the kernel killed {oom_kills} process(es) at the memory limit"
        )
    if ended_by and ended_by[0] == "killed" and number == signal.SIGTERM:
        return NodeEnd(code, number, "stopped", "ended at the first word")
    if ended_by and ended_by[0] == "killed" and number == signal.SIGKILL:  # the wrapper may have reported it
        return NodeEnd(code, number, *ended_by)
    if ended_by and reason != "succeeded" and (returncode is None or ended_by[0] != "killed"):
        return NodeEnd(code, number, *ended_by)
    return NodeEnd(code, number, reason, detail)


def ended_of(end: NodeEnd) -> Ended:
    """*end* as the wrapper would have reported it."""
    reason = end.reason if end.reason in END_REASONS else "killed"
    return Ended(exit_code=end.exit_code, signal=end.signal, reason=reason, detail=end.detail)
