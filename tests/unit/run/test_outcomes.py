"""The table of outcomes: every name from a detector has its row, and every row decides what happens."""

import ast
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.run_events import SMALL, begun, ended, intended, life, run, started

from envscaler_agent import ending
from envscaler_agent.ending import EXIT_CODES
from envscaler_agent.protocol import END_REASONS, Ended, Status
from envscaler_airflow.backends.base import NodeEnd
from envscaler_airflow.backends.kubernetes import kubernetes_backend
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_changes import status_of
from envscaler_airflow.backends.kubernetes.job_snapshot import Seen
from envscaler_airflow.backends.local.node_main import tell_end
from envscaler_airflow.errors import CapacityError, NoOfferError, ProtocolError, SpecError
from envscaler_airflow.owner.report import failure_message
from envscaler_airflow.plugin.charts import kind_of
from envscaler_airflow.run import (
    OUTCOMES,
    Facts,
    NodeStatus,
    Observed,
    Outcome,
    end_of,
    next_action,
    outcome_of,
)
from envscaler_airflow.run.outcomes import KINDS, RECOVERIES, docs_tables
from tests.unit.backends.kubernetes import test_kubernetes_failures as cluster

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "outcomes.md"
OWNER_MADE = {
    "not-started": "run/outcomes.py",
    "stalled": "run/outcomes.py",
    "move": "owner/move.py",
    "spec-changed": "run/steps.py",
    "stop": "run/steps.py",
    "timeout": "run/steps.py",
    "budget": "run/steps.py",
    "spec": "owner/start.py",
    "no-offer": "owner/start.py",
    "backend": "owner/start.py",
    "start": "cli/shell_owner.py",
}
"""Rows that no wrapper and no backend reports, and where the owner creates each."""
ENDS = [name for name, row in OUTCOMES.items() if row.kind == "end"]
NODES = [name for name, row in OUTCOMES.items() if row.kind == "node"]


def told_by_the_wrapper():
    """The outcomes of ``agent.ending`` for a command."""
    lines = ("torch.OutOfMemoryError: CUDA out of memory", "OSError: No space left on device", "MemoryError")
    codes = [ending.End(code) for code in (0, 1, 127, -9, -11)]
    asked = [ending.End(1, asked=asked, session_drained=True) for asked in ("drained", "stopped", "orphaned")]
    told = {ending.tell_end(end, [line])[0].reason for end in (*codes, *asked) for line in ("", *lines)}
    return told | {ending.tell_end(ending.End(-9, oom_kills=1), [])[0].reason}


def told_by_the_local_backend():
    """The outcomes that the local backend derives from a node's state."""
    codes = (0, 1, *EXIT_CODES.values(), -9, -15, None)
    said = (None, *(Ended(reason=reason) for reason in END_REASONS))
    mains = (None, *((r, "") for r in ("killed", "orphaned", "setup-failed", "deadline-exceeded")))
    cases = itertools.product(codes, said, (None, 0, 1), mains)
    return {tell_end(code, said=word, oom_kills=kills, ended_by=by).reason for code, word, kills, by in cases}


def told_by_kubernetes():
    """The outcomes that the Kubernetes backend derives from its tests' objects, at once and an hour later."""
    bodies = [body for body, _ in (*cluster.ENDS.values(), *cluster.WAITS.values())]
    bodies.append(cluster.pod(phase="Pending", node=None, conditions=[cluster.unscheduled(VOLUME)]))
    told = [("FailedCreate", 'forbidden: exceeded quota: "q"'), ("FailedCreate", "violates PodSecurity")]
    events = [{"reason": reason, "message": words, "firstTimestamp": cluster.AT} for reason, words in told]
    over = cluster.when("Failed", "DeadlineExceeded")
    stops = [{"grace_s": 0, "unmet": "words", "unmet_kind": kind} for kind in ("capacity", "placement")]
    jobs = [cluster.job(), cluster.job(over), cluster.job(queue="team", suspend=True)]
    jobs += [cluster.job(over, stop=stop) for stop in ({"grace_s": 0}, {"grace_s": 30}, *stops)]
    views = [
        Seen(cluster.job(), (body,), server_time=cluster.NOW + age) for body in bodies for age in (0, 3600)
    ]
    views += [Seen(job, server_time=cluster.NOW) for job in jobs]
    views += [Seen(cluster.job(), events=(event,), server_time=cluster.NOW) for event in events]
    views += [Seen(None), cluster.overdue(600)]
    broken = Seen(cluster.job(over), (cluster.ENDS["application error"][0],))
    running = Seen(cluster.job(), (cluster.pod(main={"running": {}}),))
    mixed = [(Part("ns", "a", "u", 1), running), (Part("ns", "b", "v", 1, first=1), broken)]
    found = [status_of([(Part("ns", "a", "u", 1), view)]) for view in views]
    ends = {cluster.end_of(body).reason for body, _ in cluster.ENDS.values()}
    starting = {"starting"}  # reported as the state, with no reason
    return ends | starting | {node.reason for one in (*found, status_of(mixed)) for node in one.nodes} - {""}


VOLUME = "2 node(s) had volume node affinity conflict. not found"


def test_every_name_that_a_detector_gives_has_a_row():
    """Otherwise the owner has no recovery for it and treats it as a plain failure."""
    told = told_by_the_wrapper() | told_by_the_local_backend() | told_by_kubernetes() | {*END_REASONS}

    assert told - {*OUTCOMES} == set()


def test_every_row_is_reached_by_a_detector_or_made_by_the_owner():
    """No outcome exists only in the docs, and none is created in two ways."""
    told = told_by_the_wrapper() | told_by_the_local_backend() | told_by_kubernetes()

    assert sorted([*told, *OWNER_MADE]) == sorted(OUTCOMES)


@pytest.mark.parametrize(("name", "file"), OWNER_MADE.items())
def test_what_the_owner_makes_is_made_where_this_test_says(name, file):
    """By its literal name."""
    tree = ast.parse((ROOT / "envscaler_airflow" / file).read_text())

    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert found.count(name) > (file == "run/outcomes.py")  # the table has each name once


def test_the_wrapper_may_report_only_ends():
    """Every outcome with its own exit code is one of them."""
    assert {outcome_of(name).kind for name in END_REASONS} == {"end"}
    assert {*EXIT_CODES} <= {*END_REASONS}


def test_a_backend_refuses_an_end_without_a_row():
    """The constructor raises, so the first test of a detector finds an outcome without a recovery."""
    with pytest.raises(ValueError, match="reason must be a row of OUTCOMES, got 'melted'"):
        NodeEnd(1, None, "melted")


def test_each_end_of_a_node_has_its_own_place_among_the_causes():
    """With equal severity the order of the nodes would decide; the page lists them in this order."""
    severities = [row.severity for row in OUTCOMES.values() if row.severity]

    assert severities == sorted(set(severities), reverse=True)
    assert {row.name for row in OUTCOMES.values() if row.kind == "end" and not row.severity} == {"stalled"}


def test_every_word_of_the_table_is_in_use():
    """Kinds and recoveries in the docs are those of the rows."""
    assert {row.kind for row in OUTCOMES.values()} == {*KINDS}
    assert {row.recovery for row in OUTCOMES.values()} == {*RECOVERIES}


def test_the_docs_page_is_made_from_the_table():
    """If this fails, copy the output of ``docs_tables()`` to the end of the page."""
    assert PAGE.read_text().endswith("\n\n" + docs_tables())


def test_the_page_of_kubernetes_names_outcomes_of_the_table():
    """Every reason in its rows."""
    page = PAGE.with_name("failures.md").read_text()
    reasons = [line.split("|")[-2] for line in page.splitlines() if line.startswith("|")]
    named = {name for cell in reasons for name in re.findall(r"`([a-z]+(?:-[a-z]+)*)`", cell)}

    assert named - {*OUTCOMES} == set()


TODAY = {
    "out-of-memory", "cuda-out-of-memory", "disk-full", "not-found", "setup-failed", "failed",
    "deadline-exceeded", "not-started", "lost", "stalled", "killed", "orphaned", "stopped", "drained",
    "succeeded", "scheduling", "gated", "queue", "quota", "pulling", "volume", "config", "starting",
    "capacity", "placement", "image", "refused", "silent", "unneeded", "move", "spec-changed", "stop",
    "timeout", "budget", "spec", "no-offer", "start", "backend", "peer-lost",
}  # fmt: skip
LOOKED_UP = {
    "is_disruption": {"lost", "killed", "peer-lost"},
    "is_final": {"stop", "timeout", "budget", "image", "refused", "spec", "no-offer", "start"},
    "never_starts": {"capacity", "placement", "image", "refused"},
    "is_orderly": {"succeeded", "drained", "stopped", "orphaned", "move", "spec-changed", "stop"},
    "node_decides": {"succeeded", "failed", "killed", "drained", "stopped"},
}
"""The current rows for which each is true; a later row may be added, but need not be."""


@pytest.mark.parametrize(("name", "rows"), LOOKED_UP.items())
def test_what_is_looked_up_holds_for_these_rows(name, rows):
    """Spot losses, outcomes that only a clear undoes, that are not waited for, or that may resume."""
    assert {row.name for row in OUTCOMES.values() if getattr(row, name)} & TODAY == rows


@pytest.mark.parametrize(
    ("recovery", "rows"),
    [
        ("resume", {"lost", "killed", "peer-lost", "orphaned", "stalled", "move", "spec-changed"}),
        ("fail-if-repeated", {"cuda-out-of-memory", "disk-full", "not-found", "setup-failed", "failed"}),
        ("next-offer", {"not-started", "capacity", "placement", "backend"}),
        ("as-requested", {"stopped", "drained"}),
        ("replace", {"silent", "unneeded"}),
    ],
)
def test_these_rows_call_for_this_recovery(recovery, rows):
    """A fault of the code is not repeated for long; the loss of its machine always is (feature C4)."""
    assert {row.name for row in OUTCOMES.values() if row.recovery == recovery} & TODAY == rows


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("capacity", CapacityError),
        ("placement", NoOfferError),
        ("image", SpecError),
        ("refused", SpecError),
    ],
)
def test_a_start_whose_pod_never_runs_raises_by_its_row(name, error):
    """Only a lack of capacity is recorded as one."""
    assert kubernetes_backend.error_of(outcome_of(name)) is error


def test_a_node_waits_for_the_next_pod_of_node_0_where_the_stage_is_not_to_blame():
    """The owner or the platform ended it; after any other end the other nodes fail too."""
    rows = map(outcome_of, END_REASONS)
    blameless = {row.name for row in rows if row.is_orderly or row.caused_by == "platform"}

    assert blameless & TODAY == {"drained", "stopped", "orphaned", "killed", "peer-lost", "succeeded"}


AT_ONCE = {"none": "succeed", "resume-if-funded": "fail"}
"""The effect of the first end of a run; after any other end an attempt follows."""


@pytest.mark.parametrize("name", ENDS)
def test_the_first_end_brings_what_its_row_says(name):
    """After a step, with memory to raise and no budget to continue."""
    facts = Facts(backoff_is_over=True, memory_limit_bytes=2**30, memory_cap_bytes=2**32)

    got = next_action(run(begun(), *life(name, step=9, checkpoint_step=8)), facts)

    recovery = OUTCOMES[name].recovery
    assert got.kind == AT_ONCE.get(recovery, "start")
    assert (got.memory_bytes is not None) == (recovery == "more-memory")
    assert (got.target is None) == (recovery in ("next-offer", *AT_ONCE))


@pytest.mark.parametrize("name", ENDS)
def test_only_the_code_s_own_errors_fail_at_their_second_time(name):
    """At the same step; a checkpoint in between does not change that."""
    facts = Facts(backoff_is_over=True, memory_limit_bytes=2**30, memory_cap_bytes=2**32)
    lives = [*life(name, step=9, checkpoint_step=8), *life(name, attempt=2, step=9, checkpoint_step=9)]

    got = next_action(run(begun(), *lives), facts)

    recovery = OUTCOMES[name].recovery
    assert got.kind == ("fail" if recovery == "fail-if-repeated" else AT_ONCE.get(recovery, "start"))


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_does_not_run_brings_what_its_row_says(name):
    """Wait, delete it and try the next offer, or fail the run, with the row's text."""
    live = run(begun(), intended(), started())

    got = next_action(live, Facts(observed=Observed((NodeStatus(0, "pending", reason=name, detail="d"),))))

    row = OUTCOMES[name]
    kinds = {"next-offer": ("kill", "capacity"), "fail": ("stop", name)}
    assert (got.kind, got.stop_reason) == kinds.get(row.recovery, ("wait", ""))
    assert got.reason == (f"{row.text}: d" if row.never_starts else "starts: d")


@pytest.mark.parametrize("why", [name for name, row in OUTCOMES.items() if row.kind == "stop"])
def test_an_attempt_that_the_owner_stopped_is_followed_as_the_row_says(why):
    """A final stop ends the run, with its own name; after any other the next attempt starts."""
    stopping = (
        "attempt-stopping",
        {"generation": 1, "attempt": 1, "stop_reason": why, "target": SMALL.to_dict()},
    )

    got = next_action(
        run(begun(), intended(), started(), stopping, ended("drained")), Facts(backoff_is_over=True)
    )

    expected = {"fail": ("fail", why), "stop": ("halt", "")}
    assert (got.kind, got.failure) == expected.get(OUTCOMES[why].recovery, ("start", ""))


def test_a_new_class_needs_its_row_and_its_detector_alone(monkeypatch):
    """One more row, and a backend that reports it: cause, recovery, text, color and docs follow."""
    row = Outcome("gpu-lost", 145, "platform", "resume", "a GPU fell off the bus")
    monkeypatch.setitem(OUTCOMES, row.name, row)
    nodes = [NodeEnd(1, None, "gpu-lost").of_node(0), NodeEnd(None, 9, "killed").of_node(1)]

    end = end_of(Observed(tuple(nodes)))
    state = run(begun(), *life(end.outcome, step=9, checkpoint_step=8))
    told = failure_message(replace(state, status="failed", reason="at its cap", failure=end.outcome))

    assert end.outcome == "gpu-lost"
    assert next_action(state, Facts(backoff_is_over=True)).kind == "start"
    assert told == "the stage failed: at its cap\ngpu-lost: a GPU fell off the bus"
    assert (row.is_disruption, kind_of("gpu-lost")) == (True, "bad")
    assert "| `gpu-lost` | a GPU fell off the bus | platform | the next attempt resumes" in docs_tables()


def test_a_name_of_a_newer_version_decides_nothing():
    """Its attempt is followed by the next, its node is waited for, its stop is not final."""
    row = outcome_of("melted")

    assert (row.is_final, row.never_starts, row.is_disruption, row.is_orderly) == (False,) * 4
    assert next_action(run(begun(), *life("melted")), Facts(backoff_is_over=True)).kind == "start"


def test_a_wrapper_that_reports_an_unknown_end_is_refused():
    """The wire has only the protocol's names, even if the owner's table has more."""
    with pytest.raises(ProtocolError, match="reason must be one of"):
        Status.from_json(b'{"schema": "2.0", "ended": {"reason": "lost"}}', where="status")


@pytest.mark.parametrize(("other", "outcome"), [("lost", "lost"), ("killed", "killed"), ("failed", "failed")])
def test_the_end_of_the_other_node_explains_that_a_peer_was_lost(other, outcome):
    """The node that went away names the outcome, not the one that noticed."""
    noticed = NodeStatus(0, "ended", 1, None, "peer-lost", "NCCL error")
    gone = NodeStatus(1, "lost") if other == "lost" else NodeStatus(1, "ended", 1, None, other)

    assert end_of(Observed((noticed, gone))).outcome == outcome


def test_a_peer_lost_before_the_first_step_fails_no_run():
    """A node that came too late, or went away at once, is not an error of the stage (feature C4)."""
    got = next_action(run(begun(), *life("peer-lost", step=None)), Facts(backoff_is_over=True))

    assert got.kind == "start"
