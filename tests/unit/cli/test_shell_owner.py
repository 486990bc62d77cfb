"""What an owner in the foreground prints, and how it ends."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from envscaler_agent.protocol import Progress, Status, Transfer
from envscaler_airflow.cli.follow import Voice, progress_line
from envscaler_airflow.cli.shell_owner import Foreground, Signalled, exit_code, own_and_tell, signals
from envscaler_airflow.errors import BudgetError, NoOfferError, RunFailedError, StoreError
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Stage, Waiting, Watching
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, AttemptState, RunState
from envscaler_airflow.run.event_bodies import AttemptEnded, NewGeneration, read_body
from envscaler_airflow.store import check_store, open_store
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import FaultyStore, ScriptedBackend

CPU = Allocation(Offer("local", "", "cpu-1", "on-demand", 1, 4.0, usd_per_hour=0.36))
BIG = Allocation(Offer("local", "", "cpu-2", "on-demand", 2, 8.0, usd_per_hour=0.72))
LIVE = AttemptState(1, 1, CPU, phase="started", started_at=1000.0, intended_at=1000.0)
KEY = RunKey("d", "shell", "nightly", "train")

MIB = 1 << 20


class Heard(Voice):
    """Keeps the printed lines."""

    def __init__(self):
        """Start without lines."""
        super().__init__()
        self.lines = []

    def _write(self, text, *, is_error):
        self.lines.append(text.removeprefix("-- ").rstrip("\n"))


class Ended:
    """An owner that raises the test's error."""

    def __init__(self, err):
        """Raise *err*."""
        self.err = err

    def enter(self):
        """The number of the first execution."""
        raise self.err


@pytest.fixture
def store(tmp_path):
    """An empty store that may fail."""
    made = FaultyStore(open_store(f"file://{tmp_path}"))
    check_store(made)
    return made


@pytest.fixture
def owner(store):
    """An owner of a run that has not started; its voice keeps the lines."""
    return Foreground(Run(store, KEY), Stage(None, "s.yaml"), ScriptedBackend(), Heard(), Actor("me"))


def ended(**body):
    """A run whose attempt failed in this way."""
    last = replace(LIVE, phase="ended", ended=AttemptEnded(generation=1, attempt=1, outcome="failed", **body))
    return RunState(status="failed", generation=1, attempts=(last,), failure="failed")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (ended(exit_code=3), 3), (ended(exit_code=127), 127), (ended(signal=9), 137), (ended(signal=15), 143),
        (ended(exit_code=0), 1), (ended(), 1), (replace(ended(exit_code=85), failure="budget"), 1),
        (replace(ended(signal=9), failure="image"), 2), (replace(ended(exit_code=85), failure="refused"), 2),
        (RunState(status="failed", generation=1, failure="start"), 2),
        (replace(ended(exit_code=87), status="stopped"), 87),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_trainings(state, code):
    """128 and more for a signal; never 0 for a failed run; 87 after a cancel (F6)."""
    assert exit_code(state) == code


@pytest.mark.parametrize(
    ("progress", "phase", "line"),
    [
        ({"step": 120, "total_steps": 1584, "steps_per_s": 18.3, "loss": 0.71234}, "running",
         "step 120 of 1,584 (7 %), 18.3 steps/s, 1 min 20 s left, loss 0.7123, $0.01"),
        ({"step": 5}, "running", "step 5, $0.01"),
        ({}, "restoring", "restoring a checkpoint, $0.01"),
        ({"step": 9, "total_steps": 9}, "uploading", "step 9 of 9 (100 %), storing outputs, $0.01"),
        ({"step": 1, "steps_per_s": 2500.0}, "running", "step 1, 2,500 steps/s, $0.01"),
    ],
)  # fmt: skip
def test_progress_is_one_line(progress, phase, line):
    """Step, speed, time to the end, loss and cost, as far as they are known (F6)."""
    state = RunState(status="active", generation=1, attempts=(LIVE,))
    status = Status(generation=1, attempt=1, phase=phase, progress=Progress(**progress))

    assert progress_line(status, state, now=1100.0) == line


@pytest.mark.parametrize(
    ("progress", "phase", "moving", "line"),
    [
        ({"step": 450, "total_steps": 900}, "running",
         Transfer("uploading", "checkpoint 440", 37 * MIB, 100 * MIB),
         "step 450 of 900 (50 %), uploading checkpoint 440: 37 % of 100 MiB, $0.01"),
        ({}, "restoring", Transfer("restoring", "checkpoint 440", 3, 25),
         "restoring checkpoint 440: 12 % of 25 bytes, $0.01"),
        ({"step": 9, "total_steps": 9}, "uploading", Transfer("uploading", "output model", 0, 5 << 30),
         "step 9 of 9 (100 %), uploading output model: 0 % of 5.0 GiB, $0.01"),
        ({}, "restoring", Transfer("restoring", "checkpoint 440", 0, 0), "restoring a checkpoint, $0.01"),
        ({}, "restoring", Transfer("x\x1b[2J\n" * 99, "y", 9, 3),
         f"{('x [2J ' * 99)[:100]}: 100 % of 3 bytes, $0.01"),
    ],
)  # fmt: skip
def test_progress_says_how_far_a_transfer_is(progress, phase, moving, line):
    """In place of the phase; an invalid value of a node stays one line and below 100 % (F6)."""
    state = RunState(status="active", generation=1, attempts=(LIVE,))
    status = Status(generation=1, attempt=1, phase=phase, progress=Progress(**progress), transfer=moving)

    assert progress_line(status, state, now=1100.0) == line


def test_nothing_is_said_of_an_attempt_that_is_not_the_live_one():
    """The status in the store may be of the previous attempt."""
    state = RunState(status="active", generation=1, attempts=(replace(LIVE, number=2),))

    assert progress_line(Status(generation=1, attempt=1), state, now=1100.0) == ""
    assert progress_line(None, state, now=1100.0) == ""


def test_where_no_person_looks_progress_is_told_now_and_then(capsys):
    """After 0, 5, 15, 35, 75, 135 s: an hour has some sixty lines (F6)."""
    now = [0.0]
    voice = Voice(monotonic=lambda: now[0])

    for second in range(0, 3601, 1):
        now[0] = float(second)
        voice.progress(f"second {second}")

    lines = capsys.readouterr().err.splitlines()
    assert lines[:6] == [f"-- second {second}" for second in (0, 5, 15, 35, 75, 135)]
    assert len(lines) == 63


def test_what_was_said_last_is_not_said_again(capsys):
    """A waiting shell is woken often for the same reason."""
    voice = Voice()
    for line in ("runs", "runs", "starts", "runs"):
        voice.say(line)

    assert capsys.readouterr().err == "-- runs\n-- starts\n-- runs\n"


def test_why_it_waits_is_said_with_what_is_free_and_who_uses_it(owner, store):
    """The backend's own message about an attempt that could not start (F6)."""
    log = Run(store, KEY).events
    log.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"), actor=Actor("me"))
    intended = {"generation": 1, "attempt": 1, "allocation": CPU.to_dict(), "reason": "r"}
    log.append(1, read_body("attempt-intended", intended), actor=Actor("me"))
    detail = "local/cpu-2: needs 2 CPUs; free are 0 CPUs; in use by shell/hog/tiny (node 0)"
    body = {"generation": 1, "attempt": 1, "outcome": "not-started", "failure": "capacity", "detail": detail}
    log.append(2, read_body("attempt-ended", body), actor=Actor("me"))

    owner._on_wait(Waiting(Watching(3, 1, backoff_s=10.0), "after: not-started"))
    for attempt, number in ((2, 3), (3, 5)):
        offer = CPU if attempt == 2 else BIG
        intended = {"generation": 1, "attempt": attempt, "allocation": offer.to_dict()}
        because = {"reason": f"after: not-started ({detail})"}
        log.append(number, read_body("attempt-intended", intended | because), actor=Actor("me"))
        log.append(number + 1, read_body("attempt-ended", body | {"attempt": attempt}), actor=Actor("me"))
        owner._on_wait(Waiting(Watching(number + 2, 1, backoff_s=80.0), "after: not-started"))

    assert owner.voice.lines == [
        "generation 1 begins: r",
        "attempt 1 on local/cpu-1 ($0.3600/h): r",
        f"no capacity: {detail}",
        "next try in 10 s",
        "next try in 1 min 20 s",
        "attempt 3 on local/cpu-2 ($0.7200/h)",
        "next try in 1 min 20 s",
    ]


def test_what_a_node_says_of_itself_is_said_once(owner, store):
    """A full store, as the sidecar finds it; another number in the same message is not news (F6)."""
    watch = AttemptWatcher(run=Run(store, KEY), backend=ScriptedBackend(), watching=Watching(0, 1))
    for words in (
        "outputs: No space left; retrying in 2 s",
        "outputs: No space left; retrying in 4 s",
        "",
        "lost",
    ):
        watch.statuses[0] = Status(generation=1, attempt=1, message=words)
        owner._on_poll(watch)

    assert owner.voice.lines == ["node 0: outputs: No space left; retrying in 2 s", "node 0: lost"]


def test_the_reason_of_an_end_is_said_once_before_the_last_line(owner, store):
    """The node says it, the attempt leaves it out, and the run's end is the command's last line (F6)."""
    log = Run(store, KEY).events
    log.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"), actor=Actor("me"))
    watch = AttemptWatcher(run=Run(store, KEY), backend=ScriptedBackend(), watching=Watching(1, 1))
    watch.statuses[0] = Status(generation=1, attempt=1, message="ValueError: bad column")
    owner._on_poll(watch)
    intended = {"generation": 1, "attempt": 1, "allocation": CPU.to_dict(), "reason": "r"}
    log.append(1, read_body("attempt-intended", intended), actor=Actor("me"))
    end = {"generation": 1, "attempt": 1, "outcome": "failed", "detail": "ValueError: bad column"}
    log.append(2, read_body("attempt-ended", end), actor=Actor("me"))
    reason = {"generation": 1, "reason": "failed twice: ValueError: bad column", "failure": "failed"}
    log.append(3, read_body("failed", reason), actor=Actor("me"))
    owner._look_once_more()

    assert [line for line in owner.voice.lines if "bad column" in line] == ["node 0: ValueError: bad column"]
    assert owner.voice.lines[-1] == "attempt 1 failed"


@pytest.mark.parametrize(
    ("err", "failure", "code"),
    [(BudgetError("the budget is spent"), "budget", 2), (NoOfferError("nothing\nfits"), "no-offer", 2)],
)
def test_a_run_that_a_limit_ends_answers_like_every_other(owner, store, monkeypatch, err, failure, code):
    """One JSON object on standard output for each of them (F6)."""
    log = Run(store, KEY).events
    log.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"), actor=Actor("me"))
    failed = {"generation": 1, "reason": str(err), "failure": failure}
    log.append(1, read_body("failed", failed), actor=Actor("me"))

    def own(_self):
        raise err

    monkeypatch.setattr(Foreground, "own", own)
    shell = click.command()(lambda: own_and_tell(owner, as_json=True))

    got = CliRunner().invoke(shell)

    assert json.loads(got.stdout)["status"] == "failed"
    assert got.stderr == f"Error: {err}\n"
    assert got.exit_code == code


def test_an_error_of_the_store_is_said(owner):
    """A full disk, in the store's own words (F6)."""
    owner._on_trouble(StoreError("file:///s/x: No space left on device"))

    assert owner.voice.lines == ["no answer, tried again: file:///s/x: No space left on device"]


def test_a_run_that_could_not_begin_is_recorded_as_failed(owner, store):
    """It would look active for ever (F5)."""
    log = Run(store, KEY).events
    log.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"), actor=Actor("me"))
    owner._owner.owner.enter = Ended(NoOfferError("nothing fits")).enter

    with pytest.raises(NoOfferError):
        owner.own()

    state = log.load()
    assert (state.status, state.failure, state.reason) == ("failed", "start", "nothing fits")


@pytest.mark.parametrize("err", [StoreError("away", transient=True), StoreError("away")])
def test_a_run_of_another_is_not_ended(owner, store, err):
    """Nor one that may start when the store answers again."""
    log = Run(store, KEY).events
    log.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"), actor=Actor("another"))
    owner._owner.owner.enter = Ended(err).enter

    with pytest.raises(StoreError):
        owner.own()

    assert log.load().status == "active"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_each_signal_that_ends_a_shell_is_one(kind):
    """TERM, HUP and INT alike (F5)."""
    with pytest.raises(Signalled) as caught, signals():
        signal.raise_signal(kind)

    assert caught.value.name == kind.name


def test_a_signal_that_is_ignored_stays_ignored():
    """As below nohup (F5)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_last_lines_of_a_failed_training_are_not_printed_again(owner, monkeypatch):
    """They appear as printed; the cause was read four times (F6)."""
    told = "the stage failed: failed twice, exit code 1\nlast 1 line of attempt 2:\nValueError: y"

    def own(_self):
        raise RunFailedError(told)

    monkeypatch.setattr(Foreground, "own", own)
    shell = click.command()(lambda: own_and_tell(owner, as_json=False))

    got = CliRunner().invoke(shell).output

    assert "Error: the stage failed: failed twice, exit code 1\n" in got
    assert "ValueError" not in got
