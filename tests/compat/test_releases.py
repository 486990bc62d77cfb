"""Run directories and serialized triggers: those of this schema are read, those of the first are refused.

Nothing is released yet, so a folder is named after the major version of its schema.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from envscaler_agent.protocol import Control, Manifest
from envscaler_airflow.backends.base import Leftover
from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.reap import reap
from envscaler_airflow.owner.report import run_report
from envscaler_airflow.owner.request import request_move, request_stop
from envscaler_airflow.owner.stage import Stage, Wake
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.plugin.page_facts import read_facts
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import Handle
from envscaler_airflow.scaling import replay
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.keys import RunKey, is_manifest
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing import ManualClock, ScriptedBackend

HERE = Path(__file__).parent
REFUSED = HERE / "schema-1" / "run"
RELEASES = sorted(path.name for path in HERE.glob("schema-*") if path.name != "schema-1")
OLD_KEY = RunKey.from_dict(json.loads((REFUSED / "run.json").read_text())["key"])
OLD = r"was written by an unreleased 0\.1\.0 of envscaler-airflow \(schema 1\.0\).*; start a new run"
LIVE = Allocation(Offer("local", "", "cpu-1", "on-demand", vcpus=1.0, memory_gib=4.0, usd_per_hour=0.1))
SPEC = "version: v1\nname: train\nentrypoint: ['true']\n"


@pytest.fixture(params=RELEASES)
def release(request, tmp_path):
    """A copy of a release's run directory, as a store."""
    shutil.copytree(HERE / request.param / "run", tmp_path / "run")
    return request.param, open_store(f"file://{tmp_path}")


def test_events_fold_into_the_run_that_they_were(release):
    """A move from cpu-1 to cpu-2, then a success, delivered."""
    _, store = release

    state = Run(store, "run").events.load()

    assert (state.status, state.generation, state.unknown) == ("succeeded", 1, ())
    assert [attempt.outcome for attempt in state.attempts] == ["drained", "succeeded"]
    assert [attempt.allocation.name for attempt in state.attempts] == ["local/cpu-1", "local/cpu-2"]
    assert set(state.outputs) == {"model"}


def test_the_bill_is_the_one_that_was_delivered(release):
    """The same events give the same report."""
    _, store = release
    state = Run(store, "run").events.load()
    delivered = json.loads(store.read("run/result.json"))["report"]

    got = run_report(state, now=0.0)

    assert got.bill.usd == pytest.approx(delivered["bill"]["usd"])
    assert got.bill.steps == delivered["bill"]["steps"]


def test_every_file_of_the_run_is_read(release):
    """Key, spec, plan, control, status, lease, logs, manifests."""
    _, store = release

    key = RunKey.from_dict(json.loads(store.read("run/run.json"))["key"])
    spec = Run(store, "run").spec(Run(store, "run").events.load().spec_hash)
    plan = json.loads(store.read("run/plan.json"))
    control = Control.from_json(store.read("run/control/g1-a1.json"), where="t")
    status = Run(store, "run").status((1, 2))
    text, _ = read_logs(Run(store, "run"), attempt=(1, 2), node=0)
    manifests = [name for name in store.names("run") if is_manifest(name)]

    assert (key.task_id, spec.name) == ("train", "train")
    assert [Allocation.from_dict(item).name for item in plan["targets"]] == ["local/cpu-1", "local/cpu-2"]
    assert control.action == "drain"
    assert (status.phase, status.progress.step) == ("ended", 900)
    assert Run(store, "run").lease.read().counter > 0
    assert text.startswith(b"from step 1")
    assert len(manifests) == 3
    for name in manifests:
        Manifest.from_json(store.read(name), where=name)


def test_recorded_decisions_are_decided_the_same_way(release):
    """The replay of a recorded log gives the recorded decisions."""
    _, store = release

    checks = [check for check, _ in read_decisions(Run(store, "run"))]

    assert any(check.decision.action == "move" for check in checks)
    assert [replay(check).action for check in checks] == [check.decision.action for check in checks]


@pytest.mark.parametrize("name", RELEASES)
def test_serialized_triggers_are_made_again(name):
    """A triggerer of this version takes over the triggers of the previous one."""
    for path, arguments in json.loads((HERE / name / "triggers.json").read_text()):
        module, _, kind = path.rpartition(".")

        made = getattr(import_module(module), kind)(**arguments)

        again_path, again = made.serialize()
        assert again_path == path
        assert {key: again[key] for key in arguments} == arguments


@pytest.fixture
def old(tmp_path):
    """A copy of the run of the first schema, as a store; every file is unchanged in the end."""
    folder = tmp_path / OLD_KEY.prefix
    shutil.copytree(REFUSED, folder)
    before = files_of(folder)
    yield Run(open_store(f"file://{tmp_path}"), OLD_KEY.prefix)
    assert files_of(folder) == before


def files_of(folder):
    """Content by name, of all files below *folder*."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command",
    [["status"], ["report"], ["logs"], ["explain"], ["cancel"], ["simulate", "run"]],
)
def test_the_shell_refuses_the_first_schema_by_name(old, command):
    """It shows and stops nothing."""
    got = CliRunner().invoke(main, [*command, OLD_KEY.run_id, "--store", old.store.url])

    assert got.exit_code != 0
    assert re.search(OLD, " ".join(got.output.split())), got.output


def test_the_list_of_runs_goes_on_beside_a_run_of_the_first_schema(old):
    """It is listed as unreadable."""
    got = CliRunner().invoke(main, ["status", "--json", "--store", old.store.url])

    assert [row["status"] for row in json.loads(got.stdout)] == ["unreadable"]


def test_a_run_of_the_first_schema_is_not_continued_from_the_shell(old, tmp_path, monkeypatch):
    """Before anything is installed, written or started."""
    (tmp_path / "train.yaml").write_text(SPEC)
    monkeypatch.setattr("envscaler_airflow.cli.run_commands.shell_key", lambda *_: OLD_KEY)
    options = ["-f", str(tmp_path / "train.yaml"), "--name", OLD_KEY.run_id]

    got = CliRunner().invoke(main, ["run", *options, "--store", old.store.url])

    assert got.exit_code != 0
    assert re.search(OLD, " ".join(got.output.split())), got.output


def test_the_owner_refuses_the_first_schema_by_name(old, tmp_path):
    """The operator's executions too: they call it."""
    (tmp_path / "train.yaml").write_text(SPEC)
    stage = Stage(spec=load_spec(tmp_path / "train.yaml"), spec_source="train.yaml")
    backend = ScriptedBackend((LIVE.offer,), clock=ManualClock())
    owner = Owner(run=old, backend=backend, actor=Actor("ti", 1, 1), stage=stage)

    for act in (owner.enter, owner.check_newest, lambda: owner.resume(Wake("status"))):
        with pytest.raises(ProtocolError, match=OLD):
            act()


def test_requests_to_a_run_of_the_first_schema_are_not_written(old):
    """A stop and a move."""
    with pytest.raises(ProtocolError, match=OLD):
        request_stop(old, reason="enough", by="me")
    with pytest.raises(ProtocolError, match=OLD):
        request_move(old, target=LIVE, from_attempt=(1, 1), because={"reason": "r"})


@pytest.mark.parametrize(
    "read",
    [
        read_facts,
        lambda run: ScalingWatcher(run=run, backend=None).snapshot(),
        lambda run: run.key(),
        lambda run: run.lease.read(),
    ],
    ids=["page", "sensor", "key", "lease"],
)
def test_every_other_reader_refuses_the_first_schema_by_name(old, read):
    """Page, sensor, reap."""
    with pytest.raises(ProtocolError, match=OLD):
        read(old)


def test_reap_leaves_what_belongs_to_a_run_of_the_first_schema(old, caplog):
    """The log says why."""
    backend = Mock(spec=["name", "leftovers", "remove", "stop"])
    part = Leftover(Handle("local", "old-g1-a2"), old.prefix, 1, 2, age_s=1e6, runs=True)
    backend.leftovers.return_value = [part]

    assert list(reap(old.store, backend)) == []

    assert re.search(OLD, caplog.text)
    assert not backend.remove.called
    assert not backend.stop.called
