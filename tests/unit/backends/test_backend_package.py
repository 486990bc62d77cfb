"""A package that adds a backend by one folder and one entry point, for operator, sensor, shell and reaper."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import fields as fields_of
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from click.testing import CliRunner
from fakes.operator_world import Ti, operator_world
from fakes.toy_backend import BACKEND, DESK

import envscaler_airflow
from envscaler_airflow import EnvStageOperator, ReapOperator, ScalingSensor, backends
from envscaler_airflow import installed as registry
from envscaler_airflow.backends import BackendType
from envscaler_airflow.backends.local.processes import ProcessId
from envscaler_airflow.cli import main, run_commands
from envscaler_airflow.envspec.loading import BACKENDS
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks import states
from envscaler_airflow.hooks.settings import open_backend
from envscaler_airflow.operators import execution
from envscaler_airflow.owner import limits, stop
from envscaler_airflow.owner import reap as reap_module
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.triggers.scaling_checks import Checks

COMMANDS = (run_commands.submit, run_commands.backend_options, run_commands.render)
"""Imported before the package is installed: a process imports a command once, with the options known then."""
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
env: [{name: KEY, value_from: secret:wandb/key}]
entrypoint: ["true"]
scaling: {policy: cost-to-finish}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install the toy's package: its entry point; its folder is importable already."""
    meta = tmp_path / "site-packages" / "toy_backend-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{backends.GROUP}]\ntoy = fakes.toy_backend:BACKEND\n")
    monkeypatch.syspath_prepend(str(meta.parent))
    backends.all_backends.cache_clear()
    yield tmp_path / "desk"
    backends.all_backends.cache_clear()


@pytest.fixture
def world(package, tmp_path, monkeypatch):
    """A deployment whose operators open the toy through a connection of its type."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__TOY_ROOT", str(package))
    monkeypatch.setenv("AIRFLOW__ENVSCALER__TOY", '{"waits": true}')
    monkeypatch.setenv("AIRFLOW_CONN_MINE", '{"conn_type": "toy", "login": "me"}')
    with operator_world(tmp_path, monkeypatch) as made:
        monkeypatch.setattr(execution, "open_backend", open_backend)
        (tmp_path / "train.yaml").write_text(SPEC)
        yield made


@pytest.fixture
def shell(package, tmp_path, monkeypatch):
    """Run ``envscaler`` in a folder with a spec."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("ENVSCALER_TOY_ROOT", str(package))
    (tmp_path / "envscaler.yaml").write_text(SPEC)
    return lambda *words: CliRunner().invoke(main, [*words])


def test_the_operator_runs_a_stage_on_it(world, package):
    """With its connection, the image that it prepares, and the secret that only its machines resolve."""
    operator, ti = world.operator(compute="toy", conn_id="mine"), Ti()

    trigger = world.execute(operator, ti).trigger.serialize()[1]
    [file] = package.glob("*.json")
    body = json.loads(file.read_text())
    open_backend("toy:mine").work(world.handle)
    result = world.finish(operator, ti)

    assert (trigger["compute"], open_backend(trigger["compute"]).user) == ("toy:mine", "me")
    assert (body["image"], body["secrets"]) == ("desk:1", {"KEY": ""})
    assert result["report"]["status"] == "succeeded"
    assert world.log.load().attempts[0].allocation.offer == DESK


def test_the_sensor_checks_a_stage_on_it(world):
    """With the backend and the connection of its stage."""
    operator = world.operator(compute="toy", conn_id="mine")
    world.execute(operator)
    with DAG("dag", schedule=None):
        EnvStageOperator(task_id="train", spec="train.yaml", compute="toy", conn_id="mine")
        sensor = ScalingSensor(task_id="autoscale", stage="train")

    with pytest.raises(TaskDeferred) as caught:
        sensor.execute(world.context(operator, Ti()))
    given = caught.value.trigger.serialize()[1]
    where = {name: given[name] for name in ("map_index", "compute", "store_url", "store_conn_id")}
    checks = Checks.open("unit/dag/run/train", writer="sensor", **where)

    assert given["compute"] == "toy:mine"
    assert checks.once({"train": "deferred"}) is None
    assert [item.name for item in checks.backend.offers()] == [DESK.name]
    checks.close()


def test_reap_removes_an_attempt_that_no_run_owns(world, package, monkeypatch):
    """The task is over in Airflow: it is asked to stop, and removed by the next call."""
    monkeypatch.setattr(reap_module, "YOUNG_S", 0.0)
    monkeypatch.setattr(states, "task_state", lambda *_: "removed")
    world.execute(world.operator(compute="toy", conn_id="mine"))
    reaper = ReapOperator(task_id="reap", compute="toy", conn_id="mine")

    first, second = reaper.execute({}), reaper.execute({})

    assert [one["reason"] for one in first] == ["its task is removed in Airflow"]
    assert (len(second), list(package.glob("*.json"))) == (1, [])
    assert world.log.load().status == "stopped"


def test_a_backend_that_lists_nothing_cannot_be_reaped(world):
    """Attempts on this machine end by their lease."""
    with pytest.raises(SpecError, match="compute='local': it cannot list what runs there"):
        ReapOperator(task_id="reap", compute="local").execute({})


def test_the_shell_runs_a_stage_on_it(shell):
    """`submit` runs it, `status` shows the run, and `reap` finds that nothing is left."""
    done = shell("submit", "--backend", "toy", "--name", "first")
    shown = shell("status", "first")
    reaped = shell("reap", "--backend", "toy")

    assert done.exit_code == 0, done.output
    assert "succeeded" in shown.output
    assert reaped.output == "0 gone\n"


def test_a_shell_has_its_options(shell, package):
    """In a process of its own, since commands are imported once; the option goes over the variable."""
    paths = os.pathsep.join([str(package.parent / "site-packages"), str(Path(__file__).parents[2])])
    words = [sys.executable, "-m", "envscaler_airflow.cli", "submit", "--backend", "toy", "--desk", "other"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False)

    assert (done.returncode, package.exists(), Path("other").exists()) == (0, False, True), done.stderr


def test_the_shell_says_what_it_lacks_for_a_spec(shell, tmp_path, monkeypatch):
    """`dry-run`, `plan`, `validate` and `render` take its name as a target; `submit` names the setting."""
    (tmp_path / "gpu.yaml").write_text(SPEC.replace("{cpu: 1, memory: 1Gi}", "{gpu: {count: 1}}"))

    fits = shell("dry-run", "--target", "toy")
    missing = shell("plan", "-f", "gpu.yaml", "--target", "toy")
    valid = shell("validate", "--target", "toy")
    rendered = shell("render", "--target", "toy")
    wrong = shell("submit", "--backend", "toy", "--cluster", "c")
    monkeypatch.delenv("ENVSCALER_TOY_ROOT")
    unset = shell("submit", "--backend", "toy")

    assert (fits.exit_code, valid.exit_code) == (0, 0), fits.output + valid.output
    assert "image: desk:1\n" in rendered.stdout
    assert missing.stdout == "gpu: a desk has none; ask for less under targets.toy\n"
    assert "toy: set root" in unset.output
    assert "--cluster: backend toy has no such setting" in wrong.output


def test_a_shell_cancels_an_orphaned_run_on_it(shell, package, tmp_path, monkeypatch):
    """It opens the backend of the live attempt, where the last owner reached it."""
    (tmp_path / "toy.yaml").write_text("waits: true\n")

    def dies(*_, **__):
        raise SystemExit(9)

    with monkeypatch.context() as once:
        once.setattr(ForegroundOwner, "_wait", dies)
        shell("submit", "--backend", "toy", "--config", "toy.yaml", "--name", "first")
    monkeypatch.setattr(ProcessId, "is_alive", lambda _process: False)
    monkeypatch.setattr(limits, "GRACE_S", 0.0)  # nothing saves here
    monkeypatch.setattr(stop, "OVERDUE_MARGIN_S", 0.0)
    stopped = shell("cancel", "first")

    assert "no owner watches it" in stopped.output
    assert stopped.output.endswith("stopped: cancelled from a shell\n")
    assert list(package.glob("*.json")) == []


def test_without_the_package_the_stage_is_refused():
    """The message names what is installed."""
    with pytest.raises(
        SpecError, match="compute='toy': no such backend is installed; write one of kubernetes, l"
    ):
        open_backend("toy")


@pytest.fixture
def installed(monkeypatch):
    """Add these entry points to our own, as if packages had installed them."""
    own = registry.entry_points(group=backends.GROUP)

    def install(**points):
        found = [EntryPoint(name, value, backends.GROUP) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: [*own, *found])
        backends.all_backends.cache_clear()

    yield install
    backends.all_backends.cache_clear()


def test_our_own_backends_win_over_others_of_the_same_name(installed):
    """A package cannot take stages away from this machine."""
    installed(local="fakes.toy_backend:USURPER", toy="fakes.toy_backend:BACKEND")

    assert backends.backend_type("local").is_here
    assert backends.backend_type("toy") is BACKEND


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("fakes.no_such_module:BACKEND", "'bad' (fakes.no_such_module:BACKEND) cannot be loaded"),
        ("fakes.toy_backend:DESK", "'bad' (fakes.toy_backend:DESK) is not a BackendType of that name"),
        ("fakes.toy_backend:BACKEND", "'bad' (fakes.toy_backend:BACKEND) is not a BackendType of that name"),
    ],
    ids=["not there", "not one", "another name"],
)
def test_a_broken_backend_is_left_out_with_a_warning(value, words, installed, caplog):
    """Runs elsewhere do not end because of another package."""
    installed(bad=value)

    assert list(backends.all_backends()) == ["kubernetes", "local"]
    assert words in caplog.text


ROOT = Path(envscaler_airflow.__file__).parent
OURS = {"local", "kubernetes"}
OTHER_MEANINGS = {
    "cli/demo.py": "the demo's own places",
    "planning/data.py": "a cluster, whose cloud is not known",
    "planning/market.py": "an offer's name",
    "planning/offers.py": "an offer's name",
}
"""Modules that compare such a text, and what it means there."""


def test_no_module_asks_which_backend_it_is():
    """Backends of other packages are equal to ours: what differs is in their object, or in an ability."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if name.startswith("backends/"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            if OURS & {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}:
                found.setdefault(name, []).append(ast.unparse(node))

    assert {name: tests for name, tests in found.items() if name not in OTHER_MEANINGS} == {}
    assert found.keys() == OTHER_MEANINGS.keys()


def test_the_how_to_page_names_every_ability_and_every_fact():
    """The protocols of ``base`` that not all backends have, and the fields of the object."""
    page = (ROOT.parent / "docs/how-to/write-a-backend.md").read_text()
    tree = ast.parse((ROOT / "backends/base.py").read_text())
    kinds = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    ]
    methods = {node.name for kind in kinds for node in kind.body if isinstance(node, ast.FunctionDef)}
    fields = {item.name for item in fields_of(BackendType)} - {"is_here"}

    assert {name for name in methods | fields if not re.search(rf"`{name}[`=]|{name}=", page)} == set()


def test_a_spec_s_targets_are_the_installed_backends():
    """The room of specs reads the same entry points as the registry."""
    assert BACKENDS == backends.GROUP
