"""What the training's side can write, and what that must never do to the owner."""

from __future__ import annotations

import json

import pytest

from envscaler_agent.protocol import Ended, Progress, Status, Transfer, status_name
from envscaler_airflow.errors import ProtocolError, RunFailedError
from envscaler_airflow.owner import request
from envscaler_airflow.owner.owned_run import LINES_BYTES, shortened
from envscaler_airflow.owner.stage import Delivered, Waiting, Wake
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.store.run import Run, believable


def write_status(world, text):
    """Write *text*, which may be anything, as the status of node 0 of the running attempt."""
    live = world.state.live
    world.store.write(f"{world.prefix}/{status_name(live.generation, live.number, 0)}", text)


@pytest.mark.parametrize(
    "field",
    [
        '"progress":{"step":-1}',
        '"progress":{"step":9223372036854775807,"total_steps":-5}',
        '"progress":{"elapsed_s":-1e308,"first_step_s":1e308},"setup_s":1e308',
        '"progress":{"elapsed_s":5e15,"save_s":1e15,"total_steps":9007199254740992}',
        '"start_step":-7',
        '"last_checkpoint_step":-1,"last_checkpoint":"nonsense"',
        '"usage":{"gpu0_utilization_percent":-1e300}',
    ],
)
def test_numbers_that_cannot_be_true_are_unknown_and_the_run_is_delivered(world, field):
    """Bill, report and decision use what remains."""
    owner = world.owner()
    owner.enter()
    head = '{"schema":"2.0","sequence":1,"phase":"ended","ended":{"exit_code":0,"reason":"succeeded"}'
    write_status(world, f"{head},{field}}}".encode())
    request = world.ask_move()
    judged = owner.resume(Wake("request"))
    world.backend.end(world.handle)

    got = owner.resume(Wake("status"))

    assert isinstance(judged, Waiting)
    assert request.number < world.state.number
    assert isinstance(got, Delivered)


@pytest.mark.parametrize(
    "text",
    [
        b'{"schema":"2.0","progress":{"loss":1e999}}',
        b'{"schema":"2.0","setup_s":1' + b"0" * 400 + b"}",
        b'{"schema":"2.0","progress":{"step":1' + b"0" * 400 + b"}}",
        b'{"schema":"2.0","usage":{"a":1e999}}',
        b'{"schema":"2.0","progress":' + b"[" * 100_000,
        b'{"schema":"2.0","message":"' + b"x" * (1 << 20) + b'"}',
        b"\xff\xfe",
        b"",
    ],
)
def test_a_status_that_is_no_status_is_no_news(world, text):
    """It is neither read nor raised: the watch continues."""
    waiting = world.owner().enter()
    write_status(world, text)

    assert Run(world.store, world.prefix).status((1, 1)) is None
    assert world.watch(waiting).poll() is None


@pytest.mark.parametrize("letter", ["x", "é", "水", "😀", "\x1b", "\n"])
def test_last_lines_in_any_script_fit_into_the_event_of_the_end(world, letter):
    """100 lines of 2,000 characters are up to 2.4 MB of JSON; the newest of them are kept."""
    owner = world.owner()
    owner.enter()
    lines = tuple(f"{number} " + letter * 400 for number in range(99))
    world.say(ended=Ended(exit_code=1, reason="failed", detail=letter * 9000, last_lines=lines), step=0)
    world.backend.end(world.handle, exit_code=1, reason="failed")

    with pytest.raises(RunFailedError, match="98 "):
        owner.resume(Wake("status"))

    assert world.state.status == "failed"


def test_an_exit_code_that_no_process_has_is_unknown_and_the_end_is_recorded(world):
    """An end that cannot be written would never be recorded."""
    owner = world.owner()
    owner.enter()
    ended = '"ended":{"exit_code":4611686018427387904,"signal":-5,"reason":"failed","detail":"d"}'
    write_status(world, f'{{"schema":"2.0","sequence":1,"phase":"ended",{ended}}}'.encode())
    world.backend.end(world.handle, exit_code=1, reason="failed")

    with pytest.raises(RunFailedError):
        owner.resume(Wake("status"))

    end = world.state.attempts[0].end
    assert (end.exit_code, end.signal, end.detail) == (None, None, "d")


def test_one_line_that_is_too_long_alone_is_cut():
    """Its beginning tells more than nothing."""
    ended = AttemptEnded(generation=1, attempt=1, outcome="failed", last_lines=("😀" * 100_000,))

    (line,) = shortened(ended).last_lines

    assert line.startswith("😀" * 1000)
    assert len(json.dumps(line)) <= LINES_BYTES


@pytest.mark.parametrize(
    ("done", "total", "is_shown"),
    [(3, 8, True), (8, 8, True), (9, 8, False), (-1, 8, False), (1, -8, False), (1, 2**60, False)],
)
def test_bytes_that_no_transfer_can_have_are_unknown(world, done, total, is_shown):
    """More than there are, less than zero, more than any disk has; the rest of the status counts (F6)."""
    waiting = world.owner().enter()
    moving = Transfer("uploading", "checkpoint 440", done, total)
    write_status(world, Status(generation=1, attempt=1, phase="running", transfer=moving).to_json())

    status = Run(world.store, world.prefix).status((1, 1))

    assert (status.phase, status.transfer) == ("running", moving if is_shown else None)
    assert world.watch(waiting).poll() is None


def test_what_is_believable_stays_as_it_is():
    """A loss may be negative; zero is a number."""
    said = Status(
        progress=Progress(step=0, loss=-3.5, accuracy=-1.0), start_step=0, usage={"cpu_percent": 0.0}
    )

    assert believable(said) == said


def test_the_uri_of_an_output_is_the_owners_and_never_what_a_node_says(world):
    """Neither a file on the next stage's machine nor a name that the spec does not declare."""
    owner = world.owner()
    owner.enter()
    outputs = {"model": "file:///etc", "other": "file:///root"}
    world.say(ended=Ended(exit_code=0, reason="succeeded"), outputs=outputs)
    world.backend.end(world.handle)

    got = owner.resume(Wake("status"))

    assert got.outputs == {"model": world.output}


def test_a_checkpoint_whose_manifest_is_a_link_is_none_and_the_next_attempt_starts(world, tmp_path):
    """A training that can reach the store can put anything into its own prefix."""
    owner = world.owner()
    owner.enter()
    good = world.save(10)
    folder = tmp_path / "store" / world.prefix / "checkpoints" / "g1-step-00000020-a1"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    (folder / "manifest-c1.json").symlink_to("/etc/passwd")
    world.backend.lose(world.handle)

    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    assert world.control().candidates == (good,)


def test_requests_to_move_have_a_bound_and_requests_to_stop_have_none(world, monkeypatch):
    """Any observer may append them, and each reader of the run folds all (B1)."""
    world.owner().enter()
    run = Run(world.store, world.prefix)
    monkeypatch.setattr(request, "MOST_EVENTS", run.events.load().number + 1)
    world.ask_move()

    with pytest.raises(ProtocolError, match="is not moved again"):
        world.ask_move()

    assert request.request_stop(run, reason="enough", by="a user").number > request.MOST_EVENTS
