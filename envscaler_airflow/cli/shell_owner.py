"""Own a run from a shell until it ends, for ``run``, ``submit`` and ``cancel``; who owns and watches it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NoReturn

import click

from envscaler_agent.ending import EXIT_STOPPED
from envscaler_agent.messages import MAX_JSON_BYTES, SCHEMA, read_object
from envscaler_airflow.backends.base import Backend, HasAddress
from envscaler_airflow.backends.local.machine import Identity, this_identity
from envscaler_airflow.backends.local.processes import ProcessId
from envscaler_airflow.cli.common import echo_json
from envscaler_airflow.cli.follow import OutputReader, StageFollower, Voice, marked, progress_line
from envscaler_airflow.cli.tables import print_report
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    EnvScalerError,
    NoOfferError,
    ProtocolError,
    RunFailedError,
    SpecError,
    StoreError,
)
from envscaler_airflow.local_files import user_name
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.report import run_report
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    StoppedError,
    SupersededError,
    Waiting,
)
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import Actor, RunState, outcome_of
from envscaler_airflow.run.event_bodies import SHELL, Failed
from envscaler_airflow.run.narration import printable
from envscaler_airflow.store.keys import SHELL_DAG
from envscaler_airflow.store.lease import LEASE, RENEW_EVERY_S
from envscaler_airflow.store.run import Run

OWNER = "lease/owner.json"
"""Which process of which machine owns a run from a shell."""
MAX_OWNER_BYTES = 1 << 14
"""Largest such file read, bytes. Chosen: ours have 500."""
SILENT_S = 3 * RENEW_EVERY_S + 10.0
"""Age of a lease beyond which no process renews it, seconds. Chosen: three renewals that did not come."""

Presence = Literal["there", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Ownership:
    """What is known of the owner of a run.

    Attributes:
        name: As shown: ``ana@build-3:4711`` (its process), ``Airflow, try 2``, ``-``.
        presence: ``there`` while a process watches the run; ``gone`` when it is known that none does.
        why: How that is known; "" where it is not.
        is_by_age: True when it is known from the age of the lease, not from the process itself.
    """

    name: str
    presence: Presence
    why: str = ""
    is_by_age: bool = False


def write_owner(run: Run, ti_id: str, backend: Backend) -> None:
    """Record that this process owns *run* as *ti_id*, on *backend*.

    Raises:
        StoreError: The store cannot be written.
    """
    process = ProcessId.of(os.getpid())
    body = {
        "schema": SCHEMA,
        "ti_id": ti_id,
        "user": user_name(),
        "machine": this_identity().to_dict(),
        "process": None if process is None else process.to_dict(),
        "backend": backend.name,
        "address": backend.address() if isinstance(backend, HasAddress) else {},
    }
    run.write(OWNER, json.dumps(body).encode())


def address_of(run: Run, backend: str) -> dict[str, Any]:
    """Where the last shell that owned the run reached *backend*; {} where that is not known.

    Raises:
        StoreError: The store cannot be read.
    """
    body = _written(run) or {}
    found = body.get("address") if body.get("backend") == backend else None
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def is_of_shell(run: Run) -> bool:
    """True for a run that was started without Airflow."""
    return run.prefix.split("/")[1:2] == [SHELL_DAG]


def owner_of(run: Run, state: RunState) -> Ownership:
    """Who owns the run, and whether that process is there.

    On the machine of a shell that owns it, by its process; elsewhere by the age of the lease on the store's
    own clock. Where the store reports no dates it is unknown.

    Raises:
        StoreError: The store cannot be read.
    """
    body = _written(run)
    is_shell = is_of_shell(run)
    if is_shell and body is not None and (state.owner is None or body["ti_id"] == state.owner.ti_id):
        return _of_shell(run, body)
    if state.owner is None:
        return Ownership("-", "gone" if body is None else "unknown", "no process has taken it")
    name = "a shell" if is_shell else f"Airflow, try {state.owner.try_number}"
    return _by_lease(run, name)


def _written(run: Run) -> dict[str, Any] | None:
    try:
        body = read_object(run.read(OWNER, max_bytes=MAX_OWNER_BYTES) or b"", where=OWNER)
    except ProtocolError:
        return None
    return body if isinstance(body.get("ti_id"), str) else None


def _of_shell(run: Run, body: dict[str, Any]) -> Ownership:
    machine = body.get("machine")
    there = Identity.from_dict(machine) if isinstance(machine, dict) else Identity("?")
    process, here = ProcessId.from_dict(body.get("process")), this_identity()
    name = f"{body.get('user', '?')}@{there.host}" + (f":{process.pid}" if process else "")
    if process is None or not here.is_same_host(there):
        return _by_lease(run, name)
    if here.boot_id != there.boot_id:
        return Ownership(name, "gone", "the machine was restarted since")
    if here.pid_namespace != there.pid_namespace:
        return _by_lease(run, name)
    if process.is_alive():
        return Ownership(name, "there", "the process runs")
    return Ownership(name, "gone", "the process has ended")


def watcher_of(run: Run, state: RunState, pid: int | None = None) -> ProcessId:
    """The process that watches the run, on this machine: the shell that owns it, or the triggerer *pid*.

    Raises:
        SpecError: It is not known, or does not run here.
    """
    if pid is not None:
        process, name = ProcessId.of(pid), f"process {pid}"
    elif is_of_shell(run):
        body = _written(run) or {}
        machine = body.get("machine")
        is_here = isinstance(machine, dict) and Identity.from_dict(machine) == this_identity()
        process = ProcessId.from_dict(body.get("process")) if is_here else None
        name = owner_of(run, state).name
    else:
        raise SpecError(
            "name the triggerer's process of this machine by --triggerer PID: `pgrep -f 'airflow triggerer'` "
            "finds it; every task that it watches is watched again only after its restart"
        )
    if process is None or not process.is_alive():
        raise SpecError(f"{name} does not run on this machine")
    return process


def _by_lease(run: Run, name: str) -> Ownership:
    try:
        if run.lease.read() is None:
            return Ownership(name, "gone", "it has no lease")
    except ProtocolError:
        return Ownership(name, "unknown")
    age_s = _age_s(run)
    if age_s is None:
        return Ownership(name, "unknown")
    why = f"its lease was last renewed {duration_text(age_s)} ago"
    return Ownership(name, "gone" if age_s > SILENT_S else "there", why, is_by_age=True)


def _age_s(run: Run) -> float | None:
    """Seconds since the lease was renewed, by the store's clock; None if the store reports no dates."""
    found = run.read_dated(LEASE, max_bytes=MAX_JSON_BYTES)
    if found is None or found[1] is None:
        return None
    return max(0.0, run.now() - found[1])


def shown_status(state: RunState, presence: Presence) -> str:
    """The status of a run as shown: ``failed to start`` and ``orphaned`` are distinct from ``active``."""
    has_begun = bool(state.attempts_of(state.generation)) if state.generation else False
    if state.status == "none":
        return {"there": "starting", "unknown": "none", "gone": "failed to start"}[presence]
    if state.status == "failed" and not has_begun:
        return "failed to start"
    if state.status == "active" and presence == "gone":
        return "orphaned" if has_begun else "failed to start"
    return state.status


FAILED = 1
"""Exit code of a stage that failed though its training did not: an output is missing, the budget is spent."""
FAULT = 2
"""Exit code of an error of ours, as click's."""
_LIMITS = ("budget", "timeout")
"""Why the owner ends a training that ran well: no error of ours, and no exit code of the training's own."""
GRACE_S = 60.0
"""What a machine is given to save and stop where the store cannot be written. Chosen: a small checkpoint."""

_NO_ROOM = re.compile(r"attempt \d+ not-started(?:: (?P<why>.*))?")
_ON = re.compile(r"(?P<where>attempt \d+ on (?P<name>.+?) \([^()]*\)): (?P<after>after: not-started\b)?")
"""Lines about an attempt that was not started, and about the offer of the next one."""
_LAST = ("the stage failed: ", "the run stopped: ")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Signalled(KeyboardInterrupt):
    """A signal asked this process to end.

    Attributes:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        """Keep the signal's *number*."""
        super().__init__()
        self.number = number

    @property
    def name(self) -> str:
        """``SIGTERM``."""
        return signal.Signals(self.number).name


@contextmanager
def signals() -> Iterator[None]:
    """TERM, HUP and INT alike raise :class:`Signalled`; one that is ignored, as by nohup, stays ignored."""

    def raise_it(number: int, _frame: FrameType | None) -> NoReturn:
        raise Signalled(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {kind: signal.getsignal(kind) for kind in _ENDING}
    kept = {kind: old for kind, old in before.items() if old is not signal.SIG_IGN and old is not None}
    for kind in kept:
        signal.signal(kind, raise_it)
    try:
        yield
    finally:
        for kind, old in kept.items():
            signal.signal(kind, old)


def shell_actor(run: Run) -> Actor:
    """One start from a shell, newer than every owner before it.

    It counts as a clear: what failed or was stopped is taken up again. What succeeded is delivered again.
    """
    owner = run.events.load().owner
    number = 1 if owner is None else 1 + max(owner.try_number, owner.max_tries)
    return Actor(str(uuid.uuid4()), number, max_tries=number, life=SHELL)


@dataclass(slots=True)
class Foreground:
    """One process that owns a run and shows what happens.

    Attributes:
        run, stage, backend: What runs, and where.
        voice: Prints its lines.
        actor: Who owns it.
        shows_training: False to hide the training's output.
    """

    run: Run
    stage: Stage
    backend: Backend
    voice: Voice
    actor: Actor
    shows_training: bool = True
    _owner: ForegroundOwner = field(init=False)
    _follower: StageFollower = field(init=False)
    _waiting: Waiting | None = field(init=False, default=None)
    _printed: OutputReader = field(init=False)
    _waits: str = field(init=False, default="")
    _no_room: str = field(init=False, default="")
    _tried: str = field(init=False, default="")
    _messages: dict[int, str] = field(init=False, default_factory=dict)
    _message: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Prepare; nothing is read or written."""
        owner = Owner(run=self.run, backend=self.backend, actor=self.actor, stage=self.stage)
        self._printed = OutputReader(self.run)
        self._follower = StageFollower(self.run, self.run.key().task_id)
        self._owner = ForegroundOwner(
            owner,
            on_wait=self._on_wait,
            on_poll=self._on_poll,
            on_trouble=self._on_trouble,
        )

    def own(self) -> Delivered:
        """Until the run is delivered. Raises as :meth:`Owner.enter`, and SystemExit after a signal."""
        self._follower.skip()
        write_owner(self.run, self.actor.ti_id, self.backend)
        return self._until_end(resuming=False)

    def go_on(self) -> Delivered:
        """The same for a run that this actor owns already, as an ``owner`` event says."""
        self._follower.skip()
        return self._until_end(resuming=True)

    def _until_end(self, *, resuming: bool) -> Delivered:
        try:
            with signals():
                try:
                    return self._owner.resume() if resuming else self._owner.own()
                except KeyboardInterrupt as err:
                    return self._stop(err if isinstance(err, Signalled) else Signalled(signal.SIGINT))
        except SupersededError as err:
            raise SupersededError(
                f"{self.run.prefix}: another process was started with this name and goes on with the run; "
                "`envscaler logs -f` shows it"
            ) from err
        except EnvScalerError as err:
            self._record_false_start(err)
            raise
        finally:
            self._look_once_more()
            self.voice.close()

    # -- after a signal

    def _stop(self, asked: Signalled) -> Delivered:
        code = 128 + asked.number
        if not self._is_ours():
            self.voice.say(f"{asked.name}: nothing was started")
            raise SystemExit(code) from None
        self.voice.say(f"{asked.name}: asked the training to save and stop; once more leaves it to its lease")
        try:
            self._request_stop(asked.name)
            return self._owner.resume()
        except StoppedError:
            self._tell_news()
            self.voice.say(f"stopped; --name {self.run.key().run_id} goes on from its last checkpoint")
            raise SystemExit(code) from None
        except KeyboardInterrupt:
            name = self.run.key().run_id
            self.voice.say(
                f"left: what still runs saves and ends by itself; see `envscaler cancel --wait {name}`"
            )
            raise SystemExit(code) from None

    def _is_ours(self) -> bool:
        try:
            return self._owner.is_ours()
        except StoreError:
            return self._waiting is not None

    def _request_stop(self, reason: str) -> None:
        """Through the store; where that does not answer, the machine itself is asked."""
        try:
            request_stop(self.run, reason=reason, by="shell")
        except StoreError as err:
            self.voice.say(f"the store does not take the request: {err}")
            handle = self._waiting.watching.handle if self._waiting is not None else None
            if handle is not None:
                self.backend.stop(handle, grace_s=GRACE_S)
                self.voice.say("asked the machine itself to save and stop")

    def _record_false_start(self, err: EnvScalerError) -> None:
        """End a run of which no attempt was ever intended: nothing would do so later."""
        is_transient = isinstance(err, BackendError) and err.transient
        if is_transient or isinstance(err, RunFailedError | StoppedError | SupersededError):
            return
        with suppress(EnvScalerError):
            state = self.run.events.load()
            ours = self.actor.is_try_of(state.owner)
            if ours and state.status == "active" and state.current is None and state.live is None:
                failed = Failed(generation=state.generation, reason=str(err), failure="start")
                self.run.events.append(state.number, failed, actor=self.actor)

    # -- what is shown

    def _on_wait(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._tell_news()
        last, pause_s = self._follower.state.current, waiting.watching.backoff_s
        if pause_s is None or last is None or last.outcome != "not-started":
            self.voice.say(printable(waiting.reason))
            return
        self.voice.say(f"next try in {duration_text(pause_s)}")

    def _on_poll(self, watch: AttemptWatcher) -> None:
        self._print_logs()
        self._tell_news()
        waits = "" if watch.observed is None else watch.observed.waits
        if waits and waits != self._waits:
            self.voice.say(f"waits: {printable(waits)}")
        self._waits = waits
        self._tell_messages(watch)
        line = progress_line(self._follower.status, self._follower.state, now=self.run.now())
        if line:
            self.voice.progress(line)

    def _tell_messages(self, watch: AttemptWatcher) -> None:
        """What nodes say of themselves, such as a full store; not again for another number in it."""
        for node, status in watch.statuses.items():
            kind = _NUMBER.sub("#", status.message)
            if status.message and kind != self._messages.get(node):
                self._message = printable(status.message)
                self.voice.say(f"node {node}: {self._message}")
            self._messages[node] = kind

    def _on_trouble(self, err: Exception) -> None:
        self.voice.say(f"no answer, tried again: {printable(str(err))}")

    def _tell_news(self) -> None:
        for line in self._follower.news():
            told = self._shortened(line)
            if told:
                self.voice.say(told)

    def _shortened(self, line: str) -> str:
        """*line* without what a node said last; for attempts without capacity the reason, once.

        Empty for the end of a run that failed or stopped: the command's last line names it.
        """
        if line.startswith(_LAST):
            return ""
        if (missed := _NO_ROOM.fullmatch(line)) is not None:
            why, before = missed["why"] or "the backend does not say why", self._no_room
            self._no_room = why
            last = self._follower.state.current
            is_full = last is not None and last.end.failure == "capacity"
            return "" if why == before else f"{'no capacity' if is_full else 'not started'}: {why}"
        if (begun := _ON.match(line)) is not None:
            name, before = begun["name"], self._tried
            self._tried = name
            if begun["after"]:
                return "" if name == before else begun["where"]
        if self._message:
            line = line.removesuffix(f": {self._message}")
        return line.partition("; output ")[0]  # outputs are the last lines anyway

    def _look_once_more(self) -> None:
        with suppress(EnvScalerError):
            self._print_logs()
        self._tell_news()

    def _print_logs(self) -> None:
        watching = self._waiting.watching if self._waiting is not None else None
        if watching is None or not watching.attempt or not self.shows_training:
            return
        for node in range(watching.nodes):
            if text := self._printed.text((watching.generation, watching.attempt), node):
                self.voice.training(marked(text, node, watching.nodes))


def own_and_tell(owner: Foreground, *, as_json: bool) -> None:
    """Own the run, print its outputs and its cost; the command ends with the code of how it ended."""
    try:
        result = owner.own()
    except (RunFailedError, StoppedError, BudgetError, NoOfferError, SpecError) as err:
        state = owner.run.events.load()
        is_full = isinstance(err, SpecError | NoOfferError)
        if is_full and state.status != "failed":  # refused before it changed the run
            raise
        code = exit_code(state)
        if as_json:
            echo_json(_answer(owner.run, state, {}, code))
        # The last lines of the training's output are above.
        click.echo(f"Error: {err if is_full else str(err).splitlines()[0]}", err=True)
        if not as_json and state.current is not None:
            print_report(run_report(state, now=owner.run.now()))
        click.get_current_context().exit(code)
    if as_json:
        state = owner.run.events.load()
        echo_json(_answer(owner.run, state, result.outputs, 0))
        return
    for output, uri in result.outputs.items():
        click.echo(f"output {output}: {uri}")
    print_report(result.report)


def exit_code(state: RunState) -> int:
    """What the shell says of a run that is over: the training's own code where that ended it."""
    if state.status == "stopped":
        return EXIT_STOPPED
    last = state.current
    if last is None:
        return FAULT
    if outcome_of(state.failure).is_final:
        return FAILED if state.failure in _LIMITS else FAULT
    code, number = last.end.exit_code or 0, last.end.signal or 0
    if number > 0:
        return 128 + number
    return code if 0 < code < 256 else FAILED


def _answer(run: Run, state: RunState, outputs: Mapping[str, str], code: int) -> dict[str, Any]:
    return {
        "run": run.prefix,
        "status": state.status,
        "reason": state.reason,
        "exit_code": code,
        "outputs": dict(outputs),
        "report": run_report(state, now=run.now()).to_dict(),
    }
