"""The owner lists what the next attempt may resume from after it fenced off the older one."""

from dataclasses import replace

from envscaler_agent.protocol import Control, Manifest, checkpoint_name
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.store.run import Run


def _saved_by(world, attempt, step):
    name = checkpoint_name(1, step, attempt)
    manifest = Manifest(step=step, generation=1, attempt=attempt)
    world.store.write(f"{world.prefix}/checkpoints/{name}/manifest-c1.json", manifest.to_json())
    return name


def test_the_older_attempt_is_held_before_its_checkpoints_are_listed(world, monkeypatch):
    """What it completes until it sees the fence is promised; the intent carries no list (A5)."""
    controller = world.owner()
    controller.enter()
    early = world.save(40)
    create, seen = world.store.create, []

    def slow_create(name, data):
        done = create(name, data)
        if name.endswith("control/g1-a2.json"):
            seen.append((Control.from_json(data, where="t").action, _saved_by(world, 1, 60)))
        return done

    monkeypatch.setattr(world.store, "create", slow_create)
    world.backend.lose(world.handle)
    controller.resume(Wake("status"))
    controller.resume(Wake("backoff"))

    [(action, late)] = seen
    assert (action, world.control().action) == ("hold", "run")
    assert world.control().candidates == (late, early)
    intended = [event for event in world.log.read() if event.type == "attempt-intended"]
    assert all(b"candidates" not in event.to_json() for event in intended)


def test_a_request_to_stop_leaves_what_the_attempt_may_begin_from(world):
    """A pod that is recreated while the others save reads it there (A5)."""
    owner = world.owner()
    owner.owned.stage = replace(owner.owned.stage, restore_from="s3://bucket/base")
    owner.enter()
    early = world.save(40)
    world.say(checkpoint=early)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))
    world.say(step=50)
    request_stop(Run(world.store, world.prefix), reason="cancelled", by="me")

    owner.resume(Wake("request"))

    control = world.control()
    assert (control.action, control.candidates, control.restore_from) == (
        "drain",
        (early,),
        "s3://bucket/base",
    )


def test_an_execution_that_follows_lists_anew_until_the_attempt_is_started(world, monkeypatch):
    """The worker dies before it records the start; by then the older attempt had completed more (A5)."""
    controller = world.owner()
    controller.enter()
    world.save(40)
    world.backend.lose(world.handle)
    controller.resume(Wake("status"))
    submit = world.backend.submit

    def die(request):
        submit(request)
        raise world.killed

    monkeypatch.setattr(world.backend, "submit", die)
    try:
        controller.resume(Wake("backoff"))
    except world.killed:
        monkeypatch.undo()
    late = _saved_by(world, 1, 60)

    controller.resume(Wake("entry"))

    assert world.state.live.phase == "started"
    assert world.control().candidates[0] == late
