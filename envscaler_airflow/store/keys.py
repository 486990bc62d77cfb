"""The key of a run, and the folder that follows from it."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass

from envscaler_airflow.planning.record import Record

SHELL_DAG = "shell"
"""``dag_id`` of runs that are started without Airflow. Chosen."""
MAX_PART_BYTES = 80
"""Longest part of a run's folder, bytes. Chosen: six of them and the names below fit into a path's 1024."""
_HASH_DIGITS = 10  # chosen: 40 bits, for names that already agree in 69 bytes
_PLAIN = frozenset((string.ascii_letters + string.digits + "_-").encode())
_CUT = "~"
"""Precedes the hash of a shortened part. No encoded part contains it, so none looks like a shortened one."""


def encode_part(text: str) -> str:
    """One part of a run's folder: percent-encoded outside ``[A-Za-z0-9_-]``, at most 80 bytes.

    A longer one is shortened and ends with ``~`` and 10 hex digits of the sha256 of *text*, so different
    texts give different parts. ``..`` is a legal dag_id and becomes ``%2E%2E``.

    Raises:
        ValueError: *text* is empty.
    """
    if not text:
        raise ValueError("a part of a run's key is empty")
    raw = text.encode("utf-8", "surrogatepass")
    pieces = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    whole = "".join(pieces)
    if len(whole) <= MAX_PART_BYTES:
        return whole
    room = MAX_PART_BYTES - len(_CUT) - _HASH_DIGITS
    while len(whole) > room:
        whole = whole[: -len(pieces.pop())]
    return f"{whole}{_CUT}{hashlib.sha256(raw).hexdigest()[:_HASH_DIGITS]}"


@dataclass(frozen=True, slots=True)
class RunKey(Record):
    """Identity of a run: one execution of a stage in a DAG run, over all its try numbers.

    Attributes:
        deployment: ``[envscaler] deployment``, see :func:`~envscaler_airflow.store.base.deployment_of`.
        dag_id, run_id, task_id: Airflow's; outside Airflow the user who submits chooses them.
        map_index: Index of a mapped task; -1 when it is not mapped, as in Airflow.
        team: Airflow's team, None if Airflow has no teams.
    """

    deployment: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    team: str | None = None

    def __post_init__(self) -> None:
        """Reject a key with an empty name."""
        for name in ("deployment", "dag_id", "run_id", "task_id"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if self.team == "":
            raise ValueError("team is empty: leave it out where Airflow has none")

    @property
    def prefix(self) -> str:
        """Folder of the run: ``deployment[.team]/dag/run/task/map``; no other part contains a dot."""
        first = encode_part(self.deployment)
        if self.team is not None:
            first = f"{first}.{encode_part(self.team)}"
        rest = (self.dag_id, self.run_id, self.task_id, str(self.map_index))
        return "/".join([first, *(encode_part(part) for part in rest)])
