"""The keeper of a sidecar: restarts, a set-up that keeps crashing, and the end of a killed wrapper."""

import json
import os
import signal
import threading

import pytest

from envscaler_agent.protocol import Ended, Progress, Status
from envscaler_agent.spool import SetupFailedError, Spool, parse_start
from envscaler_airflow.backends.kubernetes import pod_sidecar
from envscaler_airflow.sidecar.keeper import Keeper, report_end, reported_end
from envscaler_airflow.testing.scripted_backend import ManualClock


class Process:
    """A sidecar that has ended, or runs."""

    def __init__(self, code=None):
        """*code* is its exit code."""
        self._code = code

    def poll(self):
        """As ``Popen.poll``."""
        return self._code


@pytest.fixture
def spool(tmp_path):
    """An empty spool."""
    return Spool(tmp_path)


@pytest.fixture
def clock():
    """A clock that only the test moves."""
    return ManualClock()


def keeper_of(spool, clock, start):
    """A keeper whose output is in a log."""
    return Keeper(spool, start, monotonic=clock.monotonic, output="the log")


def crash(keeper, clock, *, lived_s=0.0):
    """Wait until the next sidecar runs, and let it die; returns the wait in seconds."""
    asked = clock.monotonic()
    while keeper.process is None:
        keeper.keep()
        if keeper.process is None:
            clock.advance(0.5)
    waited = clock.monotonic() - asked
    clock.advance(lived_s)
    keeper.died()
    return waited


def test_a_sidecar_that_dies_is_restarted_later_and_later(spool, clock):
    """At once, then after 1, 2, 4, 8, 16 and 30 s; the wait after a life of more than 60 s is the first."""
    spool.start.touch()
    keeper = keeper_of(spool, clock, Process)

    waits = [crash(keeper, clock) for _ in range(8)]

    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert (crash(keeper, clock, lived_s=61.0), crash(keeper, clock)) == (30.0, 1.0)


def test_a_set_up_that_keeps_crashing_fails(spool, clock):
    """The fifth death before the start is reported to the wrapper, with the place of the sidecar's output."""
    keeper = keeper_of(spool, clock, Process)

    for _ in range(4):
        crash(keeper, clock)
    assert not spool.start.exists()
    crash(keeper, clock)

    assert keeper.has_failed
    with pytest.raises(SetupFailedError, match="the sidecar died 5 times before the start; see the log"):
        parse_start(spool.start.read_bytes())


def test_a_sidecar_that_cannot_be_started_counts_as_dead(spool, clock):
    """No process is left, and the next try waits."""
    tries = []

    def start():
        tries.append(clock.monotonic())
        raise OSError("no memory")

    keeper = keeper_of(spool, clock, start)

    keeper.keep()
    keeper.keep()

    assert (len(tries), keeper.process) == (1, None)


@pytest.mark.parametrize(
    ("text", "is_done"),
    [(b'{"phase": "done"}', True), (b'{"phase": "running"}', False), (b"{", False), (b"[]", False)],
)
def test_only_the_sidecar_s_own_report_ends_it(spool, clock, text, is_done):
    """A torn or foreign file counts as no report."""
    spool.sidecar.write_bytes(text)

    assert keeper_of(spool, clock, Process).is_done is is_done


def test_a_pipe_in_place_of_the_report_blocks_nothing(spool, clock):
    """The training can put one there."""
    os.mkfifo(spool.sidecar)

    assert not keeper_of(spool, clock, Process).is_done


def test_only_a_readable_status_is_a_report(spool):
    """An absent, torn or incompatible status counts as none."""
    ended = Ended(exit_code=0, reason="succeeded")
    assert reported_end(spool) is None

    found = []
    for text in (
        Status(phase="ended", ended=ended).to_json(),
        Status().to_json(),
        b'{"schema": "2.0", "ended": {"reason"',
        b'{"schema": "9.0"}',
    ):
        spool.wrapper.write_bytes(text)
        found.append(reported_end(spool))

    assert found == [ended, None, None, None]


def test_what_a_killed_wrapper_said_last_is_kept_with_its_end(spool):
    """Progress stays, the sequence grows, the end is ours; of a torn status only the end remains."""
    ended = Ended(signal=9, reason="killed", detail="d")
    last = Status(attempt=3, sequence=41, phase="running", progress=Progress(step=7))
    spool.wrapper.write_bytes(last.to_json())

    report_end(spool, ended)

    said = Status.from_json(spool.wrapper.read_bytes(), where="wrapper.json")
    assert said == Status(attempt=3, sequence=42, phase="ended", progress=Progress(step=7), ended=ended)
    spool.wrapper.write_bytes(b"{")
    report_end(spool, ended)
    assert reported_end(spool) == ended


def test_the_wrapper_s_own_end_stays(spool):
    """What it reported is never replaced."""
    ended = Ended(exit_code=0, reason="succeeded")
    spool.wrapper.write_bytes(Status(phase="ended", ended=ended).to_json())

    report_end(spool, Ended(signal=9, reason="killed"))

    assert reported_end(spool) == ended


def test_a_pod_s_sidecar_reports_the_end_of_a_killed_container_once_and_ends_when_done(spool, clock):
    """The kubelet's SIGTERM comes first; the second sidecar uploads the rest."""
    codes = [1, 0]

    def start():
        code = codes.pop(0)
        if code == 0:
            spool.sidecar.write_text(json.dumps({"phase": "done"}))
        return Process(code)

    ending = threading.Event()
    ending.set()
    spool.start.touch()

    code = pod_sidecar.run(spool, keeper_of(spool, clock, start), ending=ending, sleep=clock.sleep)

    assert (code, codes) == (0, [])
    assert Status.from_json(spool.wrapper.read_bytes(), where="wrapper.json").sequence == 1
    assert reported_end(spool).reason == "killed"


def test_a_signal_that_comes_when_everything_is_uploaded_changes_nothing(tmp_path, monkeypatch):
    """The kubelet may send it while Python ends, which would restore the default and die of it."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    monkeypatch.setattr(pod_sidecar, "run", lambda *_args, **_named: 0)
    monkeypatch.setattr(pod_sidecar.os, "umask", lambda _mask: 0)
    place = ["--spool", str(tmp_path), "--store", "file:///s", "--prefix", "p", "--layout", "l"]

    try:
        code = pod_sidecar.main([*place, "--generation", "1", "--attempt", "1", "--nodes", "1"])
        after = [signal.getsignal(kind) for kind in kinds]
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    assert (code, after) == (0, [signal.SIG_IGN] * 2)
