"""Unit tests of a run in its store: what each part says, and what it refuses."""

from __future__ import annotations

import json

import pytest

from envscaler_agent.messages import SCHEMA
from envscaler_agent.protocol import Control, Progress, Status, claim_name, status_name
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run.event_bodies import NewGeneration
from envscaler_airflow.store import EventLog, Lease, Run, RunKey, open_store
from envscaler_airflow.store.run import spec_name

KEY = RunKey("d", "dag", "run", "train")
SPEC = {"version": "v1", "name": "train", "entrypoint": ["python", "train.py"], "parameters": {"rate": 0.1}}


@pytest.fixture
def store(tmp_path):
    """An empty store in a folder."""
    return open_store(f"file://{tmp_path}")


@pytest.fixture
def run(store):
    """A run of which only the key is known."""
    return Run(store, KEY)


def test_opening_a_run_reads_and_writes_nothing(run, tmp_path):
    """Its folder does not exist yet."""
    assert (run.prefix, run.events.load().number, run.lease.read()) == (KEY.prefix, 0, None)
    assert list(tmp_path.iterdir()) == []


def test_names_are_relative_to_the_folder_and_cannot_leave_it(run, store):
    """A run is a store of its own."""
    run.write("plan.json", b"{}")

    assert store.read(f"{KEY.prefix}/plan.json") == b"{}"
    assert run.url == store.uri(KEY.prefix)
    with pytest.raises(ProtocolError):
        run.read("../-2/plan.json")


def test_the_key_is_the_given_one_else_that_of_the_folder(run, store):
    """A folder that contains the key of another run has none."""
    assert run.key() == KEY
    other = Run(store, "d/dag/run/train/7")
    body = json.dumps({"schema": SCHEMA, "key": KEY.to_dict()}).encode()
    run.write("run.json", body)
    other.write("run.json", body)

    assert Run(store, KEY.prefix).key() == KEY
    with pytest.raises(ProtocolError, match="is the key of d/dag/run/train/-1"):
        other.key()


def test_events_keep_their_fold_between_two_loads(run, store):
    """The second load reads only what was appended since, also by another writer."""
    first = EventLog(Run(store, KEY)).append(0, NewGeneration(generation=1, reason="r", spec_hash="a"))

    assert run.events.load().number == first.number == 1
    assert run.events.load() is not None
    assert run.events.load().spec_hash == "a"


def test_events_get_the_time_of_the_run(store):
    """The owner's clock, where it is not the store's."""
    run = Run(store, KEY, clock=lambda: 7.5)

    event = run.events.append(0, NewGeneration(generation=1, reason="r", spec_hash="a"))

    assert (run.now(), event.at) == (7.5, 7.5)


@pytest.mark.parametrize("text", [None, b"[1]", b"{"])
def test_a_spec_that_is_absent_or_torn_names_its_file(run, text):
    """Nothing runs on half a spec; its parameters are only for display."""
    if text is not None:
        run.write(spec_name("abc"), text)

    with pytest.raises(ProtocolError, match=r"d/dag/run/train/-1/spec-abc\.json"):
        run.spec("abc")
    assert run.parameters("abc") == {}


def test_a_spec_is_read_once_and_without_what_was_added_to_it(run):
    """The name of the archive is not a field of specs."""
    document = {**SPEC, "workdir_archive": "workdir-1.tar.zst"}
    run.write(spec_name("abc"), json.dumps(document).encode())

    found = run.spec("abc")
    run.delete(spec_name("abc"))

    assert found == EnvSpec.from_dict(SPEC)
    assert run.spec("abc") is found


def test_only_the_newest_claim_reports_and_only_what_can_be_true(run):
    """A negative time is unknown; the report of the replaced pod stays readable under its claim."""
    for claim in (1, 2):
        run.write(claim_name(1, 3, 0, claim), b"{}")
        status = Status(sequence=claim, progress=Progress(step=10 * claim, elapsed_s=-1.0))
        run.write(status_name(1, 3, 0, claim), status.to_json())

    newest = run.status((1, 3))

    assert (newest.claim, newest.progress.step, newest.progress.elapsed_s) == (2, 20, None)
    assert run.status_of_claim((1, 3), 1).progress.step == 10
    assert run.status((1, 3), node=1) is None


def test_a_control_is_read_as_it_was_written(run):
    """None before the owner asks anything of the attempt."""
    assert run.control((1, 1)) is None

    run.write_control((1, 1), Control(sequence=4, action="drain"))

    assert run.control((1, 1)) == Control(sequence=4, action="drain")


def test_a_lease_that_cannot_be_read_counts_as_one_that_was_never_written(run):
    """Only the owner writes it: the next renewal replaces it."""
    run.write("lease/run.json", b"torn")

    assert run.lease.known() == Lease(0)
    assert run.lease.renew(holder="t") == Lease(1, "t")
    assert run.lease.read() == Lease(1, "t")
