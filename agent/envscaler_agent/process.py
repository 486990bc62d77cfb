"""The command: values inserted into its words, its process group, and all its descendants."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h. The wrapper instead of init adopts orphans of the command."""


@dataclass(frozen=True)
class Reaped:
    """A child that has ended.

    Attributes:
        pid: Its process id.
        code: Exit code, or minus the signal.
        cpu_s: CPU seconds of it and of the children that it waited for.
    """

    pid: int
    code: int
    cpu_s: float


def become_subreaper() -> bool:
    """Adopt orphaned descendants; False where the system cannot do it."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def start(
    argv: Sequence[str], *, cwd: Optional[str], env: Mapping[str, str], output: int
) -> subprocess.Popen[bytes]:
    """Start *argv* in a process group of its own, output and errors into the descriptor *output*.

    It stays in the caller's session, so that a kill of that session ends it too.

    Raises:
        OSError: As from ``execvp``.
    """
    group: Dict[str, Any] = (
        {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
    )
    return subprocess.Popen(
        list(argv), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, **group
    )


def reap() -> Iterator[Reaped]:
    """Yield every child that has ended, including adopted ones; never blocks."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield Reaped(pid, exit_code(status), usage.ru_utime + usage.ru_stime)


def has_children() -> bool:
    """Return whether a child, including adopted ones, runs or waits to be reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def exit_code(status: int) -> int:
    """Return a wait status in the form of ``subprocess``."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def parents() -> Dict[int, Tuple[int, int]]:
    """Return ``{pid: (parent, process group)}`` of all visible processes, {} without /proc."""
    found = {}
    for pid in _pids():
        fields = stat_fields(pid)
        if fields:
            found[pid] = (int(fields[1]), int(fields[2]))
    return found


def _pids() -> List[int]:
    try:
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    except OSError:
        return []


def stat_fields(pid: int) -> List[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` after the name: state, ppid, pgrp, ...; [] if ended."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        data = os.read(file, 1024)
    except OSError:
        return []
    finally:
        os.close(file)
    return data[data.rfind(b")") + 2 :].split()


def family(root: int, tree: Mapping[int, Tuple[int, int]]) -> List[int]:
    """Return *root*, its process group and all descendants of either, by *tree* of :func:`parents`."""
    members = {pid for pid, (_, group) in tree.items() if root in (group, pid)}
    grew = True
    while grew:
        more = {pid for pid, (parent, _) in tree.items() if parent in members} - members
        members |= more
        grew = bool(more)
    return sorted(members)


def send(root: int, number: int, *, spare: Sequence[int] = ()) -> int:
    """Send signal *number* to the family of *root* and to orphans that this process adopted.

    Processes in *spare* and this one are skipped.

    Returns:
        How many were reached.
    """
    tree = parents()
    adopted = [pid for pid, (parent, _) in tree.items() if parent == os.getpid() and pid not in spare]
    victims = set(family(root, tree))
    for orphan in adopted:
        victims.update(family(orphan, tree))
    victims -= {os.getpid(), *spare}
    if not tree:  # no /proc on this system
        return _send(lambda: os.killpg(root, number))
    return sum(_send(lambda pid=pid: os.kill(pid, number)) for pid in victims)


def _send(kill: Any) -> int:
    try:
        kill()
    except (ProcessLookupError, PermissionError):
        return 0
    return 1


ADDRESS = "ENVSCALER_RENDEZVOUS"
"""Environment variable with ``host:port`` of node 0, the rendezvous of the processes of all nodes."""
_WORD = re.compile(r"\$ENVSCALER_(RENDEZVOUS_HOST|RENDEZVOUS_PORT|RENDEZVOUS|NODE)(?![A-Za-z0-9_])")


def expand(words: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """Return *words* with ``$ENVSCALER_RENDEZVOUS``, its ``_HOST`` and ``_PORT``, and ``$ENVSCALER_NODE``.

    Names without a value in *environ* are unchanged.
    """
    known = _known(environ)
    return [_WORD.sub(lambda match: known.get(match[1], match[0]), word) for word in words]


def _known(environ: Mapping[str, str]) -> Dict[str, str]:
    known = {}
    address = environ.get(ADDRESS)
    if address:
        host, _, port = address.rpartition(":")
        known = {"RENDEZVOUS": address, "RENDEZVOUS_HOST": host.strip("[]"), "RENDEZVOUS_PORT": port}
    if environ.get("ENVSCALER_NODE"):
        known["NODE"] = environ["ENVSCALER_NODE"]
    return known
