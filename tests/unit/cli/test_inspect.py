"""``status``, ``logs``, ``report`` and ``cancel`` of runs without events, or with torn ones."""

from __future__ import annotations

import io
import json
import os

import pytest
from click.testing import CliRunner
from rich.console import Console

from envscaler_agent.protocol import Manifest
from envscaler_airflow.cli import inspect as inspect_module
from envscaler_airflow.cli import main
from envscaler_airflow.cli.cancel import REASON, OwnerGoneError, await_end
from envscaler_airflow.cli.common import shell_key
from envscaler_airflow.cli.shell_owner import OWNER, owner_of, shown_status, write_owner
from envscaler_airflow.cli.tables import RunRow, print_runs
from envscaler_airflow.images.locks import LOCK, Lock
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.run import Actor, RunState
from envscaler_airflow.run.event_bodies import NewGeneration, NewOwner, Stopped, read_body
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing import ScriptedBackend

IN_CONTAINER = "d/shell/nightly/train/-1"
NOT_BEGUN = "d/shell/other/train/-1"
BEGUN = "d/shell/third/train/-1"


@pytest.fixture
def store(tmp_path):
    """One run in a container, one that was killed before its first event, and one that has started."""
    made = open_store(f"file://{tmp_path}/store")
    made.write(f"{IN_CONTAINER}/{LOCK}", Lock("train", "3.11", image="localhost/train:1").to_text().encode())
    made.write(f"{NOT_BEGUN}/{LOCK}", Lock("train", "3.11").to_text().encode())
    Run(made, BEGUN).events.append(0, NewGeneration(generation=1, reason="entered", spec_hash="0"))
    return made


@pytest.fixture
def call(store):
    """Run a command on that store."""
    return lambda *words: CliRunner().invoke(main, [*words, "--store", store.url])


def test_a_run_in_a_container_is_said_to_be_one(call):
    """Its lock names an image and it has no events. A run without start and owner never starts (F5)."""
    listed = json.loads(call("status", "--json").stdout)

    assert [(one["run"], one["status"]) for one in listed] == [
        (IN_CONTAINER, "container"), (NOT_BEGUN, "failed to start"), (BEGUN, "failed to start"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words", [["status"], ["logs"], ["logs", "-f"], ["report"], ["cancel"], ["cancel", "--wait"]]
)
def test_what_is_not_known_of_a_container_is_said_and_not_waited_for(call, words):
    """No process would ever write its end to the store."""
    got = call(*words, "nightly")

    assert got.exit_code == 2
    assert got.stderr.startswith(f"Error: {IN_CONTAINER} ran in a container of localhost/train:1: the shell")


@pytest.mark.parametrize("name", [f"{IN_CONTAINER}/{LOCK}", f"{BEGUN}/{event_name(1)}"])
def test_a_torn_run_is_listed_beside_the_others(call, store, name):
    """One bad file hides no run."""
    store.write(name, b"{")

    listed = {one["run"]: one["status"] for one in json.loads(call("status", "--json").stdout)}

    assert len(listed) == 3
    assert listed[name.rpartition("/")[0].removesuffix("/events")] == "unreadable"
    assert sorted(listed.values()).count("unreadable") == 1


def test_a_torn_run_says_what_is_wrong_with_it(call, store):
    """Below the human-readable list, and as the reason in JSON (F6)."""
    store.write(f"{BEGUN}/{event_name(1)}", b"{")

    shown = call("status").stdout
    [reason] = [one["reason"] for one in json.loads(call("status", "--json").stdout) if one["run"] == BEGUN]

    assert f"{BEGUN}: {reason}" in shown
    assert event_name(1) in reason


def test_what_is_no_run_is_not_listed(call, store):
    """Another program's files in the folder that is given as a store (F6)."""
    before = [one["run"] for one in json.loads(call("status", "--json").stdout)]
    for name in ("a/b/c/d/photo.jpg", "a/b/c/d/e/photo.jpg", "a/b/c/d/e/events.txt"):
        store.write(name, b"x")

    assert [one["run"] for one in json.loads(call("status", "--json").stdout)] == before


@pytest.mark.parametrize("name", ["v1.2 of today", "a/b", "%41", "..", "x" * 100])
def test_a_run_is_found_by_the_name_that_it_was_given(call, store, name):
    """As given to ``submit --name``, and as its folder is written; another name finds nothing."""
    key = shell_key(store, name, "train")
    Run(store, key).events.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"))

    for words in (name, key.prefix, key.prefix.split("/")[2]):
        assert json.loads(call("status", "--json", words).stdout)["run"] == key.prefix
    assert call("cancel", name).stdout.startswith(f"{key.prefix}: no owner watches it")
    assert call("status", f"{name}~").exit_code == 2


def test_who_waits_for_a_run_without_an_owner_is_warned(store):
    """Its lease is not renewed three times: the shell would wait for ever. Until then it waits."""
    now, looks = [0.0], []
    Run(store, BEGUN).events.append(1, NewOwner(reason="r"), actor=Actor("airflow"))

    def sleep(seconds):
        now[0] += seconds
        looks.append(now[0])
        if now[0] < 1800:
            Run(store, BEGUN).lease.renew(holder="owner")

    Run(store, BEGUN).lease.renew(holder="owner")
    with pytest.raises(OwnerGoneError, match="its lease was not renewed for 3 min 10 s"):
        await_end(Run(store, BEGUN), sleep, lambda: now[0])

    assert 1980 < looks[-1] < 2000


class TestOwners:
    """The owner of a run, and whether that process is alive (F5)."""

    @pytest.fixture
    def owned(self, store):
        """A run that this process owns."""
        Run(store, BEGUN).events.append(1, NewOwner(reason="r"), actor=Actor("me"))
        write_owner(Run(store, BEGUN), "me", ScriptedBackend(()))
        return Run(store, BEGUN).events.load()

    def test_a_process_of_this_machine_that_runs_is_there(self, store, owned):
        """The process itself shows it, at once."""
        found = owner_of(Run(store, BEGUN), owned)

        assert (found.presence, found.why) == ("there", "the process runs")
        assert found.name.endswith(f":{os.getpid()}")

    def test_a_process_that_has_ended_is_gone(self, store, owned):
        """Its PID may be reused by now: the start time is compared too."""
        body = json.loads(store.read(f"{BEGUN}/{OWNER}"))
        body["process"]["start"] -= 1
        store.write(f"{BEGUN}/{OWNER}", json.dumps(body).encode())

        assert owner_of(Run(store, BEGUN), owned).presence == "gone"

    def test_of_another_machine_the_age_of_the_lease_tells(self, store, owned, monkeypatch):
        """Renewed a minute ago: alive. An hour ago: gone, by the store's clock, and shown as such."""
        body = json.loads(store.read(f"{BEGUN}/{OWNER}"))
        body["machine"]["host"] = "another"
        store.write(f"{BEGUN}/{OWNER}", json.dumps(body).encode())
        Run(store, BEGUN).lease.renew(holder="me")
        renewed, found = store.now(), []
        for later_s in (60.0, 3600.0):
            monkeypatch.setattr(type(store), "now", lambda _store, later_s=later_s: renewed + later_s)
            found.append(owner_of(Run(store, BEGUN), owned))
        soon, late = found

        assert (soon.presence, late.presence, late.is_by_age) == ("there", "gone", True)
        assert late.why == "its lease was last renewed 1 h ago"

    @pytest.mark.parametrize("text", [b"{", b"[]", b'{"ti_id": 3}', b'{"ti_id": "me", "schema": "9.0"}'])
    def test_a_torn_file_is_not_believed(self, store, owned, text):
        """Then only the lease counts, and it does not exist."""
        store.write(f"{BEGUN}/{OWNER}", text)

        assert owner_of(Run(store, BEGUN), owned).name == "a shell"

    @pytest.mark.parametrize(
        ("status", "presence", "shown"),
        [
            ("none", "there", "starting"), ("none", "gone", "failed to start"), ("active", "there", "active"),
            ("active", "gone", "failed to start"), ("failed", "gone", "failed to start"),
            ("succeeded", "gone", "succeeded"), ("active", "unknown", "active"),
        ],
    )  # fmt: skip
    def test_a_run_without_attempts_that_no_process_watches_failed_to_start(self, status, presence, shown):
        """It would look active for ever."""
        assert shown_status(RunState(status=status, generation=1), presence) == shown


def test_who_follows_a_run_that_no_owner_watches_is_warned(call, store, monkeypatch):
    """It would wait for ever for the next line (F5)."""
    now = [0.0]
    monkeypatch.setattr(inspect_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(inspect_module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    got = call("logs", "-f", "third")

    assert got.exit_code == 2
    assert "no owner watches it and nothing was printed for 3 min 10 s" in got.stderr


def test_a_list_is_filtered_by_status_name_and_age(call, store):
    """Several statuses, separated by commas; an unknown one is refused (F5)."""
    old = Run(store, "d/shell/old/train/-1", clock=lambda: 1000.0).events
    old.append(0, NewGeneration(generation=1, reason="r", spec_hash="0"))
    old.append(1, Stopped(generation=1, reason="asked"))

    def names(*words):
        return [one["run"].split("/")[2] for one in json.loads(call("status", "--json", *words).stdout)]

    assert names("--status", "stopped,container") == ["nightly", "old"]
    assert names("--match", "/o") == ["other", "old"]
    assert names("--since", "7d") == ["third"]
    assert "'broken' is not a status" in call("status", "--status", "broken").stderr
    assert "write" in call("status", "--since", "7").stderr


@pytest.mark.parametrize("words", [["cancel"], ["cancel", "--wait"]])
def test_a_run_that_no_owner_watches_is_stopped_by_cancel_itself(call, store, words):
    """It never started an attempt: cancel reports and records that, without a wait (F5)."""
    got = call(*words, "third")

    assert got.exit_code == 0
    assert (
        got.stdout
        == f"{BEGUN}: no owner watches it: -, no process has taken it\n{BEGUN}: stopped: {REASON}\n"
    )
    assert Run(store, BEGUN).events.load().status == "stopped"


def test_a_run_of_airflow_that_no_owner_watches_keeps_its_owner(call, store):
    """Only its task may take it over: the request waits for the next try, and cancel reports that (F5)."""
    prefix = "d/retrain/manual/train/-1"
    begun = {"generation": 1, "reason": "entered", "spec_hash": "0"}
    Run(store, prefix).events.append(0, read_body("generation", begun), actor=Actor("ti-1"))

    got = call("cancel", "--wait", "retrain/manual/train")

    assert "no owner watches it: Airflow, try 1, it has no lease" in got.stdout
    assert "the next try of its task finds the request and stops" in got.stdout
    assert Run(store, prefix).events.load().owner.ti_id == "ti-1"
    assert [item.body.type for item in Run(store, prefix).events.load().pending] == ["stop-requested"]


@pytest.mark.parametrize("command", ["run", "submit"])
def test_who_is_interrupted_before_the_run_is_theirs_stops_nobody(store, monkeypatch, tmp_path, command):
    """Another process may own the run of that name."""
    spec = tmp_path / "train.yaml"
    spec.write_text("version: v1\nname: train\nbase: {image: a:1}\nentrypoint: [python3, -V]\n")
    key, owner = shell_key(store, "held", "train"), Actor("another")
    begun = {"generation": 1, "reason": "entered", "spec_hash": "0"}
    Run(store, key).events.append(0, read_body("generation", begun), actor=owner)

    def interrupted(_controller):
        raise KeyboardInterrupt

    monkeypatch.setattr(Owner, "enter", interrupted)
    got = CliRunner().invoke(main, [command, "-f", str(spec), "--name", "held", "--store", store.url])

    assert (got.exit_code, got.stderr.strip()) == (130, "-- SIGINT: nothing was started")
    assert Run(store, key).events.load().pending == ()


def test_an_attempt_that_there_is_not_is_reported(call):
    """An empty answer would look like a training that printed nothing."""
    got = call("logs", "third", "--attempt", "2")

    assert got.exit_code == 2
    assert got.stderr == f"Error: --attempt 2: {BEGUN} has begun 0 in its current generation\n"


def test_names_are_whole_on_a_narrow_terminal():
    """Eighty columns, and a deployment's name of 36: the run's name can be copied from the table."""
    deployment = "660f338b-a8ab-41b4-bdba-9f4b4f485157"
    rows = [RunRow(f"{deployment}/retrain_text_classifier/scheduled__2026-07-20/train/-1", "active")]
    console = Console(width=80, file=io.StringIO())

    print_runs(rows, console)

    shown = console.file.getvalue()
    assert "…" not in shown
    cells = "".join(line.partition("  ")[0].strip() for line in shown.splitlines()[3:])
    assert cells == "retrain_text_classifier/scheduled__2026-07-20/train"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("file:///nowhere", "--restore-from file:///nowhere: store folder /nowhere does not exist"),
        ("nowhere", "--restore-from nowhere: store 'nowhere' is not an absolute path"),
        ("{store}/empty", "no manifest.json: it was never completed"),
        ("{store}/output", "it is a directory, not a checkpoint"),
    ],
)
def test_a_run_begins_from_nothing_that_is_no_checkpoint(call, store, monkeypatch, tmp_path, uri, words):
    """Refused before anything starts: an attempt would wait for it, and cost money."""
    spec = tmp_path / "train.yaml"
    spec.write_text("version: v1\nname: train\nentrypoint: [python3, -V]\n")
    store.write("empty/x", b"")
    store.write("output/manifest.json", Manifest("directory").to_json())

    def started(_controller):
        pytest.fail("it has begun")

    monkeypatch.setattr(Owner, "enter", started)

    got = call("run", "-f", str(spec), "--restore-from", uri.format(store=store.url))

    assert got.exit_code == 2
    assert words in got.stderr
