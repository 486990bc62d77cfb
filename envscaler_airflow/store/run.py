"""A run in a store: its folder, and the typed content of each file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from envscaler_agent.messages import parse_object, read_object
from envscaler_agent.protocol import Control, Ended, Progress, Status, Transfer, control_name, status_name
from envscaler_airflow.errors import ProtocolError, SpecError
from envscaler_airflow.store.checkpoints import read_control
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.lease import LeaseFile, newest_claim
from envscaler_airflow.store.run_store import Store, StoreView, read_message

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec

RUN = "run.json"
PLAN = "plan.json"
RESULT = "result.json"
ARCHIVE_FIELD = "workdir_archive"
"""Field added to the spec's own; names the archive of its workdir."""
MAX_KEY_BYTES = 1 << 16
"""Largest ``run.json`` read, bytes. Chosen: a key takes less than a kilobyte."""
MAX_SPEC_BYTES = 1 << 22
"""Largest frozen spec read, bytes. Chosen: far more than the loader accepts."""
MOST = 10**15
"""Largest count or amount believed. Source: ``Amount`` of an event, so that each can be written to one."""
_SIGNED = frozenset({"loss", "accuracy"})
_Report = TypeVar("_Report", Status, Progress, Ended)


def spec_name(spec_hash: str) -> str:
    """Name of the spec with that hash: owners never overwrite that of another one."""
    return f"spec-{spec_hash[:16]}.json"


def run_prefixes(store: Store) -> list[str]:
    """Folder of every run of the store, ``RunKey.prefix``, sorted."""
    level = [""]
    for _ in range(5):
        level = [f"{here}/{child}".lstrip("/") for here in level for child in store.children(here)]
    return sorted(prefix for prefix in level if prefix.count("/") == 4)


class Run(StoreView):
    """One run: its folder as a store of its own, and the typed content of its files.

    Opening it neither reads nor writes. Every method raises StoreError if the store does not answer.

    Attributes:
        events: The events; keeps their fold between two reads.
        lease: The owner's lease.
    """

    def __init__(
        self,
        store: Store,
        where: RunKey | str,
        *,
        clock: Callable[[], float] | None = None,
        snapshots: bool = False,
    ) -> None:
        """See one run of *store*.

        Args:
            store: Run store.
            where: The run's key or, if that is not known, its folder, ``RunKey.prefix``.
            clock: The run's clock, seconds since the epoch; the store's when None.
            snapshots: True for the owner: the others only read events.
        """
        super().__init__(store, where if isinstance(where, str) else where.prefix)
        self._key = None if isinstance(where, str) else where
        self._clock = clock
        self.events = EventLog(self, snapshots=snapshots)
        self.lease = LeaseFile(self)
        self._spec: tuple[str, EnvSpec] | None = None

    def now(self) -> float:
        """Return the run's time, seconds since the epoch."""
        return self.store.now() if self._clock is None else self._clock()

    def key(self) -> RunKey:
        """Return the run's key, from ``run.json`` if it is not known.

        Raises:
            ProtocolError: ``run.json`` has no readable key, or another run's.
        """
        if self._key is not None:
            return self._key
        try:
            text = self.read(RUN, max_bytes=MAX_KEY_BYTES)
            key = RunKey.from_dict(read_object(text, where=self.uri(RUN))["key"] if text else {})
        except (ValueError, KeyError, TypeError) as err:
            raise ProtocolError(f"{self.uri(RUN)}: expected the key of a run, got {err!r}") from err
        if key.prefix != self.prefix:
            raise ProtocolError(f"{self.uri(RUN)}: is the key of {key.prefix}")
        self._key = key
        return key

    def document(self, spec_hash: str) -> dict[str, Any]:
        """Return the frozen spec with that hash, exactly as stored.

        Raises:
            ProtocolError: It is missing, or not a JSON object.
        """
        name = spec_name(spec_hash)
        text = self.read(name, max_bytes=MAX_SPEC_BYTES)
        if text is None:
            raise ProtocolError(f"{self.prefix}/{name}: is absent")
        return parse_object(text, where=f"{self.prefix}/{name}")

    def plan(self) -> dict[str, Any]:
        """Return what the planner decided at the start, and the targets of moves; {} before there is a plan.

        Raises:
            ProtocolError: It is not a JSON object.
        """
        text = self.read(PLAN)
        return {} if text is None else parse_object(text, where=f"{self.prefix}/{PLAN}")

    def spec(self, spec_hash: str) -> EnvSpec:
        """Return the frozen spec with that hash. Raises as :meth:`document`."""
        from envscaler_airflow.envspec import EnvSpec  # noqa: PLC0415 - pydantic; DAG files import this module

        if self._spec is None or self._spec[0] != spec_hash:
            document = self.document(spec_hash)
            document.pop(ARCHIVE_FIELD, None)
            try:
                self._spec = (spec_hash, EnvSpec.from_dict(document))
            except SpecError as err:
                where = f"{self.prefix}/{spec_name(spec_hash)}"
                raise ProtocolError(f"{where} was written by another version: {err}") from err
        return self._spec[1]

    def parameters(self, spec_hash: str) -> dict[str, Any]:
        """Return the values of the spec's parameters; {} if none can be read."""
        try:
            found = self.document(spec_hash).get("parameters")
        except ProtocolError:
            return {}
        return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}

    def status(self, attempt: tuple[int, int], node: int = 0) -> Status | None:
        """Return a node's last report, as far as it is believable; None if it does not follow the protocol.

        Only the pod that claimed the node last reports for it. *attempt* is ``(generation, number)``.
        """
        generation, number = attempt
        claim = newest_claim(self, generation=generation, attempt=number, node=node, known=1)
        return self.status_of_claim(attempt, claim, node)

    def status_of_claim(self, attempt: tuple[int, int], claim: int, node: int = 0) -> Status | None:
        """Return the last status of the pod with that claim, even after a later claim."""
        name = status_name(*attempt, node, claim)
        try:
            status = read_message(self, name, Status)
        except ProtocolError:
            return None
        return None if status is None else replace(believable(status), claim=claim)

    def control(self, attempt: tuple[int, int]) -> Control | None:
        """Return the owner's last request to *attempt*; None if it is absent or of another version."""
        return read_control(self, control_name(*attempt))

    def write_control(self, attempt: tuple[int, int], control: Control) -> None:
        """Replace the owner's request to *attempt*. Only for the owner."""
        self.write(control_name(*attempt), control.to_json())


def believable(status: Status) -> Status:
    """Return *status* with impossible numbers set to unknown: negative, or beyond :data:`MOST`."""
    known = _without_nonsense(status)
    usage = {name: value for name, value in status.usage.items() if _is_sane(value)}
    transfer = status.transfer if _is_possible(status.transfer) else None
    ended = None if status.ended is None else _without_nonsense(status.ended)
    progress = _without_nonsense(status.progress)
    return replace(known, progress=progress, usage=usage, transfer=transfer, ended=ended)


def _is_possible(transfer: Transfer | None) -> bool:
    return transfer is not None and 0 <= transfer.done_bytes <= transfer.total_bytes <= MOST


def _without_nonsense(report: _Report) -> _Report:
    numbers = {item.name: getattr(report, item.name) for item in fields(report) if item.default is None}
    nonsense = {
        name: None
        for name, value in numbers.items()
        if isinstance(value, int | float) and name not in _SIGNED and not _is_sane(value)
    }
    return replace(report, **nonsense) if nonsense else report  # type: ignore[arg-type]  # all of them Optional


def _is_sane(value: float) -> bool:
    return 0 <= value <= MOST
