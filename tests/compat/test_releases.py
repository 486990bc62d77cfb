"""A run directory and serialized triggers of every release, read by this version."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from envscaler_agent.protocol import Control, Manifest
from envscaler_airflow.owner.report import run_report
from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling import replay
from envscaler_airflow.store.base import open_store
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.keys import RunKey, is_manifest
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run

HERE = Path(__file__).parent
RELEASES = sorted(path.name for path in HERE.iterdir() if (path / "run").is_dir())


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
    assert [attempt.outcome for attempt in state.attempts] == ["left", "succeeded"]
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
    assert control.action == "leave"
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
