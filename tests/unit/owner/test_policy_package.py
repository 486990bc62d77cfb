"""A package that adds a policy by one file: the one on the how-to page, copied verbatim."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes.policies import bring, forgotten

import envscaler_airflow
from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import BackendError, SpecError, StoreError
from envscaler_airflow.owner import policies
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.policies import policies_of
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.scaling import (
    Metric,
    Observation,
    Policy,
    Prepared,
    Proposal,
    ScalingPolicy,
    ThresholdRule,
    all_policies,
    replay,
)
from envscaler_airflow.scaling.deadline.policy import DEADLINE
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.scaling.vertical import VERTICAL
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend
from envscaler_airflow.triggers.scaling_checks import Checks

PAGE = (Path(__file__).parents[3] / "docs/how-to/write-a-policy.md").read_text()
NODE = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
LARGE = replace(NODE, instance_type="node:cpu-2", vcpus=2, usd_per_hour=3.0)
LARGER = replace(LARGE, instance_type="node:cpu-4", vcpus=4, usd_per_hour=6.0)
SPOT = replace(LARGE, capacity_type="spot", usd_per_hour=1.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
num_nodes: 1..4
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling: {policy: queue, warmup: 1s, stabilization: 1s, cooldown: 1s, min_epochs_between: 0}
"""


THEIRS = (
    SPEC.replace("policy: queue", "policy: theirs").replace("{cpu: 1}", "{cpu: 2}") + "capacity: on-demand\n"
)


@pytest.fixture
def as_before():
    """Isolate each test from the policies of the others."""
    with forgotten():
        yield


def block(kind):
    """Return the page's first code block of that language."""
    return re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The page's package, installed: its one module and its entry point."""
    folder = tmp_path / "site-packages"
    meta = folder / "queue_policy-1.0.dist-info"
    meta.mkdir(parents=True)
    (folder / "queue_policy.py").write_text(block("python"))
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: queue-policy\nVersion: 1.0\n")
    group, line = block("toml").splitlines()
    name, value = line.split(" = ")
    (meta / "entry_points.txt").write_text(f"[{group.split(chr(34))[1]}]\n{name} = {json.loads(value)}\n")
    monkeypatch.syspath_prepend(str(folder))
    with forgotten():
        yield folder
    sys.modules.pop("queue_policy", None)


@pytest.fixture
def world(package, new_world):
    """A run under that policy, whose training runs on one node."""
    made = new_world((NODE,), spec=SPEC, backend=ElasticBackend)
    made.owner(value_of_hour=0.0).enter()
    return made


def checked(world, ask, *, times=3):
    """Return the event of a sensor that checks every half minute; None when it wants nothing."""
    folder, _, index = world.prefix.rpartition("/")
    checks = Checks(
        world.store,
        world.backend,
        folder,
        int(index),
        "sensor",
        ask=ask,
        monotonic=world.clock.monotonic,
        clock=world.clock.time,
    )
    event = None
    for number in range(1, times + 1):
        world.say(
            step=10 * number,
            elapsed_s=30.0 * number,
            usage={"disk_read_bytes_per_s": 5e6, "cpu_percent": 9.0},
        )
        world.clock.advance(30)
        event = event or checks.once({"train": "deferred"})
    checks.close()
    return event


def recorded(world):
    """Return the recorded checks, as read back."""
    return [check for check, _ in read_decisions(Run(world.store, world.prefix))]


def test_a_package_of_one_module_is_a_policy(package, tmp_path):
    """A spec that names it is accepted where it is installed."""
    (tmp_path / "train.yaml").write_text(SPEC)

    check_policy(load_spec(tmp_path / "train.yaml"))

    assert [file.name for file in package.glob("*.py")] == ["queue_policy.py"]


def test_without_the_package_the_spec_is_refused(tmp_path):
    """The message names what is installed."""
    (tmp_path / "train.yaml").write_text(SPEC)

    with pytest.raises(SpecError, match="'queue' is not installed here"):
        check_policy(load_spec(tmp_path / "train.yaml"))


def test_its_metrics_reach_it_at_each_check(world):
    """The query's answer and the nodes' metric, and no metric that it does not need."""
    event = checked(world, lambda query: (150.0,) if query == "sum(requests_waiting)" else ())

    assert (event["kind"], event["target"]["nodes"]) == ("move", 2)
    assert (event["reason"], event["numbers"]) == (
        "150 requests wait",
        {"waiting": 150.0, "read_bytes_per_s": 5e6},
    )
    assert {item.metric for item in recorded(world)[-1].observation.samples} == {
        "waiting",
        "disk_read_bytes_per_s",
    }


def test_a_query_without_an_answer_keeps_with_the_reason(world):
    """As for a built-in rule."""

    def away(_query):
        raise BackendError("http://p: does not answer", transient=True)

    event = checked(world, away)

    decision = recorded(world)[-1].decision
    assert event is None
    assert decision.reason == (
        "the queue is unknown: query 'sum(requests_waiting)': http://p: does not answer"
    )


def test_the_owner_accepts_by_the_recorded_metric(world):
    """It queries no server: the record has the answer that the sensor got."""
    event = checked(world, lambda _query: (150.0,))
    request_move(
        Run(world.store, event["prefix"]),
        target=Allocation(NODE, 2),
        from_attempt=(1, 1),
        because={name: event[name] for name in ("reason", "numbers", "check")},
    )

    world.owner(value_of_hour=0.0).enter()

    answer = next(item for item in world.log.read() if item.type in ("move-accepted", "move-refused"))
    assert (answer.type, answer.body.reason) == ("move-accepted", "150 requests wait")


def test_recorded_checks_are_decided_again_alike(world):
    """Including metrics of its own."""
    checked(world, lambda _query: (150.0,))
    checks = recorded(world)

    again = [replay(check, policies=policies_of(Run(world.store, world.prefix))) for check in checks]

    assert [check.decision.action for check in checks] == ["keep", "move"]
    assert again == [check.decision for check in checks]


def test_the_shell_replays_and_explains_it(world):
    """The replay gives the same decisions, and the explanation includes its own numbers (feature G6)."""
    checked(world, lambda _query: (150.0,))
    where = [world.prefix, "--store", world.store.url]

    replayed = CliRunner().invoke(main, ["simulate", "run", *where, "--json"])
    explained = CliRunner().invoke(main, ["explain", *where])

    assert json.loads(replayed.stdout)["summary"]["different"] == 0
    assert "150 requests wait" in explained.output
    assert "\n  waiting: 150" in explained.output


def started(new_world, monkeypatch, policy, **more):
    """Start a run under *policy*, registered as ``theirs``, whose first attempt runs on demand."""
    bring(monkeypatch, theirs=lambda: policy)
    made = new_world((LARGE, LARGER, SPOT), spec=THEIRS, backend=ElasticBackend)
    owner = made.owner(value_of_hour=0.0)
    owner.owned.stage = replace(owner.owned.stage, **more)
    owner.enter()
    return made


def tables(world):
    """Return the names of the run's tables."""
    return world.store.children(f"{world.prefix}/tables")


def test_the_owner_stores_what_it_prepares_and_checks_name_it(new_world, monkeypatch, as_before):
    """The deadline policy under another name: its table is built at the start, and decides."""
    policy = replace(DEADLINE, name="theirs")
    world = started(new_world, monkeypatch, policy, strategy="deadline", deadline_s=36_000.0)
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        candidates=(Allocation(LARGE), Allocation(SPOT)),
        monotonic=world.clock.monotonic,
    )
    for number in range(1, 4):
        world.say(step=10 * number, elapsed_s=30.0 * number)
        world.clock.advance(30)
        check = watcher.snapshot().check

    pointer, table = sorted(tables(world), key=len)
    assert (pointer, re.fullmatch(r"theirs-[0-9a-f]{16}\.bin", table) is not None) == ("theirs.json", True)
    assert check.observation.deadline_table == f"tables/{table}"
    assert "ticks_of_on_demand" in check.decision.numbers
    assert replay(check, policies=policies_of(Run(world.store, world.prefix))) == check.decision


def test_a_table_that_cannot_be_read_now_is_no_answer(new_world, monkeypatch, as_before):
    """The check ends in the store's error and is repeated, as for a built-in policy."""
    policy = replace(DEADLINE, name="theirs")
    world = started(new_world, monkeypatch, policy, strategy="deadline", deadline_s=36_000.0)
    name, _ = policies.present_table(Run(world.store, world.prefix), "theirs")
    seen = Observation(Allocation(LARGE), deadline_table=name)

    def away(_name, **_more):
        raise StoreError("the store is away", transient=True)

    monkeypatch.setattr(world.store, "read", away)
    theirs = policies_of(Run(world.store, world.prefix))["theirs"]

    with pytest.raises(StoreError, match="the store is away"):
        theirs.propose(seen, Policy("theirs"))


def test_it_changes_in_place_where_it_says_so(new_world, monkeypatch, as_before):
    """Another size of the same machine: the attempt keeps running, as under the vertical policy."""
    world = started(new_world, monkeypatch, replace(VERTICAL, name="theirs"))
    world.say(elapsed_s=60.0)
    world.ask_move(target=Allocation(LARGER))

    world.owner(value_of_hour=0.0).enter()

    assert world.log.read()[-1].type == "changed"
    assert world.state.live.number == 1


def raises(_settings, _facts):
    """A bug."""
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (raises, "failed: ZeroDivisionError"),
        (lambda _settings, _facts: None, "failed: AttributeError"),
        (lambda _settings, _facts: Prepared({"../control/g1-a1.json": b""}), "failed: ValueError"),
        (lambda _settings, _facts: Prepared({"table": "text"}), "failed: ValueError"),
        (lambda _settings, _facts: Prepared(reason="no libcuda.so.1"), "no libcuda.so.1"),
    ],
    ids=["raises", "nothing", "elsewhere", "text", "a reason"],
)
def test_what_cannot_be_prepared_holds_up_no_attempt(new_world, monkeypatch, as_before, caplog, prepare, why):
    """It starts without a table, and the log names the reason."""
    policy = ScalingPolicy("theirs", lambda _seen, _settings: Proposal(), prepare=prepare)

    world = started(new_world, monkeypatch, policy)

    assert world.state.live.phase == "started"
    assert tables(world) == []
    assert why in caplog.text


def test_offers_that_are_unknown_now_hold_up_no_attempt_of_theirs(new_world, monkeypatch, as_before, caplog):
    """A policy that requests offers itself then has no table."""

    def asks(_settings, facts):
        raise BackendError(f"{len(facts.offers())} offers and no answer", transient=True)

    policy = ScalingPolicy("theirs", lambda _seen, _settings: Proposal(), prepare=asks)

    world = started(new_world, monkeypatch, policy)

    assert world.state.live.phase == "started"
    assert "3 offers and no answer" in caplog.text


@pytest.mark.parametrize(
    ("brought", "why"),
    [
        (lambda: ScalingPolicy("mine", lambda _seen, _settings: Proposal()), "write ScalingPolicy('theirs'"),
        (lambda: lambda _seen, _settings: Proposal(), "write ScalingPolicy('theirs'"),
        (lambda: ScalingPolicy("theirs", raises, metrics=("memory_bytes",)), "must be Metric objects"),
        (lambda: ScalingPolicy("theirs", raises, window_s=float("nan")), "window_s must be finite"),
    ],
    ids=["another name", "a function", "names of metrics", "a window of NaN"],
)
def test_an_object_that_is_not_one_is_named(monkeypatch, as_before, brought, why):
    """The error names the object and what to write; nothing moves."""
    bring(monkeypatch, theirs=brought)

    said = all_policies()["theirs"].propose(Observation(Allocation(NODE)), Policy("theirs"))

    assert said.wants == ()
    assert said.reason.startswith("policy 'theirs' (theirs:policy) ")
    assert why in said.reason


def test_the_name_of_one_of_ours_cannot_be_taken(monkeypatch, as_before):
    """The position of the other package on the path does not matter."""
    bring(monkeypatch, deadline=lambda: ScalingPolicy("deadline", raises))

    assert all_policies()["deadline"] is DEADLINE


@pytest.mark.parametrize(
    ("policy", "rules", "window_s"),
    [
        (ScalingPolicy("a", raises), (), 60.0),
        (ScalingPolicy("a", raises, window_s=300.0), (), 300.0),
        (ScalingPolicy("a", raises, window_checks=8), (), 240.0),
        (ScalingPolicy("a", raises), (ThresholdRule("x", samples=5),), 300.0),
        (ScalingPolicy("a", raises), (ThresholdRule("x", for_s=600.0),), 1200.0),
    ],
)
def test_samples_are_kept_for_the_longest_need(policy, rules, window_s):
    """Checks every 30 s: two of them by default, or twice what a rule needs."""
    settings = Policy("a", rules=rules)

    assert policy.looks_back_s(settings, interval_s=30.0) == window_s


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        (Metric("gpu_utilization"), ["gpu0_utilization_percent", "gpu12_utilization_percent"]),
        (Metric("cpu_utilization"), ["cpu_percent"]),
        (Metric("memory_*"), ["memory_bytes", "memory_limit_bytes"]),
        (Metric("waiting", query="q"), ["waiting"]),
        (Metric("memory_*", query="q"), []),
    ],
    ids=str,
)
def test_a_metric_matches_samples_by_name_or_pattern(metric, names):
    """The answer of a query matches only by its exact name."""
    known = [
        *("gpu0_utilization_percent", "gpu12_utilization_percent", "cpu_percent", "memory_bytes"),
        *("memory_limit_bytes", "waiting"),
    ]

    assert [name for name in known if metric.matches(name)] == names


OURS = {"cost-to-finish", "deadline", "phase", "threshold", "vertical"}


def test_no_module_asks_which_policy_it_is():
    """Third-party policies are equal to built-in ones; only the spec knows which blocks those need."""
    found = []
    for file in sorted(Path(envscaler_airflow.__file__).parent.rglob("*.py")):
        text = file.read_text()
        if not any(f'"{name}"' in text for name in OURS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare) and "policy" in ast.unparse(node):
                constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if constants & OURS:
                    found.append((file.name, ast.unparse(node)))

    assert found == [("running.py", "self.policy == 'threshold'"), ("running.py", "self.policy == 'phase'")]
