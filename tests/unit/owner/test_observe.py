"""What the sensor sees of a run: speeds, samples, ages, and what survives its restart."""

from __future__ import annotations

import pytest

from envscaler_agent.protocol import Ended, Progress, Status, claim_name, status_name
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.run import Actor
from envscaler_airflow.store.decisions import DecisionLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store
from envscaler_airflow.testing import ManualClock, ScriptedBackend

KEY = RunKey("deployment", "dag", "run", "train")
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
num_nodes: 2
entrypoint: [python, train.py]
scaling:
  policy: threshold
  max_nodes: 4
  rules: [{metric: cpu_utilization, above: 80, for: 3 samples}]
  cooldown: 1m
  stabilization: 1s
  min_epochs_between: 0
"""


class Scene:
    """A run of two nodes with an watcher."""

    def __init__(self, tmp_path, spec=SPEC):
        """Start the attempt; no node has reported yet."""
        (tmp_path / "train.yaml").write_text(spec)
        self.clock = ManualClock()
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.backend = ScriptedBackend(clock=self.clock)
        stage = Stage(spec=load_spec(tmp_path / "train.yaml"), spec_source="train.yaml")
        self.owner = Owner(
            run=Run(self.store, KEY, clock=self.clock.time),
            backend=self.backend,
            actor=Actor("ti-1"),
            stage=stage,
        )
        self.owner.enter()
        self.sequences = {}

    def watcher(self, ask=None):
        """Return a new watcher, as after a restart of the triggerer."""
        return ScalingWatcher(
            run=Run(self.store, KEY, clock=self.clock.time),
            ask=ask,
            backend=self.backend,
            monotonic=self.clock.monotonic,
        )

    def say(self, node=0, *, cpu=90.0, step=10, elapsed_s=None, claim=1, **more):
        """Let a node report."""
        self.sequences[node] = self.sequences.get(node, 0) + 1
        status = Status(
            generation=1,
            attempt=1,
            node=node,
            claim=claim,
            sequence=self.sequences[node],
            phase=more.pop("phase", "running"),
            progress=Progress(
                step=step,
                total_steps=more.pop("total_steps", 1000),
                epoch=more.pop("epoch", None),
                epochs=more.pop("epochs", None),
                elapsed_s=elapsed_s,
            ),
            usage={"cpu_percent": cpu, "memory_bytes": 1e9, "gpu0_utilization_percent": 50.0},
            **more,
        )
        self.store.write(f"{KEY.prefix}/{status_name(1, 1, node, claim)}", status.to_json())

    def replace_pod(self, *, claim):
        """Let another pod claim node 0."""
        self.store.write(f"{KEY.prefix}/{claim_name(1, 1, 0, claim)}", b"{}")


@pytest.fixture
def scene(tmp_path):
    """A run of two nodes."""
    return Scene(tmp_path)


def test_a_round_of_samples_needs_a_word_of_every_node(scene):
    """Node 0 twice and node 1 once is one round; a further check adds none."""
    watcher = scene.watcher()
    scene.say(0)
    scene.say(0)
    watcher.snapshot()
    scene.say(1)

    watcher.snapshot()
    seen = watcher.snapshot().check.observation

    assert [(item.node, item.metric) for item in seen.samples] == [(0, "cpu_percent"), (1, "cpu_percent")]


def test_a_speed_is_in_the_unit_that_work_is_counted_in(scene):
    """Epochs first, and steps once their total is known: one step a second throughout, restarts included."""
    watcher, found = scene.watcher(), []
    log = DecisionLog(Run(scene.store, KEY), writer="sensor", monotonic=scene.clock.monotonic)
    for look in range(10):
        epochs = {"epoch": 3 + look // 3, "epochs": 10, "total_steps": None if look < 5 else 60_000}
        scene.say(0, step=30_000 + 15 * look, elapsed_s=15.0 * look, **epochs)
        check = watcher.snapshot().check
        log.add(check)
        found.append((check.observation.unit, [item.mean for item in check.observation.speeds.values()]))
        scene.clock.advance(15)
    log.close()

    assert found[4:7] == [("epochs", [pytest.approx(1 / 60)]), ("steps", []), ("steps", [1.0])]
    again = scene.watcher().snapshot().check.observation
    assert [item.mean for item in again.speeds.values()] == [1.0]


def test_only_metrics_that_rules_look_at_are_carried(scene):
    """Otherwise a day of checks would be gigabytes."""
    watcher = scene.watcher()
    for _ in range(20):
        scene.say(0)
        scene.say(1)
        scene.clock.advance(15)
        seen = watcher.snapshot().check.observation

    assert {item.metric for item in seen.samples} == {"cpu_percent"}
    assert len(seen.samples) <= 2 * 7  # two nodes, twice three samples of 15 s, and now


def test_three_rounds_above_scale_out(scene):
    """90 % of one CPU on both nodes, three times: one node more."""
    watcher = scene.watcher()
    decisions = []
    for _ in range(4):
        scene.say(0)
        scene.say(1)
        scene.clock.advance(15)
        decisions.append(watcher.snapshot().check.decision)

    assert [decision.action for decision in decisions[:2]] == ["keep", "keep"]
    assert decisions[-1].action == "move"
    assert decisions[-1].target.nodes == 3


QUERIED = SPEC.replace("metric: cpu_utilization", "metric: load, prometheus: avg(node_load1)")


class Server:
    """A Prometheus that answers as the test says: a number, or None when it is away."""

    def __init__(self):
        """Answer 90 at first."""
        self.value = 90.0
        self.asked = []

    def __call__(self, query):
        """Return the number, or fail."""
        self.asked.append(query)
        if self.value is None:
            raise BackendError("http://p: Prometheus does not answer: refused", transient=True)
        return (self.value,)


def watched(scene, watcher, *, every_s=30, times=1):
    """Make *count* checks, before each of which both nodes report; return their decisions."""
    decisions = []
    for _ in range(times):
        scene.say(0)
        scene.say(1)
        scene.clock.advance(every_s)
        decisions.append(watcher.snapshot().check.decision)
    return decisions


@pytest.mark.parametrize("every_s", [5, 30, 60, 90])
def test_a_query_is_asked_at_each_check_and_three_above_scale_out(tmp_path, every_s):
    """The interval of checks does not matter; what nodes report is not carried."""
    scene, server = Scene(tmp_path, QUERIED), Server()
    watcher = scene.watcher(server)

    decisions = watched(scene, watcher, every_s=every_s, times=4)

    assert [decision.action for decision in decisions[:2]] == ["keep", "keep"]
    assert (decisions[-1].action, decisions[-1].target.nodes) == ("move", 3)
    assert server.asked == ["avg(node_load1)"] * 4
    assert {item.metric for item in watcher.snapshot().check.observation.samples} == {
        "mean of avg(node_load1)"
    }


def test_a_server_that_is_away_makes_the_metric_unknown_and_the_count_begin_again(tmp_path):
    """The sensor keeps the machine and records the reason; two checks after the outage are not yet three."""
    scene, server = Scene(tmp_path, QUERIED), Server()
    watcher = scene.watcher(server)
    watched(scene, watcher, times=2)

    server.value = None
    (away,) = watched(scene, watcher)
    server.value = 90.0
    after = watched(scene, watcher, times=4)

    why = "query 'avg(node_load1)': http://p: Prometheus does not answer: refused"
    assert (away.action, away.reason) == ("keep", f"load is unknown: {why}")
    assert [item.action for item in after[:2]] == ["keep", "keep"]
    assert after[-1].action == "move"


def test_who_asks_nobody_goes_by_what_was_recorded(tmp_path):
    """The stage's owner judges a move by the answers that the sensor recorded. It fails where they failed."""
    scene, server = Scene(tmp_path, QUERIED), Server()
    watcher = scene.watcher(server)
    log = DecisionLog(Run(scene.store, KEY), writer="s", monotonic=scene.clock.monotonic)
    watched(scene, watcher, times=4)
    log.add(watcher.snapshot().check)
    log.close()

    moving = scene.watcher().snapshot().check.decision
    server.value = None
    log.add(watcher.snapshot().check)
    log.close()
    keeping = scene.watcher().snapshot().check.decision

    assert (moving.action, moving.target.nodes) == ("move", 3)
    assert keeping.action == "keep"
    assert keeping.reason.startswith("load is unknown: query 'avg(node_load1)': http://p")


def test_a_speed_is_measured_by_the_nodes_own_clock(scene):
    """100 steps in 50 s of the node's clock: 2 steps a second, independent of the watcher's clock."""
    watcher = scene.watcher()
    for step, elapsed_s in [(100, 10.0), (150, 35.0), (200, 60.0)]:
        scene.say(0, step=step, elapsed_s=elapsed_s)
        scene.clock.advance(7)
        seen = watcher.snapshot().check.observation

    assert seen.speeds["2 x scripted/cpu-1/on-demand"].mean == pytest.approx(2.0)


@pytest.mark.parametrize("first_s", [15.0, 200.0])
def test_a_replaced_pod_adds_to_the_speed_from_its_first_word_on(scene, first_s):
    """2 steps a second for 100 s, then 4 for 100 s on a pod whose clock starts at 0: 3 on average.

    It does not matter whether its time is below that of the previous pod or already beyond it.
    """
    watcher, name = scene.watcher(), "2 x scripted/cpu-1/on-demand"
    for step, elapsed_s in [(100, 50.0), (200, 100.0), (300, 150.0)]:
        scene.say(0, step=step, elapsed_s=elapsed_s)
        old = watcher.snapshot().check.observation
    scene.replace_pod(claim=2)
    found = []
    for number in range(3):
        scene.say(0, step=300 + 200 * number, elapsed_s=first_s + 50 * number, claim=2)
        found.append(watcher.snapshot().check.observation.speeds[name].mean)

    assert old.speeds[name].mean == pytest.approx(2.0)
    assert found == [pytest.approx(2.0), pytest.approx((200 + 200) / 150), pytest.approx(3.0)]


def test_a_silent_node_is_of_unknown_health(scene):
    """No new report for 90 s."""
    watcher = scene.watcher()
    scene.say(0)
    fresh = watcher.snapshot().check.observation
    scene.clock.advance(91)

    stale = watcher.snapshot().check.observation

    assert (fresh.health, stale.health) == ("ok", "unknown")


def test_windows_and_speeds_survive_a_restart_of_the_observer(scene):
    """The watcher rebuilds them from the recorded checks."""
    watcher = scene.watcher()
    log = DecisionLog(Run(scene.store, KEY), writer="s", monotonic=scene.clock.monotonic)
    for step, elapsed_s in [(100, 10.0), (200, 60.0)]:
        scene.say(0, step=step, elapsed_s=elapsed_s)
        scene.say(1)
        scene.clock.advance(15)
        before = watcher.snapshot().check
        log.add(before)
    log.close()

    after = scene.watcher().snapshot().check.observation

    assert after.elapsed_s == pytest.approx(before.observation.elapsed_s)
    assert after.speeds == before.observation.speeds
    assert after.samples[: len(before.observation.samples)] == before.observation.samples


def test_a_run_that_is_over_is_seen_as_such(scene):
    """The sensor makes no check of it."""
    ended = Ended(exit_code=0, reason="succeeded")
    scene.say(0, phase="ended", ended=ended)
    scene.say(1, phase="ended", ended=ended)
    for handle in scene.backend.live:
        scene.backend.end(handle)
    watcher = scene.watcher()
    before = watcher.snapshot()

    from envscaler_airflow.owner.stage import Wake

    scene.owner.resume(Wake("status"))

    assert before.kind == "seen"
    assert watcher.snapshot().kind == "over"
