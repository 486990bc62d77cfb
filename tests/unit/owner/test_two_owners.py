"""Two processes that both act as owner of a run, and one that hung: only the last owner acts."""

from __future__ import annotations

import json

import pytest

from envscaler_agent.protocol import Manifest, checkpoint_name
from envscaler_airflow.errors import CapacityError
from envscaler_airflow.owner import choose, freeze, start
from envscaler_airflow.owner import owner as owner_module
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import SupersededError, Waiting, Wake
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.run import Run


def test_the_spec_of_the_loser_of_a_race_is_never_run(world, monkeypatch):
    """Both find no run and write their spec; the generation that has the event runs on its own spec."""
    winner, text = world.owner(), world.spec_path.read_text()
    world.spec_path.write_text(text.replace("train.py", "other.py"))
    loser = world.owner()
    create = world.store.create

    def sleeps_before_its_event(name, data):
        if "/events/" in name:
            monkeypatch.undo()
            winner.enter()
        return create(name, data)

    monkeypatch.setattr(world.store, "create", sleeps_before_its_event)
    loser.enter()

    [attempt] = world.state.attempts
    assert attempt.spec_hash == world.state.spec_hash
    spec = Run(world.store, world.prefix).document(attempt.spec_hash)
    assert spec["entrypoint"] == ["python", "train.py"]


def test_a_spec_that_was_written_before_its_event_counts_for_nothing(world):
    """The worker died between the two: the retry continues with the spec that the events name."""
    world.owner().enter()
    world.spec_path.write_text(world.spec_path.read_text().replace("train.py", "other.py"))
    dying = world.owner(max_tries=9)
    frozen = freeze.freeze(dying.owned.stage.spec, world.store)
    freeze.write(dying.owned.run, frozen)
    retry = world.owner()
    retry.enter()

    assert retry.owned.spec(world.state).entrypoint == ("python", "train.py")


def test_an_intent_is_carried_out_with_the_spec_that_it_names(world, monkeypatch):
    """Its worker died before the start, then the spec was changed; after a clear the new spec counts (A2)."""
    named, submit = [], world.backend.submit
    world.backend.fail_next("submit", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.owner().enter()
    world.spec_path.write_text(world.spec_path.read_text().replace("train.py", "other.py"))
    monkeypatch.setattr(
        world.backend, "submit", lambda request: named.append(request.launch.command) or submit(request)
    )

    world.owner().enter()
    world.owner(max_tries=9).enter()
    asked = world.control()
    world.leave()
    world.owner(max_tries=9).enter()

    assert named == [("python", "train.py"), ("python", "other.py")]
    assert len({attempt.spec_hash for attempt in world.state.attempts}) == 2
    assert asked.action == "drain"


def test_a_zombie_writes_no_frozen_spec_back(world, monkeypatch):
    """It resumes with its intent after a clear brought another spec: no file of it changes (A2)."""
    first, found = world.owner(), {}
    check = OwnedRun.check_still_owner

    def slept(self, state):
        if state.live is None or self is not first.owned:
            return check(self, state)
        monkeypatch.undo()
        world.spec_path.write_text(world.spec_path.read_text().replace("train.py", "other.py"))
        world.owner(max_tries=9).enter()
        found.update(world.files())
        return check(self, state)

    monkeypatch.setattr(OwnedRun, "check_still_owner", slept)
    with pytest.raises(SupersededError):
        first.enter()

    assert world.files() == found


def test_an_owner_that_slept_before_its_start_starts_nothing(world, monkeypatch):
    """It resumes after another try took the run over, and its attempt ended."""
    first = world.owner()
    attempt_request = freeze.attempt_request

    def slept(*args, **kwargs):
        monkeypatch.undo()
        world.owner().enter()
        return attempt_request(*args, **kwargs)

    monkeypatch.setattr(freeze, "attempt_request", slept)
    with pytest.raises(SupersededError):
        first.enter()

    assert [method for method, _ in world.backend.calls].count("submit") == 1
    assert len(world.backend.live) == 1


def test_an_owner_that_slept_while_it_planned_writes_no_plan(world, monkeypatch):
    """The current owner's plan stays."""
    first, make_plan = world.owner(), choose.make_plan

    def slept(*args, **kwargs):
        monkeypatch.setattr(choose, "make_plan", make_plan)
        world.owner().enter()
        world.store.write(f"{world.prefix}/plan.json", b"{}")
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(choose, "make_plan", slept)
    with pytest.raises(SupersededError):
        first.enter()

    assert world.store.read(f"{world.prefix}/plan.json") == b"{}"


def test_an_owner_that_slept_before_its_last_word_overwrites_no_result(world, monkeypatch):
    """It had failed the run and hung; then the run was cleared and delivered."""
    first = world.owner()
    first.enter()
    request_stop(Run(world.store, world.prefix), reason="cancel", by="me")
    first.resume(Wake("request"))
    world.leave()
    report = json.dumps({"status": "succeeded"}).encode()
    write_result = owner_module._write_result

    def slept(owned, state):
        monkeypatch.undo()
        world.owner(max_tries=9).enter()
        world.store.write(f"{world.prefix}/result.json", report)
        return write_result(owned, state)

    monkeypatch.setattr(owner_module, "_write_result", slept)
    with pytest.raises(SupersededError):
        first.resume(Wake("status"))

    assert world.store.read(f"{world.prefix}/result.json") == report


def test_a_request_that_takes_the_number_of_the_end_costs_no_result(world, monkeypatch):
    """A request takes the event number of the end: the owner appends the end again, and then releases."""
    owner = world.owner()
    owner.enter()
    world.succeed()
    append = EventLog.append
    landed = []

    def late(self, after, body, **more):
        if isinstance(body, AttemptEnded) and not landed:
            landed.append(request_stop(Run(world.store, world.prefix), reason="late", by="me"))
        return append(self, after, body, **more)

    monkeypatch.setattr(EventLog, "append", late)
    got = owner.resume(Wake("status"))

    assert [attempt.outcome for attempt in world.state.attempts] == ["succeeded"]
    assert got.outputs == {"model": world.output}


def test_a_machine_whose_end_was_recorded_is_given_back_by_the_next_owner(world):
    """The worker died between the two; without the next owner its folder would remain for ever."""
    first = world.owner()
    first.enter()
    world.succeed()
    world.backend.fail_next("release", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        first.resume(Wake("status"))
    world.backend.calls.clear()

    world.owner().enter()

    assert [method for method, _ in world.backend.calls].count("release") == 1


def test_a_start_that_went_through_before_the_refusal_is_adopted(world):
    """The worker died after the submit; the next one gets "no capacity", and finds the running attempt."""
    world.backend.fail_next("submit", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        world.owner().enter()
    world.backend.fail_next("submit", CapacityError("full"))

    got = world.owner().enter()

    assert isinstance(got, Waiting)
    assert world.state.live.phase == "started"
    assert len(world.state.attempts) == 1


def test_a_store_inside_the_workdir_is_not_part_of_the_code(world):
    """Each run changes its store; a start with the same code resumes what runs and stops nothing."""
    world.spec_path.write_text(world.spec_path.read_text() + "workdir: .\n")
    world.owner().enter()
    world.say()

    world.owner(max_tries=7).enter()

    assert [event.type for event in world.log.read()][-1] == "owner"
    assert len({name for name in world.files() if "/workdir-" in name}) == 1


def test_an_owner_that_slept_after_its_intent_writes_nothing(world, monkeypatch):
    """Once another try took the run over, neither the lease nor a control belongs to it."""
    first, found = world.owner(), {}
    act = type(first)._act

    def slept(self, state, action):
        if action.kind != "carry-out":
            return act(self, state, action)
        monkeypatch.undo()
        world.owner().enter()
        found.update(world.files())
        return act(self, state, action)

    monkeypatch.setattr(type(first), "_act", slept)
    with pytest.raises(SupersededError):
        first.enter()

    assert world.files() == found


def test_an_owner_that_slept_over_its_list_takes_no_checkpoint_from_the_next(world, monkeypatch):
    """The newer owner promised one more checkpoint to the attempt that it started; that promise stays."""
    first = world.owner()
    first.enter()
    early = world.save(40)
    world.backend.lose(world.handle)
    first.resume(Wake("status"))
    list_candidates, late = start.list_candidates, checkpoint_name(1, 60, 1)

    def slept(store, **attempt):
        listed = list_candidates(store, **attempt)
        monkeypatch.undo()
        manifest = Manifest(step=60, generation=1, attempt=1)
        world.store.write(f"{world.prefix}/checkpoints/{late}/manifest-c1.json", manifest.to_json())
        world.owner().enter()
        return listed

    monkeypatch.setattr(start, "list_candidates", slept)
    with pytest.raises(SupersededError):
        first.resume(Wake("backoff"))

    assert world.control().candidates == (late, early)
