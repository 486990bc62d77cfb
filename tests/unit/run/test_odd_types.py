"""Files of a run with fields of wrong types: every reader raises one of our errors."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_agent.protocol import Control
from envscaler_airflow.errors import EnvScalerError, ProtocolError
from envscaler_airflow.owner import facts, limits
from envscaler_airflow.owner.report import failure_message, run_report
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Event, Facts, fold, next_action
from envscaler_airflow.run.event_bodies import BODIES, AttemptEnded, read_body
from envscaler_airflow.run.narration import describe
from envscaler_airflow.store import open_store
from envscaler_airflow.store.lease import LEASE
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ScriptedBackend
from envscaler_airflow.testing.scripted_backend import cpu_offer

PLACE = Allocation(cpu_offer(1), 2).to_dict()
OTHER = Allocation(cpu_offer(2), 2).to_dict()
ATTEMPT = {"generation": 1, "attempt": 1, "reason": "why"}
STOP = {"stop_reason": "move", "grace_s": 30.0, "align": "step", "request": 4, "target": OTHER}
HANDLE = {"backend": "scripted", "name": "x", "details": {"created": "2026-01-02T00:00:00Z"}}
ENDED = {
    "outcome": "failed", "detail": "d", "exit_code": 1, "signal": None, "last_lines": ["a"],
    "start_step": 0, "step": 7, "checkpoint": "c", "checkpoint_step": 5, "missing_nodes": [1],
    "refused": ["x"], "outputs": {"m": "u"}, "usage": [[0, 1.0, 2.0], [1, 1.0, None]], "usage_at": 2.0,
    "usd": 0.1, "setup_s": 1.0, "restore_s": 1.0, "checkpoint_s": 1.0, "checkpoints": 2,
    "restored_from": "r", "rejected": ["x"], "cpu_seconds": 1.0, "elapsed_s": 9.0, "first_step_s": 1.0,
    "save_s": 1.0, "total_steps": 10, "samples": 3, "repeated_samples": 1, "epoch": 1,
}  # fmt: skip
BEGUN = {
    "generation": 1, "spec_hash": "a", "reason": "r", "strategy": "cost", "restore_from": None,
    "budget_usd": 5.0, "deadline_s": 60.0,
}  # fmt: skip
INTENDED = {
    **ATTEMPT, "allocation": PLACE, "spec_hash": "a", "memory_bytes": 1 << 30, "vcpus": 1.0,
    "checkpoint_every_s": 60.0, "losses_per_hour": 0.1,
}  # fmt: skip
CHANGED = {
    **ATTEMPT, "kind": "resize", "target": OTHER, "handle": HANDLE, "step": 3, "vcpus": 2.0,
    "memory_bytes": 2 << 30,
}  # fmt: skip
HISTORY = [
    ("generation", BEGUN),
    ("attempt-intended", INTENDED),
    ("attempt-started", {**ATTEMPT, "handle": HANDLE}),
    ("move-requested", {"target": OTHER, "reason": "r", "numbers": {}, "from_attempt": [1, 1]}),
    ("change-intended", {**ATTEMPT, "request": 4, "kind": "resize", "target": OTHER, "numbers": {}}),
    ("changed", CHANGED),
    ("change-undone", {**ATTEMPT, "kind": "resize"}),
    ("move-deferred", {**ATTEMPT, "request": 4, "target": OTHER, "numbers": {}}),
    ("move-refused", {"request": 4, "reason": "r", "numbers": {}}),
    ("stop-requested", {"reason": "r", "by": "me", "stop_reason": "stop"}),
    ("attempt-stopping", {**ATTEMPT, **STOP}),
    ("move-accepted", {**ATTEMPT, **STOP, "numbers": {}}),
    ("attempt-ended", {**ATTEMPT, **ENDED}),
    ("release-failed", {**ATTEMPT, "detail": "503"}),
    ("attempt-released", {**ATTEMPT, "usage": [[0, 1.0, 9.0]], "usd": 0.2}),
    ("owner", {"reason": "r", "spec_hash": "a"}),
    ("failed", {"generation": 1, "reason": "r", "failure": "failed"}),
    ("stopped", {"generation": 1, "reason": "r"}),
    ("succeeded", {"generation": 1, "outputs": {"m": "u"}}),
    ("delivered", {"generation": 1}),
    ("accepted", {"generation": 1}),
    ("prune-intended", {"reason": "r"}),
]  # fmt: skip
ODD = [None, True, -1, 2**70, 0.5, 1e308, "", "x" * 5000, [], [[]], {}, {"a": {"b": None}}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def wholes():
    """The stored events of a run."""
    actor = {"ti_id": "t", "try_number": 1, "max_tries": 3, "life": "l"}
    return [
        {"schema": "2.0", "number": number, "type": kind, "writer": "w", "at": 7.5 * number, "actor": actor,
         "body": deepcopy(body)}
        for number, (kind, body) in enumerate(HISTORY, 1)
    ]  # fmt: skip


def paths(value, path=()):
    """Paths of all values in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [inner for key, item in items for inner in paths(item, (*path, key))]


def put(value, path, odd):
    """*odd* at *path* of *value*, in place."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = odd


def parsed(one):
    """As a reader of the store gets it."""
    return Event.from_json(json.dumps(one).encode(), where="e")


def read_all(events):
    """Everything that the owner, a watcher and a reader read of a run."""
    state = fold(events)
    backend = ScriptedBackend()
    run_report(state, now=1e9)
    failure_message(state)
    facts.spent_usd(state, backend, now=1e9)
    facts.move_pauses_s(state)
    limits.grace_s(state)
    next_action(state, Facts(backoff_is_over=True, budget_usd=1.0, spent_usd=0.5))
    for one in events:
        describe(one, state)


def try_out(known, index, path, odd):
    """Read the history *known* with *odd* at *path* of one event: it raises one of our errors, or none."""
    changed = wholes()[index]
    put(changed, path, odd)
    try:
        event = parsed(changed)
        read_all([*known[:index], event])
        read_all([*known[:index], event, *known[index + 1 :]])
    except EnvScalerError:
        return


def test_the_history_holds_every_event_that_there_is():
    """Every event is a class (A8)."""
    assert {kind for kind, _ in HISTORY} == BODIES.keys()
    read_all([parsed(one) for one in wholes()])


@pytest.mark.parametrize(("kind", "fields"), HISTORY, ids=[kind for kind, _ in HISTORY])
def test_an_event_is_read_as_it_was_written(kind, fields):
    """Through JSON, as an object of its class; what is written is what was read (A8)."""
    body = read_body(kind, fields)
    text = json.dumps(body.to_dict())

    assert type(body) is BODIES[kind]
    assert read_body(kind, json.loads(text)) == body
    known = body.__dataclass_fields__.keys()
    given = {name: value for name, value in fields.items() if name in known and value is not None}
    assert given.items() <= body.to_dict().items()


def test_an_event_of_a_newer_version_is_written_as_it_was_read():
    """It is kept, with all its fields (A8)."""
    body = read_body("invented-later", {"deep": {"er": [1, 2.5, None]}})

    assert body.to_dict() == {"type": "invented-later", "deep": {"er": [1, 2.5, None]}}


@pytest.mark.parametrize("index", range(len(HISTORY)), ids=[kind for kind, _ in HISTORY])
def test_an_event_with_an_odd_field_ends_nothing_but_its_reading(index):
    """Each field of each event in turn, of each odd type, before and after the rest of the run (A8)."""
    known = [parsed(one) for one in wholes()]
    for path in paths(wholes()[index]):
        for odd in ODD:
            try_out(known, index, path, odd)


@given(st.data(), JSON)
def test_an_event_with_any_json_in_it_ends_nothing_but_its_reading(data, odd):
    """In any position (A8)."""
    known = [parsed(one) for one in wholes()]
    index = data.draw(st.integers(0, len(known) - 1))

    try_out(known, index, data.draw(st.sampled_from(paths(wholes()[index]))), odd)


def test_an_error_names_the_field_and_what_was_there():
    """A person has to repair it (A8)."""
    events = wholes()
    events[12]["body"]["usage"][0][1] = "yesterday"

    with pytest.raises(
        ProtocolError, match=r"e: attempt-ended: usage\.0\.1: got 'yesterday', input should be"
    ):
        Event.from_json(json.dumps(events[12]).encode(), where="e")


def test_a_text_that_is_no_utf_8_is_written_and_read():
    """The name of a file may be any bytes, and Python shows one that is not UTF-8 as half a character."""
    body = AttemptEnded(generation=1, attempt=1, outcome="failed", detail="caf\udce9.bin is a pipe")
    text = Event(1, body).to_json()
    assert Event.from_json(text, where="x").body == replace(body, detail="caf?.bin is a pipe")


def test_no_event_is_written_that_could_not_be_read():
    """An unreadable log is permanent, a failed execution is not (A8)."""
    with pytest.raises(ProtocolError, match="attempt-ended: step"):
        Event(1, AttemptEnded(generation=1, attempt=1, outcome="drained", step=-1), "w", 1.0).to_json()


@given(st.data(), JSON)
def test_a_control_with_any_json_in_it_is_reported(data, odd):
    """The sidecar reads it every few seconds (A8)."""
    body = json.loads(Control(candidates=("g1-step-00000100-a1",), checkpoint_every_s=5.0).to_json())
    put(body, data.draw(st.sampled_from(paths(body))), odd)

    try:
        Control.from_json(json.dumps(body), where="c")
    except ProtocolError:
        return


@pytest.fixture(scope="module")
def leased(tmp_path_factory):
    """A store with a lease."""
    store = open_store(f"file://{tmp_path_factory.mktemp('lease')}")
    Run(store, "run").lease.renew(holder="h", waits="w", ages={"silent-g1-a1": 3.0})
    return store, json.loads(store.read(f"run/{LEASE}"))


def test_a_lease_with_odd_fields_is_told_and_begun_again(leased):
    """Each field, of each odd type, and numbers beyond the range of a float (A8)."""
    store, body = leased
    texts = []
    for path in paths(body):
        for odd in ODD:
            changed = deepcopy(body)
            put(changed, path, odd)
            texts.append(json.dumps(changed))
    texts += [
        json.dumps(body).replace('"counter": 1', f'"counter": {odd}') for odd in ("1e999", "NaN", "1.5")
    ]
    told = 0
    for text in texts:
        store.write(f"run/{LEASE}", text.encode())
        try:
            Run(store, "run").lease.read()
        except ProtocolError:
            told += 1
        renewed = Run(store, "run").lease.renew(holder="h")
        assert renewed == Run(store, "run").lease.read()

    assert told > len(ODD)
