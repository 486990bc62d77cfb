"""Unit tests of the demo's narration: each fact once, and the machine is lost at the right moment."""

import contextlib
import json
import os
import signal
import sys
from dataclasses import replace

import httpx
import pytest
from click.testing import CliRunner

from envscaler_agent.protocol import Progress, Status, Transfer, log_name, status_name
from envscaler_airflow.cli import demo as demo_module
from envscaler_airflow.cli import demo_places, main
from envscaler_airflow.cli.demo import (
    STUCK_S,
    Demo,
    Patience,
    _console,
    _share,
    conclusions,
    progress_words,
    reason_to_lose,
)
from envscaler_airflow.cli.follow import StageFollower
from envscaler_airflow.cli.shell_owner import signals
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing.airflow_api import AirflowApi

PREFIX = "local/dag/run/train/-1"
OWNER = Actor("ti-1")


def _allocation(cpus):
    offer = Offer("local", "", f"cpu-{cpus}", "on-demand", cpus, 4.0 * cpus, usd_per_hour=0.05 * cpus)
    return Allocation(offer).to_dict()


class RecordedRun:
    """A run in a store of its own, to which a test appends."""

    def __init__(self, folder):
        """Start with an empty store."""
        self.store = open_store(str(folder))
        self.log = Run(self.store, PREFIX, clock=lambda: 0.0).events
        self.follower = StageFollower(Run(self.store, PREFIX), "train")
        self.number = 0

    def append(self, kind, **body):
        """Append one event; those of an attempt name generation 1."""
        whole = {"generation": 1, **body} if "attempt" in body or kind == "generation" else body
        self.number = self.log.append(self.number, read_body(kind, whole), actor=OWNER).number

    def begin(self, attempt, cpus, reason):
        """Intend and start an attempt."""
        self.append("attempt-intended", attempt=attempt, allocation=_allocation(cpus), reason=reason)
        self.append("attempt-started", attempt=attempt, handle={"backend": "local", "name": f"a{attempt}"})

    def say(self, attempt, start_step=0, saved=None, **progress):
        """Write node 0's status."""
        status = Status(
            generation=1,
            attempt=attempt,
            start_step=start_step,
            last_checkpoint_step=saved,
            progress=Progress(**progress),
        )
        self.store.write(f"{PREFIX}/{status_name(1, attempt, 0)}", status.to_json())

    def move(self, step):
        """Let attempt 1 move to two CPUs at *step*."""
        target = {"target": _allocation(2), "reason": "it pays"}
        self.append("move-requested", from_attempt=[1, 1], **target)
        self.append(
            "move-accepted",
            attempt=1,
            request=self.number,
            stop_reason="move",
            align="epoch",
            grace_s=30,
            **target,
        )
        self.append(
            "attempt-ended", attempt=1, outcome="drained", step=step, checkpoint_step=step, start_step=0
        )
        self.begin(2, cpus=2, reason="moved")


@pytest.fixture
def run(tmp_path):
    """A run whose first attempt has started on one CPU."""
    made = RecordedRun(tmp_path)
    made.append("generation", spec_hash="0" * 64, reason="first start")
    made.begin(1, cpus=1, reason="first attempt")
    return made


def test_tells_each_fact_once(run):
    """A second read of an unchanged store prints nothing."""
    assert run.follower.lines() == [
        "generation 1 begins: first start",
        "attempt 1 on local/cpu-1 ($0.0500/h): first attempt",
        "attempt 1 runs as a1",
    ]
    assert run.follower.lines() == []


def test_prints_what_the_training_printed_once(run):
    """Chunks come one after another."""
    run.follower.lines()
    run.store.write(f"{PREFIX}/{log_name(1, 1, 0, 1)}", b"epoch 1\nepoch 2\n")

    assert run.follower.lines() == ["| epoch 1", "| epoch 2"]
    assert run.follower.lines() == []


def test_tells_a_move_with_its_reasons(run):
    """Requested, accepted, moved, started, resumed: one line each, and no step lost."""
    run.follower.lines()
    run.move(step=440)
    run.say(2, start_step=440)

    assert run.follower.lines() == [
        "the sensor requests a move to local/cpu-2: it pays",
        "attempt 1 saves at the end of the epoch and moves to local/cpu-2: it pays",
        "attempt 1 moved at step 440; last checkpoint at step 440",
        "attempt 2 on local/cpu-2 ($0.1000/h): moved",
        "attempt 2 runs as a2",
        "attempt 2 resumes from step 440, no step again",
    ]


def test_tells_how_much_a_loss_has_cost(run):
    """Seen at step 627, saved at 572: 55 steps are repeated."""
    run.follower.lines()
    run.append("attempt-ended", attempt=1, outcome="lost", detail="gone", step=627, checkpoint_step=572)
    run.begin(2, cpus=1, reason="after: lost")
    run.say(2, start_step=572)

    assert run.follower.lines() == [
        "attempt 1 lost at step 627; last checkpoint at step 572: gone",
        "attempt 2 on local/cpu-1 ($0.0500/h): after: lost",
        "attempt 2 runs as a2",
        "attempt 2 resumes from step 572, 55 steps again",
    ]


@pytest.mark.parametrize(
    ("kind", "body", "line"),
    [
        ("move-refused", {"request": 3, "reason": "stale"}, "move refused: stale"),
        (
            "attempt-stopping",
            {"attempt": 1, "stop_reason": "stop", "reason": "asked by a user"},
            "attempt 1 saves and stops: asked by a user",
        ),
        (
            "failed",
            {"generation": 1, "reason": "exit code 1", "failure": "user"},
            "the stage failed: exit code 1",
        ),
        ("stopped", {"generation": 1, "reason": "cancelled"}, "the run stopped: cancelled"),
    ],
)
def test_tells_what_ends_a_run(run, kind, body, line):
    """One line each."""
    run.follower.lines()
    run.append(kind, **body)

    assert run.follower.lines() == [line]


def test_waits_for_a_checkpoint_after_the_move_and_some_steps_beyond(run):
    """Nine steps beyond the checkpoint are too few; ten are a visible loss."""
    run.move(step=100)

    def why(**said):
        run.say(2, start_step=100, **said)
        run.follower.lines()
        return reason_to_lose(run.follower)

    assert why(step=150, total_steps=400) is None
    assert why(step=159, total_steps=400, saved=150) is None
    assert why(step=160, total_steps=400, saved=150) == "a spot loss after the move"


def test_without_a_move_the_machine_goes_late(run):
    """At half of the work a move may still come; beyond 60 % the demo waits neither for it nor for steps."""

    def why(step, saved):
        run.say(1, step=step, total_steps=400, saved=saved)
        run.follower.lines()
        return reason_to_lose(run.follower)

    assert why(200, 180) is None
    assert why(241, None) is None
    assert why(260, 260) == "a spot loss; no move was requested so far"


def test_never_takes_a_machine_away_while_an_answer_is_due(run):
    """A request is pending: the move comes first."""
    run.append("move-requested", from_attempt=[1, 1], target=_allocation(2), reason="it pays")
    run.say(1, step=300, total_steps=400, saved=200)
    run.follower.lines()

    assert reason_to_lose(run.follower) is None


def test_concludes_what_was_moved_lost_and_learned(run):
    """Ten steps/s, then twenty; a loss; a model of complete epochs that beats the most frequent label."""
    run.append(
        "attempt-ended",
        attempt=1,
        outcome="drained",
        start_step=0,
        step=100,
        checkpoint_step=100,
        elapsed_s=11.0,
        first_step_s=1.0,
    )
    run.follower.lines()
    attempt = run.follower.state.attempts[0]
    moved = replace(attempt, stop_reason="move")
    run.begin(2, cpus=2, reason="moved")
    run.append(
        "attempt-ended",
        attempt=2,
        outcome="lost",
        start_step=100,
        step=300,
        elapsed_s=10.5,
        first_step_s=0.5,
    )
    run.begin(3, cpus=2, reason="after: lost")
    stored = {name: run.store.uri(f"{PREFIX}/outputs/g1-a3-c1/{name}") for name in ("model", "predictions")}
    run.append("attempt-ended", attempt=3, outcome="succeeded", start_step=280, step=400, outputs=stored)
    metrics = {"samples": 800, "epochs": 4, "samples_repeated": 0, "samples_dropped": 0}
    run.store.write(f"{PREFIX}/outputs/g1-a3-c1/model/metrics.json", json.dumps(metrics).encode())
    scores = {"accuracy": 0.767, "majority": 0.08, "documents": 4386}
    run.store.write(f"{PREFIX}/outputs/g1-a3-c1/predictions/scores.json", json.dumps(scores).encode())
    run.follower.lines()
    run.follower.state = replace(run.follower.state, attempts=(moved, *run.follower.state.attempts[1:]))

    assert conclusions({"train": run.follower, "score": run.follower}, "a spot loss") == [
        "moved from local/cpu-1 to local/cpu-2: 10.0 steps/s, then 20.0 (2.00 times)",
        "attempt 2 was lost, attempt 3 went on, 20 steps done again",
        "800 samples in 4 epochs make the model: 0 repeated, 0 dropped",
        "accuracy 0.767 on 4386 held-out documents (always the most frequent label: 0.080)",
    ]


def test_says_so_when_no_move_paid_and_nothing_was_lost(run):
    """The demo succeeds nevertheless."""
    run.follower.lines()

    assert conclusions({"train": run.follower, "score": run.follower}, None) == [
        "no move: on this machine none would have paid within the time of the training",
        "the training ended before its machine could be removed",
    ]


def test_shows_progress_as_far_as_it_is_known():
    """Only the phase before the first step."""
    busy = Progress(step=5, total_steps=9, epoch=1, epochs=3, steps_per_s=2.0, loss=0.5)

    moving = Status(phase="restoring", transfer=Transfer("restoring", "checkpoint 440", 1, 8))

    assert progress_words(Status(phase="setup")) == "setup"
    assert progress_words(moving) == "restoring checkpoint 440: 12 % of 8 bytes"
    assert (
        progress_words(Status(progress=busy))
        == "epoch 1/3, step 5 of 9 (55 %), 2 steps/s, 2 s left, loss 0.5"
    )


def test_refuses_a_folder_without_the_example(tmp_path):
    """The message names what is missing and the option."""
    done = CliRunner().invoke(main, ["demo", "--dags", str(tmp_path)])

    assert done.exit_code == 2
    assert "there is no retrain_text_classifier.py; write --dags with a folder that has it" in done.output


def test_the_demo_says_at_once_that_its_stages_need_numpy(monkeypatch):
    """Before an Airflow is started, whose first stage would fail."""
    monkeypatch.setitem(sys.modules, "numpy", None)

    done = CliRunner().invoke(main, ["demo"])

    assert done.exit_code == 2
    assert "the demo's stages need numpy" in done.output
    assert "run: pip install numpy" in done.output


def test_a_termination_is_an_interrupt():
    """SIGTERM and SIGHUP stop everything like Ctrl-C, and the handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), signals():
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_node_that_was_made_again_goes_on_within_its_attempt(run):
    """As an evicted pod does: printed once."""
    run.say(1, start_step=0, step=10)
    run.follower.lines()

    run.say(1, start_step=8, step=9)

    assert run.follower.lines() == ["attempt 1 lost a node and resumes from step 8"]
    assert run.follower.lines() == []


@pytest.mark.parametrize(("value", "shown"), [(0.7791, "0.779"), (0, "0.000"), (None, "?"), ("high", "?")])
def test_an_accuracy_that_is_unknown_is_not_nought(value, shown):
    """A missing output of a stage is shown as a question mark."""
    assert _share(value) == shown


def test_the_demo_on_a_cluster_says_what_it_needs(monkeypatch):
    """All errors at once, before anything is started."""
    for name in ("ENVSCALER_STORE_URL", "ENVSCALER_DEMO_IMAGE"):
        monkeypatch.delenv(name, raising=False)

    result = CliRunner().invoke(main, ["demo", "--backend", "kubernetes"])

    assert result.exit_code == 2
    assert "ENVSCALER_STORE_URL: a run store that" in result.output
    assert "ENVSCALER_DEMO_IMAGE: an image with" in result.output


def test_the_demos_cluster_goes_by_the_environment(monkeypatch, tmp_path):
    """A file store is mounted at its path; a settings file takes precedence over the demo's own."""
    (tmp_path / "config.yaml").write_text("{namespace: ml, cluster_prices: []}")
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("ENVSCALER_CONFIG", str(tmp_path / "config.yaml"))
    store = open_store(str(tmp_path / "store"))

    found = demo_places._settings(store, "train:1")
    monkeypatch.delenv("ENVSCALER_CONFIG")
    plain = demo_places._settings(store, "train:1")

    mount = str(tmp_path / "store")
    assert found == {
        "cluster_prices": [],
        "sidecar_image": "train:1",
        "image": "train:1",
        "namespace": "ml",
        "store_volume": {"hostPath": {"path": mount}},
        "store_mount": mount,
    }
    prices = [one["usd_per_hour"] for one in plain["cluster_prices"]]
    assert [one["name"] for one in plain["cluster_prices"]] == ["cpu-1", "cpu-2"]
    assert prices[1] == pytest.approx(2 * prices[0], rel=1e-4)


class TestPatience:
    """The demo waits as long as there is progress (F3)."""

    def test_steps_that_move_are_waited_for_without_end(self, run):
        """A day of a slow machine: a step each five minutes."""
        run.begin(1, 1, "first")
        patience = Patience(0.0)

        for step in range(288):
            run.say(1, step=step)
            run.follower.lines()
            patience.look(run.follower.marks(), step * 300.0)

    def test_output_that_moves_is_waited_for(self, run):
        """``read 1200 of 45311 files`` of a stage that makes no steps."""
        run.begin(1, 1, "first")
        patience = Patience(0.0)

        for number in range(1, 10):
            run.store.write(f"{PREFIX}/{log_name(1, 1, 0, number)}", b"read 1 of 2 files\n")
            run.follower.lines()
            patience.look(run.follower.marks(), number * STUCK_S)

    def test_what_does_not_move_is_given_up(self, run):
        """A heartbeat alone is not progress."""
        run.begin(1, 1, "first")
        run.say(1, step=3)
        run.follower.lines()
        patience = Patience(0.0)
        patience.look(run.follower.marks(), 0.0)
        patience.look(run.follower.marks(), STUCK_S)

        with pytest.raises(TimeoutError, match="nothing has moved for 10 min 1 s"):
            patience.look(run.follower.marks(), STUCK_S + 1)


class Broken:
    """An Airflow whose API server refuses the DAG."""

    url = "http://localhost:1"

    def __init__(self, *_args, **_kwargs):
        """Create it like AirflowServices."""

    def __enter__(self):
        """Record the start."""
        return self

    def __exit__(self, *_args):
        """Record the stop."""

    def trigger_dag(self, *_args, **_kwargs):
        """Trigger nothing."""
        raise RuntimeError("no such DAG")


@pytest.mark.parametrize("serve", [True, False])
def test_a_failure_keeps_the_ui_up_where_that_was_asked_for(tmp_path, monkeypatch, capsys, serve):
    """With SERVE=1 a user looks at the failure; without it the failure ends the demo (F3)."""
    served = []
    monkeypatch.setattr("envscaler_airflow.cli.demo.AirflowServices", Broken)
    monkeypatch.setattr(Demo, "_serve", lambda _self, airflow: served.append(airflow.url))
    made = Demo(tmp_path, tmp_path, _console(), demo_places.ThisMachine(tmp_path), {})

    if serve:
        assert made.run(serve=True) == 1
        assert "the demo failed: no such DAG" in capsys.readouterr().out
    else:
        with pytest.raises(RuntimeError):
            made.run(serve=False)

    assert served == ([Broken.url] if serve else [])


class Busy:
    """An API server that is too busy for the first question, and answers the others."""

    def __init__(self):
        """Start without questions."""
        self.asked = 0

    def keep_up(self):
        """Everything runs."""

    def run_state(self, *_args):
        """The state of the DAG run."""
        self.asked += 1
        if self.asked == 1:
            raise httpx.ReadTimeout("timed out")
        return "success"

    def task_states(self, *_args):
        """States of the tasks."""
        return {"train": "success"}


def test_an_api_server_that_is_too_busy_ends_nothing(tmp_path, monkeypatch, capsys):
    """It shares the cores with the training: a missing answer is not reported, and the demo retries (F3)."""
    monkeypatch.setattr(demo_module, "LOOK_S", 0.0)
    monkeypatch.setattr(demo_module, "ASK_S", -1.0)
    made = Demo(tmp_path, tmp_path, _console(), demo_places.ThisMachine(tmp_path), {})
    made._open_followers("manual")

    with made._view():
        assert made._follow(Busy(), "manual") == "success"

    assert "no answer, retrying: timed out" in capsys.readouterr().out


def test_a_question_that_times_out_is_asked_again(monkeypatch):
    """Until the wait times out (F3)."""
    answers = [httpx.ReadTimeout("timed out"), None, "success"]

    def ask():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with contextlib.closing(AirflowApi("http://localhost:1")) as api:
        assert api.wait(ask, timeout_s=60, what="the end", every_s=0.0) == "success"
