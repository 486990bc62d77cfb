"""What ``drill`` refuses, and what it asks before it breaks anything."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fakes.run_events import LARGE, SMALL

from envscaler_airflow.backends.base import Injection
from envscaler_airflow.cli import drill, main
from envscaler_airflow.cli.shell_owner import watcher_of, write_owner
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor, Handle
from envscaler_airflow.run.event_bodies import (
    AttemptEnded,
    AttemptIntended,
    AttemptStarted,
    NewGeneration,
    Stopped,
    Unknown,
)
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import PLAN, Run, spec_name
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing import ScriptedBackend

KEY = RunKey("d", "shell", "nightly", "train")
SPEC = {"version": "v1", "name": "train", "entrypoint": ["python", "train.py"]}


class Breakable(ScriptedBackend):
    """A backend that records what it broke; what is in *obstacles* it cannot break."""

    def __init__(self) -> None:
        """Nothing is broken."""
        super().__init__()
        self.broken: list[tuple[str, int]] = []
        self.undone: list[str] = []
        self.obstacles: dict[str, str] = {}

    def obstacle(self, handle, fault, *, node):
        """As scripted."""
        return self.obstacles.get(fault, "")

    def inject(self, handle, fault, *, node):
        """Remember it."""
        self.broken.append((fault, node))
        return Injection(f"broke {node}", undo=lambda: self.undone.append(fault))


@pytest.fixture
def run(tmp_path):
    """A run whose attempt has started on one node; this process owns it."""
    made = Run(open_store(f"file://{tmp_path}/store"), KEY)
    made.write("run.json", json.dumps({"schema": "2.0", "key": KEY.to_dict()}).encode())
    made.write(spec_name("s"), json.dumps(SPEC).encode())
    targets = [Allocation(SMALL.offer), Allocation(SMALL.offer, 2), LARGE]
    made.write(PLAN, json.dumps({"targets": [one.to_dict() for one in targets]}).encode())
    actor, started = Actor("ti-1"), {"generation": 1, "attempt": 1}
    bodies = [
        NewGeneration(generation=1, spec_hash="s"),
        AttemptIntended(**started, allocation=SMALL, spec_hash="s"),
        AttemptStarted(**started, handle=Handle("local", "one")),
    ]
    for number, body in enumerate(bodies):
        made.events.append(number, body, actor=actor)
    write_owner(made, actor.ti_id, ScriptedBackend())
    return made


@pytest.fixture
def backend(monkeypatch):
    """The backend of the run."""
    made = Breakable()
    monkeypatch.setattr(drill, "backend_of", lambda run, state: made)
    return made


@pytest.fixture
def call(run, backend, monkeypatch):
    """Run the command on that run; it waits for nothing."""

    def invoke(*words, name="nightly", faults="lose-node", typed=None):
        command = ["drill", "--run", name, "--faults", faults, *words, "--store", run.store.url]
        return CliRunner().invoke(main, command, input=typed)

    return invoke


def test_a_run_that_has_ended_is_refused(call, run, backend):
    """There is nothing to break, and nothing that would come back (feature G4)."""
    run.events.append(3, Stopped(generation=1, reason="enough"), actor=Actor("ti-1"))

    got = call("--yes")

    assert got.exit_code == 2
    assert got.stderr == f"Error: {KEY.prefix}: stopped: enough; a drill needs a run that trains now\n"
    assert backend.broken == []


@pytest.mark.parametrize("name", ["run.json", spec_name("s"), "events/000003.json"])
def test_a_run_with_a_corrupt_file_is_refused(call, run, backend, name):
    """Its owner could not replace what a drill breaks; the message names the file."""
    run.write(name, b"{")

    got = call("--yes")

    assert got.exit_code == 2
    assert name in got.stderr
    assert backend.broken == []


def test_a_run_without_an_owner_is_refused(call, run, backend):
    """Nothing would replace what is broken."""
    run.delete("lease/owner.json")

    got = call("--yes")

    assert got.exit_code == 2
    assert "no owner watches it" in got.stderr
    assert backend.broken == []


def test_a_run_whose_owner_only_watches_is_refused(call, run, backend):
    """An event of a newer version is in it."""
    run.events.append(3, Unknown("teleported"), actor=Actor("ti-1"))

    got = call("--yes")

    assert got.exit_code == 2
    assert "event 4 is of a newer version" in got.stderr
    assert backend.broken == []


def test_nothing_is_broken_without_a_yes(call, backend):
    """It shows the run, the faults and the bounds, and asks; no answer is no."""
    refused, silent = call(typed="n\n"), call(typed="")

    for got in (refused, silent):
        assert got.exit_code == 1
        assert f"{KEY.prefix}: attempt 1 on local/cpu-1" in got.stderr
        assert "lose-node: one node is killed without notice" in got.stderr
        assert "a new step within 10 min, moves pause at most 5 min" in got.stderr
        assert "restarts it at step 0" in got.stderr
    assert backend.broken == []


def test_only_a_run_that_is_named_is_broken(call):
    """There is no default, and a name that fits none is an error."""
    assert "no run in" in call("--yes", name="weekly").stderr
    assert "is empty" in call("--yes", name="").stderr


@pytest.mark.parametrize(
    ("faults", "said"), [("lose-node,flood", "'flood' is not a fault"), (",", "is empty")]
)
def test_an_unknown_fault_is_refused_with_the_known_ones(call, faults, said):
    """Before anything is read."""
    got = call("--yes", faults=faults)

    assert got.exit_code == 2
    assert said in got.stderr
    assert "change-type" in got.stderr


def test_every_fault_that_cannot_be_injected_is_named_before_any_is(call, backend):
    """Also a move without a target; the ones that could be are not injected either."""
    backend.obstacles = {"oom": "no cgroup limits its memory"}

    got = call("--yes", faults="lose-node,oom,shrink")

    assert got.exit_code == 2
    assert got.stderr.splitlines()[-2:] == [
        "Error: oom: cannot be injected here: no cgroup limits its memory",
        "shrink: cannot be injected here: the plan has no allocation of 0 node(s) of local/cpu-1",
    ]
    assert backend.broken == []


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"targets": [{}]}', b'{"targets": 3}'])
def test_a_plan_that_cannot_be_read_has_no_target(call, run, text):
    """A move needs one, and the message names the file."""
    run.write(PLAN, text)

    got = call("--yes", faults="grow")

    assert got.exit_code == 2
    assert f"{PLAN} cannot be read" in got.stderr


def test_a_backend_without_the_ability_says_so(call, monkeypatch):
    """Moves work on every backend; breaking nodes is an ability."""
    monkeypatch.setattr(drill, "backend_of", lambda run, state: ScriptedBackend())

    got = call("--yes")

    assert got.exit_code == 2
    assert "lose-node: cannot be injected here: backend scripted cannot inject faults" in got.stderr


def test_a_shrink_after_a_growth_is_not_refused_at_once(call, run, monkeypatch):
    """What is possible then is known only then."""
    monkeypatch.setattr(drill._Drill, "rehearse", lambda self, fault: drill.Rehearsal(fault=fault.name))

    got = call("--yes", "--json", faults="grow,shrink")

    assert got.exit_code == 0
    assert [one["fault"] for one in json.loads(got.stdout)["faults"]] == ["grow", "shrink"]


def test_the_report_is_json_in_a_file_too_and_a_missed_bound_is_exit_code_1(call, monkeypatch, tmp_path):
    """For CI: the code says whether every bound was kept."""
    missed = drill.Rehearsal(fault="lose-node", missed=("no new step within 630 s",))
    monkeypatch.setattr(drill._Drill, "rehearse", lambda self, fault: missed)

    got = call("--yes", "--report", str(tmp_path / "drill.json"))

    body = json.loads((tmp_path / "drill.json").read_text())
    assert got.exit_code == 1
    assert (body["run"], body["passed"]) == (KEY.prefix, False)
    assert body["bounds"] == {"replace_s": 600.0, "pause_s": 300.0}
    assert body["faults"][0]["missed"] == ["no new step within 630 s"]
    assert "lose-node: no new step within 630 s" in got.stdout


def test_an_interrupt_keeps_the_report_of_what_was_done(call, monkeypatch, tmp_path):
    """The second of two faults was interrupted, so the drill did not pass."""

    def rehearse(self, fault):
        if fault.name == "stall":
            raise KeyboardInterrupt
        return drill.Rehearsal(fault=fault.name)

    monkeypatch.setattr(drill._Drill, "rehearse", rehearse)

    got = call("--yes", "--report", str(tmp_path / "drill.json"), faults="lose-node,stall")

    body = json.loads((tmp_path / "drill.json").read_text())
    assert got.exit_code == 1
    assert [one["fault"] for one in body["faults"]] == ["lose-node"]
    assert body["passed"] is False


def test_the_shell_that_owns_the_run_is_found_and_a_triggerer_must_be_named(run):
    """Killing the wrong process would hit every task that it watches."""
    state = run.events.load()
    in_airflow = Run(run.store, RunKey("d", "dag", "scheduled", "train"))

    assert watcher_of(run, state).pid == os.getpid()
    assert watcher_of(in_airflow, state, os.getpid()).pid == os.getpid()
    with pytest.raises(SpecError, match="name the triggerer's process of this machine by --triggerer PID"):
        watcher_of(in_airflow, state)
    with pytest.raises(SpecError, match="process 4194305 does not run on this machine"):
        watcher_of(in_airflow, state, 4194305)  # more than Linux gives


@pytest.fixture
def drilled(run, backend):
    """A drill whose time is its own."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    return drill._Drill(
        run, backend, drill.Bounds(), lambda line: None, sleep=sleep, monotonic=lambda: clock.now
    )


def test_what_was_broken_is_taken_back_whatever_happens(drilled, backend, monkeypatch):
    """Also if the drill is interrupted while it watches."""
    steady = drill.Sample(
        0.0, attempt=(1, 1), is_started=True, nodes=(drill.NodeSample(1, 1, "running", 9, 0, 5),)
    )
    monkeypatch.setattr(drill._Drill, "_sample", lambda self: steady)

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(drill._Drill, "_watch", interrupted)

    with pytest.raises(KeyboardInterrupt):
        drilled.rehearse(drill.FAULTS["stall"])

    assert (backend.broken, backend.undone) == ([("stall", 0)], ["stall"])


def test_a_stage_that_does_not_train_is_waited_for_and_then_left_alone(drilled, backend):
    """Ten minutes: a fault that is injected before its first step measures nothing."""
    found = drilled.rehearse(drill.FAULTS["lose-node"])

    assert found.missed == ("not within 10 min was it seen that it trains",)
    assert backend.broken == []


def test_a_refused_move_is_requested_again_for_a_minute(drilled, run, monkeypatch):
    """As during a save; then the reason of the owner is reported."""
    asked = []
    monkeypatch.setattr(
        drill, "request_move", lambda run, **fields: asked.append(fields) or SimpleNamespace(number=4)
    )
    monkeypatch.setattr(drill._Drill, "_answer", lambda self, number: "it saves")

    with pytest.raises(BackendError, match="the owner refused the move: it saves"):
        drilled._move(drill.FAULTS["grow"])

    assert len(asked) == 12
    assert asked[0]["target"] == Allocation(SMALL.offer, 2)
    assert asked[0]["from_attempt"] == (1, 1)
    assert asked[0]["because"]["forced"] is True


def test_a_run_without_checkpoints_is_not_lost_so_often_that_it_fails(drilled, backend, run):
    """Two attempts in a row without a checkpoint end this one, and one was lost."""
    allowed = {"failure": {"max_fruitless_attempts": 2}}
    run.write(spec_name("s"), json.dumps(SPEC | allowed).encode())
    drilled._check_node(drill.FAULTS["lose-node"], run.events.load())
    bodies = [
        AttemptEnded(generation=1, attempt=1, outcome="lost"),
        AttemptIntended(generation=1, attempt=2, allocation=SMALL, spec_hash="s"),
        AttemptStarted(generation=1, attempt=2, handle=Handle("local", "two")),
    ]
    for number, body in enumerate(bodies, start=3):
        run.events.append(number, body, actor=Actor("ti-1"))

    with pytest.raises(BackendError, match="the run saves nothing, and 2 lost attempts in a row end it"):
        drill._Drill(run, backend, drill.Bounds(), print)._check_node(
            drill.FAULTS["lose-node"], run.events.load()
        )


def test_a_run_at_its_memory_cap_is_not_driven_out_of_memory(drilled, backend, run):
    """It would fail: its spec allows no more than it has."""
    capped = {"resources": {"limits": {"memory": "4Gi"}}, "failure": {"oom_memory_cap": "4Gi"}}
    run.write(spec_name("s"), json.dumps(SPEC | capped).encode())

    with pytest.raises(BackendError, match="at its memory cap"):
        drilled._check_node(drill.FAULTS["oom"], run.events.load())
