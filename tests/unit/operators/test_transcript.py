"""What a run's task log in Airflow shows, over deferrals, moves and hosts."""

from __future__ import annotations

import json

import pytest

from envscaler_agent.protocol import log_name
from envscaler_airflow.operators import execution
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store import check_store, open_store
from envscaler_airflow.store.logs import TASK_LOG, Tail, TaskLog, labelled, read_task_log
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import cpu_offer

PREFIX = "d/dag/run/train/-1"


class TaskLogView:
    """A run and the files of its task's log: executions append to theirs, a deferral drops the trigger's."""

    def __init__(self, tmp_path):
        """Start one attempt."""
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.events = Run(self.store, PREFIX).events
        self.number = 0
        self.execution, self.trigger = [], []
        self.append("generation", generation=1, spec_hash="0" * 64, reason="first start")
        self.start(1)

    def append(self, kind, **body):
        """Append one event of generation 1."""
        self.events.append(self.number, read_body(kind, body))
        self.number += 1

    def start(self, attempt, nodes=1):
        """Start an attempt that runs."""
        allocation = Allocation(cpu_offer(1), nodes).to_dict()
        self.attempt, self.nodes, self.chunk = attempt, nodes, 0
        of = {"generation": 1, "attempt": attempt}
        self.append(
            "attempt-intended", allocation=allocation, reason="why", candidates=[], spec_hash="0" * 64, **of
        )
        self.append("attempt-started", handle={"backend": "scripted", "name": f"a{attempt}"}, **of)

    def print(self, *lines, node=0):
        """Let the training print *lines*, in a chunk of their own."""
        self.chunk += 1
        text = "".join(f"{line}\n" for line in lines)
        self.store.write(f"{PREFIX}/{log_name(1, self.attempt, node, self.chunk)}", text.encode())

    def look(self):
        """Let the trigger check once."""
        tail = Tail(
            Run(self.store, PREFIX),
            attempt=(1, self.attempt),
            nodes=self.nodes,
            holder="t",
            monotonic=lambda: 0.0,
        )
        for shown in tail.read(budget=1 << 16):
            self.trigger += labelled(shown, nodes=self.nodes)

    def execute(self, *, goes_on):
        """Let an execution write its log; Airflow drops the trigger's when the next one begins."""
        execution.Transcript(Run(self.store, PREFIX), self.execution.append).write(goes_on=goes_on)
        if goes_on:
            self.trigger = []

    def steps(self):
        """Return the training's lines, as the UI shows them once the task has ended."""
        return [line for line in self.execution + self.trigger if "step" in line]


@pytest.fixture
def view(tmp_path, monkeypatch):
    """A task's log where worker, triggerer and API server share a machine."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    return TaskLogView(tmp_path)


def test_each_line_is_there_once_after_five_deferrals_and_a_move(view):
    """Airflow drops a trigger's log at the next deferral, so the execution writes its lines (F1)."""
    step = 0
    view.execute(goes_on=True)
    for deferral in range(5):
        view.print(f"step {step}", f"step {step + 1}")
        view.look()
        view.print(f"step {step + 2}")  # after the trigger's last check
        step += 3
        if deferral == 2:
            view.append("attempt-ended", generation=1, attempt=1, outcome="drained", usage=[])
            view.start(2)
        view.execute(goes_on=deferral < 4)

    assert sorted(view.steps()) == sorted(f"step {n}" for n in range(15))


def test_what_an_attempt_printed_comes_before_its_end(view):
    """Also before the attempt that follows (F1)."""
    view.execute(goes_on=True)
    view.print("step 1")
    view.append("attempt-ended", generation=1, attempt=1, outcome="lost", usage=[], detail="gone")
    view.start(2)
    view.print("step 2")
    del view.execution[:]

    view.execute(goes_on=True)

    assert view.execution == [
        "step 1",
        "attempt 1 lost: gone",
        "attempt 2 on scripted/cpu-1/on-demand ($0.0500/h): why",
        "attempt 2 runs as a2",
        "step 2",
    ]


def test_the_last_execution_writes_all_where_the_ui_reads_no_trigger_any_more(view, monkeypatch):
    """An executor other than the local one: a repeated line is better than a lost one (F1)."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    view.execute(goes_on=True)
    view.print("step 1")
    view.look()

    view.execute(goes_on=False)

    assert [line for line in view.execution if "step" in line] == ["step 1"]


def test_a_new_triggerer_goes_on_where_the_one_before_stopped(view):
    """Its log is another file, which does not replace the first one (F1)."""
    view.execute(goes_on=True)
    view.print("step 1")
    view.look()
    view.print("step 2")
    view.look()

    assert view.trigger == ["step 1", "step 2"]


def test_more_than_one_execution_writes_is_named(view, monkeypatch):
    """A flood of output between two executions is cut at its beginning, and the log reports the cut (F1)."""
    monkeypatch.setattr(execution, "CHUNKS", 2)
    view.execute(goes_on=True)
    for step in range(1, 6):
        view.print(f"step {step}")
        view.look()

    view.execute(goes_on=True)

    assert view.execution[-3:] == [
        "[3 chunks of node 0's output are left out: `envscaler logs` shows them]",
        "step 4",
        "step 5",
    ]


def test_a_store_that_cannot_be_read_is_one_line_and_nothing_is_lost(view, monkeypatch):
    """The next execution continues from there (F1)."""
    view.execute(goes_on=True)
    view.print("step 1")
    del view.execution[:]
    with monkeypatch.context() as patch:
        patch.setattr(type(view.store), "read", _refuse)
        view.execute(goes_on=True)

    view.execute(goes_on=True)

    assert view.execution == [
        "the training's output cannot be read now, and follows later: no answer",
        "step 1",
    ]


def _refuse(*_args, **_kwargs):
    from envscaler_airflow.errors import StoreError

    raise StoreError("no answer", transient=True)


def test_the_end_says_what_it_cost(view):
    """Outputs and cost are the last lines of the task's log (F2)."""
    view.append("attempt-ended", generation=1, attempt=1, outcome="succeeded", step=10, usage=[])
    view.append("succeeded", generation=1, outputs={"model": "file:///m"})
    bill = {"usd": 0.5, "wall_s": 60.0, "usd_split": {"compute": 0.4, "idle": 0.1}}
    view.store.write(f"{PREFIX}/result.json", json.dumps({"report": {"bill": bill}}).encode())

    view.execute(goes_on=False)

    assert view.execution[-3:] == [
        "attempt 1 succeeded at step 10",
        "the stage succeeded; output model: file:///m",
        "cost: total $0.50 in 1 min (compute $0.40, idle $0.10)",
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"schema":"2.0","shown":[1],"kept":{"g1-a1-n0":"x"}}',
        b'{"schema":"2.0","event":"many"}',
        b'{"schema":"2.0","shown":{"g1-a1-n0":[1]}}',
        b'{"schema":"9.0","event":7}',
    ],
)
def test_a_position_that_cannot_be_read_begins_again(view, text):
    """Repeated lines do no harm; a stage that fails because of its log does (F1)."""
    view.store.write(f"{PREFIX}/lease/log.json", text)

    assert read_task_log(Run(view.store, PREFIX)) == TaskLog()
    Run(view.store, PREFIX).write(TASK_LOG, TaskLog({"g1-a1-n0": (2, 5)}, {}, "host", 3).to_json())
    assert read_task_log(Run(view.store, PREFIX)) == TaskLog({"g1-a1-n0": (2, 5)}, {}, "host", 3)
