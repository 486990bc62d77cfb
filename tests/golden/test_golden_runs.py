"""Ten recorded runs: their bytes, their fold, what the owner does next, and the messages."""

import json

import pytest
from golden.files import REVIEW, json_text, stored
from golden.runs import RUNS, golden_files
from golden.traces import bytes_of, fields_of, narration, read_events, trace

from envscaler_airflow.run import Event
from envscaler_airflow.run.event_bodies import BODIES, read_body


def recorded(name):
    """Events of the run *name* as JSON."""
    return json.loads(stored(f"runs/{name}/events.json"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_leaves_the_events_that_were_frozen(name, tmp_path):
    """The owner decides, records and bills as before."""
    for path, text in golden_files(name, tmp_path / "run").items():
        assert text == stored(path), f"{path}: {REVIEW}"


@pytest.mark.parametrize("name", RUNS)
def test_an_event_that_is_read_is_written_byte_for_byte(name):
    """The order of fields and the form of numbers too."""
    for event in recorded(name):
        text = bytes_of(event)

        assert Event.from_json(text, where=name).to_json() == text


@pytest.mark.parametrize("name", RUNS)
def test_the_typed_body_of_an_event_holds_all_of_it(name):
    """Every field unchanged, in the same order."""
    for event in recorded(name):
        body = fields_of(read_body(event["type"], event["body"]))

        assert json_text(body, sort_keys=False) == json_text(event["body"], sort_keys=False)


@pytest.mark.parametrize("name", RUNS)
def test_events_fold_to_the_state_and_the_next_actions_that_were_frozen(name):
    """After each event, with each of the facts that an owner may have."""
    assert json_text(trace(name)) == stored(f"runs/{name}/trace.json"), REVIEW


@pytest.mark.parametrize("name", RUNS)
def test_the_narration_of_a_run_is_as_it_was_frozen(name):
    """A line for each event, and the bill."""
    assert narration(name) == stored(f"runs/{name}/narration.txt"), REVIEW


def test_every_type_of_event_is_in_a_recorded_run():
    """A new type needs a run that shows it."""
    seen = {event.type for name in RUNS for event in read_events(name)}

    assert seen == BODIES.keys()
