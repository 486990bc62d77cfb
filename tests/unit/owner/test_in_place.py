"""The owner changes a running attempt in place, or starts the next one; a worker dies at every step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_agent.protocol import Ended, control_name
from envscaler_airflow.backends.base import NodeStatus
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Delivered, StoppedError, Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend, ScriptedBackend

GIB = 2**30
SMALL = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
LARGE = replace(SMALL, instance_type="node:cpu-2", vcpus=2, memory_gib=8, usd_per_hour=2.0)
OTHER = replace(SMALL, instance_type="other:cpu-2", vcpus=2, memory_gib=8, usd_per_hour=2.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}, limits: {memory: 6Gi}}
num_nodes: 1..4
entrypoint: [python, train.py]
outputs: {model: /output/model}
checkpoint: {every: 10m}
distributed: {launcher: torchrun, elastic: true}
scaling: {policy: vertical, cooldown: 10s, stabilization: 1s}
"""


@pytest.fixture
def world(new_world):
    """A run that has not begun, on machines that can be resized."""
    return new_world((SMALL, LARGE, OTHER), spec=SPEC, backend=ElasticBackend)


def started(world, *, lives=None):
    """An owner with a running attempt on the smallest share."""
    owner = world.owner(lives=lives, value_of_hour=0.0)
    owner.enter()
    world.say(elapsed_s=60.0)
    return owner


def types(world):
    """Return the types of the events so far."""
    return [event.type for event in world.log.read()]


def test_more_memory_is_had_without_a_restart(world):
    """A share of 8 GiB under a limit of 6 GiB: 2 CPUs and 6 GiB, and the attempt keeps running."""
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))

    owner.resume(Wake("request"))

    live = world.state.live
    assert types(world)[-3:] == ["move-requested", "change-intended", "changed"]
    assert (live.number, live.allocation, live.change) == (1, Allocation(LARGE), None)
    assert world.backend.sizes[world.handle.name] == (2.0, 6 * GIB)
    assert (live.vcpus, live.memory_bytes) == (2.0, 6 * GIB)
    assert world.control().action == "run"


def test_the_next_attempt_keeps_what_was_changed(world, monkeypatch):
    """After a loss it requests 2 CPUs and 6 GiB at once, though the spec still has 1 and 1."""
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.say(step=70, checkpoint=world.save(70))
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    asked = []
    submit = world.backend.submit
    monkeypatch.setattr(world.backend, "submit", lambda request: asked.append(request) or submit(request))

    owner.resume(Wake("backoff"))

    [request] = asked
    assert request.allocation == Allocation(LARGE)
    resources = request.launch.resources
    assert (resources.requests.cpu, resources.requests.memory) == ("2000m", "6144Mi")
    assert resources.limits.memory == "6144Mi"


def test_memory_that_ran_out_is_raised_also_where_it_was_changed(world):
    """6 GiB in a share of 8 were too few: the next attempt has all 8, though the spec's limit is 6."""
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.say(step=70, checkpoint=world.save(70), ended=Ended(signal=9, reason="out-of-memory"))
    world.backend.end(world.handle, signal=9, reason="out-of-memory")
    owner.resume(Wake("status"))

    owner.resume(Wake("backoff"))

    assert (world.state.live.allocation, world.state.live.memory_bytes) == (Allocation(LARGE), 8 * GIB)


def test_a_larger_share_takes_no_memory_away_that_ran_out_before(new_world):
    """Raised to 9 GiB, beyond the spec's 6: four CPUs come with those 9, not with 6."""
    small = replace(LARGE, memory_gib=12)
    larger = replace(SMALL, instance_type="node:cpu-4", vcpus=4, memory_gib=16, usd_per_hour=4.0)
    world = new_world((small, larger), spec=SPEC, backend=ElasticBackend)
    owner = started(world)
    world.say(step=70, checkpoint=world.save(70), ended=Ended(signal=9, reason="out-of-memory"))
    world.backend.end(world.handle, signal=9, reason="out-of-memory")
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))
    world.say(step=80, elapsed_s=60.0)
    before = world.state.live.memory_bytes
    world.ask_move(target=Allocation(larger))

    owner.resume(Wake("request"))

    assert types(world)[-1] == "changed"
    assert (before, world.backend.sizes[world.handle.name]) == (9 * GIB, (4.0, 9 * GIB))


def test_each_hour_is_paid_at_its_own_price(world):
    """An hour at $1, changed in place, an hour at $2: $3. The report lists the steps of each period."""
    owner = started(world)
    world.say(step=100, elapsed_s=3600.0)
    world.clock.advance(3600)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.clock.advance(3600)
    world.succeed()

    got = owner.resume(Wake("status"))

    assert isinstance(got, Delivered)
    lines = got.report.bill.lines
    assert got.report.bill.usd == pytest.approx(3.0)
    assert [(line.usd, line.steps) for line in lines] == [
        (pytest.approx(1.0), 100),
        (pytest.approx(2.0), 900),
    ]
    assert world.state.attempts[0].end.usd == pytest.approx(3.0)


@pytest.mark.parametrize("answer", ["deferred", "infeasible"])
def test_what_the_node_has_no_room_for_is_left_to_the_next_attempt(world, answer):
    """The attempt saves and stops, and the next one has the requested size."""
    world.backend.answers = [answer]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))

    owner.resume(Wake("request"))
    asked = world.control()
    world.leave()
    owner.resume(Wake("status"))

    stopping = next(event for event in world.log.read() if event.type == "attempt-stopping")
    assert asked.action == "drain"
    assert stopping.body.reason.endswith(f"in place it is {answer}")
    assert (world.state.live.number, world.state.live.allocation) == (2, Allocation(LARGE))


def test_a_change_that_takes_long_is_awaited_and_then_left_to_the_next_attempt(world):
    """The watcher checks its progress; ten minutes later it becomes a move."""
    world.backend.answers = ["going"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    watch = world.watch(owner.resume(Wake("request")))
    quiet = watch.poll()
    world.clock.advance(600)
    wake = watch.poll()

    owner.resume(wake)

    assert (quiet, wake.kind) == (None, "overdue")
    assert world.state.live.phase == "stopping"
    assert world.state.live.target == Allocation(LARGE)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_is_asked_to_go_when_a_change_takes_too_long_has_its_own_time(world, is_stopped):
    """The ten minutes belonged to the change: the attempt is not killed before it can save."""
    world.backend.answers = ["going"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    watch = world.watch(owner.resume(Wake("request")))
    watch.poll()
    world.clock.advance(600)
    wake = watch.poll()
    if is_stopped:  # it came at the same moment
        request_stop(Run(world.store, world.prefix), reason="enough", by="t")

    waiting = owner.resume(wake)

    assert (wake.kind, world.state.live.stop_reason) == ("overdue", "stop" if is_stopped else "move")
    assert [node.state for node in world.backend.observe(world.handle).nodes] == ["running"]
    world.clock.advance(world.state.live.stop_grace_s)
    assert world.watch(waiting).poll() is None


def test_the_owner_is_woken_when_a_change_is_over(world):
    """The second answer of the machine is "done"."""
    world.backend.answers = ["going", "done"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    wake = world.watch(owner.resume(Wake("request"))).poll()

    owner.resume(wake)

    assert wake.detail == "the change in place is over"
    assert world.state.live.allocation == Allocation(LARGE)


def test_another_machine_is_no_change_in_place(world):
    """As large, but of another kind: the attempt must move there."""
    owner = started(world)
    world.ask_move(target=Allocation(OTHER))

    owner.resume(Wake("request"))

    assert types(world)[-1] == "move-accepted"
    assert world.backend.sizes == {}


def test_more_cpus_for_another_policy_are_a_restart(new_world):
    """The training chose its thread count at the start: only a restart uses more."""
    spec = SPEC.replace("policy: vertical", "policy: cost-to-finish")
    world = new_world((SMALL, LARGE), spec=spec, backend=ElasticBackend)
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))

    owner.resume(Wake("request"))

    assert types(world)[-1] == "move-accepted"


def test_a_backend_that_cannot_is_not_asked(new_world):
    """The same request where machines cannot be changed."""
    world = new_world((SMALL, LARGE), spec=SPEC, backend=ScriptedBackend)
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))

    owner.resume(Wake("request"))

    assert types(world)[-1] == "move-accepted"


def test_less_is_had_at_the_next_start_and_stops_nothing(world):
    """The vertical policy lowers: the attempt keeps running, and the one after a loss is smaller."""
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.say(step=20)
    world.ask_move(target=Allocation(SMALL))
    owner.resume(Wake("request"))
    running = world.state.live
    world.say(step=70, checkpoint=world.save(70))
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    assert types(world).count("move-deferred") == 1
    assert (running.allocation, running.next_allocation) == (Allocation(LARGE), Allocation(SMALL))
    assert (world.state.live.number, world.state.live.allocation) == (2, Allocation(SMALL))


def test_an_elastic_training_gets_nodes_while_it_runs(world):
    """Two more nodes join the same attempt, and its handle lists them from then on."""
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 3))

    owner.resume(Wake("request"))

    live = world.state.live
    assert (live.number, live.allocation, live.handle.details["nodes"]) == (1, Allocation(SMALL, 3), 3)
    assert len(world.backend.observe(world.handle).nodes) == 3


@pytest.mark.parametrize("checkpoint", [True, False])
def test_what_would_begin_anew_on_other_nodes_saves_and_is_moved(world, checkpoint):
    """On several nodes a Session that torchrun restarts would fall back to where the attempt began."""
    owner = started(world)
    world.say(step=500, elapsed_s=3600.0, save_s=0.0, checkpoint=world.save(400) if checkpoint else None)
    world.ask_move(target=Allocation(SMALL, 2))

    owner.resume(Wake("request"))

    assert types(world)[-1] == "move-accepted"
    assert world.control().action == "drain"
    assert len(world.backend.observe(world.handle).nodes) == 1


def test_nodes_that_do_not_come_leave_the_training_as_it_was(world):
    """No capacity for the second node: the attempt has one node again, without a restart."""
    world.backend.new_nodes = NodeStatus(0, "pending", reason="capacity", detail="0/3 nodes are free")
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 2))

    owner.resume(Wake("request"))

    undone = world.log.read()[-1]
    assert (undone.type, world.state.live.phase) == ("change-undone", "started")
    assert undone.body.reason.endswith("not available: 0/3 nodes are free")
    assert len(world.backend.observe(world.handle).nodes) == 1
    assert world.state.live.allocation == Allocation(SMALL)


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (CapacityError("full"), "change-undone"),
        (BackendError("no such verb", status=404), "attempt-stopping"),
    ],
)
def test_a_backend_that_refuses_more_nodes_is_believed(world, error, event):
    """Full now: nothing changes. Never possible: the next attempt gets them."""
    world.backend.fail_next("rescale", error)
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 2))

    owner.resume(Wake("request"))

    assert types(world)[-1] == event


@pytest.mark.parametrize("error", [CapacityError("full"), BackendError("gone", status=404)])
def test_a_change_that_cannot_be_undone_is_left_to_the_next_attempt(world, monkeypatch, error):
    """Neither the new nor the old size: the owner continues, and the attempt drains for the next one."""
    world.backend.new_nodes = NodeStatus(0, "pending", reason="capacity", detail="0/3 nodes are free")
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 2))
    rescale, asked = world.backend.rescale, []

    def fails_back(handle, nodes):
        asked.append(nodes)
        if nodes == 1:
            raise error
        return rescale(handle, nodes)

    monkeypatch.setattr(world.backend, "rescale", fails_back)

    owner.resume(Wake("request"))

    assert asked == [2, 1]
    assert (types(world)[-1], world.state.live.phase) == ("attempt-stopping", "stopping")


def test_new_nodes_are_awaited(world):
    """They start; the watcher checks all of them and wakes the owner when they run."""
    world.backend.new_nodes = NodeStatus(0, "starting")
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 2))
    waiting = owner.resume(Wake("request"))
    watch = world.watch(waiting)
    quiet = watch.poll()
    world.backend.set_state(world.handle, "running")

    wake = watch.poll()
    owner.resume(wake)

    assert (quiet, waiting.watching.nodes, wake.detail) == (None, 2, "the change in place is over")
    assert world.state.live.allocation == Allocation(SMALL, 2)


def test_a_stop_does_not_wait_for_a_change(world):
    """The user stops the run while the machine is being resized: the attempt saves and stops."""
    world.backend.answers = ["going"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")

    owner.resume(Wake("request"))

    live = world.state.live
    assert (live.phase, live.stop_reason, live.change) == ("stopping", "stop", None)


def test_nodes_that_were_on_their_way_at_a_stop_have_to_go_too(world):
    """Two nodes are starting when the user stops the run: it is over when they are, and no orphan is left."""
    world.backend.new_nodes = NodeStatus(0, "starting")
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 3))
    owner.resume(Wake("request"))
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    owner.resume(Wake("request"))
    world.backend.end(world.handle, node=0, exit_code=85, reason="drained")
    waiting = owner.resume(Wake("status"))
    before = world.state.live

    assert waiting.reason.startswith("waits for the attempt to go")
    assert before is not None
    world.backend.end(world.handle, exit_code=85, reason="drained")
    with pytest.raises(StoppedError):
        owner.resume(Wake("status"))
    assert (world.state.live, world.backend.live) == (None, [])


def test_a_move_that_is_asked_for_during_a_change_is_refused(world):
    """One action at a time."""
    world.backend.answers = ["going"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.ask_move(target=Allocation(OTHER))

    owner.resume(Wake("request"))

    refused = world.log.read()[-1]
    assert refused.type == "move-refused"
    assert refused.body.reason == "the attempt is being changed to scripted/node:cpu-2/on-demand"


def test_a_machine_that_is_lost_during_a_change_ends_the_attempt(world):
    """The next attempt begins with the resources before the change, since no one saw the change complete."""
    world.backend.answers = ["going"]
    owner = started(world)
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    world.say(step=70, checkpoint=world.save(70))
    world.backend.lose(world.handle)

    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    assert (world.state.live.number, world.state.live.allocation) == (2, Allocation(SMALL))


# -- a worker dies before and after every write and call


RESIZE_CALLS, RESCALE_CALLS, MIXED_CALLS = 20, 19, 27
"""Writes and calls of an undisturbed run of each kind; a test counts them."""
MIXED = Allocation(SMALL, 2, rest=replace(SMALL, capacity_type="spot", usd_per_hour=0.3), rest_nodes=1)


def _changed_once(target):
    """Request one change, and succeed when the attempt has it."""

    def script(world):
        live = world.state.live
        if live is None or live.handle is None or not world.backend.live:
            return
        if world.control().action != "run":
            world.leave()
        elif live.allocation != target and live.change is None:
            world.say(elapsed_s=60.0)
            if not world.state.pending:
                world.ask_move(target=target)
        elif live.allocation == target:
            world.succeed()

    return script


def _play(world, lives, script):
    """Play *script* with an owner that dies once, then with its successors; returns the delivery."""
    owner, wake = world.owner(lives=lives, value_of_hour=0.0), None
    for _ in range(60):
        try:
            result = owner.enter() if wake is None else owner.resume(wake)
        except world.killed:
            owner, wake = world.owner(value_of_hour=0.0), None
            continue
        finally:
            assert len(world.backend.live) <= 1
        if isinstance(result, Delivered):
            return result
        script(world)
        wake = world.watch(result).poll() or Wake("status")
    raise AssertionError("the run did not end")


def _checked(world, got, target):
    state = world.state
    names = {name for method, name in world.backend.calls if method == "submit"}
    assert got.outputs == {"model": world.output}
    assert (state.status, world.backend.live) == ("succeeded", [])
    assert state.attempts[-1].allocation == target
    assert len(names) == len(state.attempts)
    assert all(world.store.read(f"{world.prefix}/{control_name(1, a.number)}") for a in state.attempts)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, RESIZE_CALLS + 1))
def test_a_worker_that_dies_during_a_resize_leaves_a_run_that_goes_on(world, dies_at, after):
    """One attempt, changed in place, also when another worker finishes the change."""
    world.backend.answers = ["going", "done"]
    lives = {"calls": 0, "dies_at": dies_at, "after": after}

    got = _play(world, lives, _changed_once(Allocation(LARGE)))

    _checked(world, got, Allocation(LARGE))
    assert len(world.state.attempts) == 1
    assert types(world).count("changed") == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, RESCALE_CALLS + 1))
def test_a_worker_that_dies_during_a_rescale_leaves_a_run_that_goes_on(world, dies_at, after):
    """One attempt with three nodes in the end, never with four."""
    lives = {"calls": 0, "dies_at": dies_at, "after": after}

    got = _play(world, lives, _changed_once(Allocation(SMALL, 3)))

    _checked(world, got, Allocation(SMALL, 3))
    assert len(world.state.attempts) == 1
    assert len(world.backend._lives[world.state.attempts[0].handle.name].nodes) == 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, MIXED_CALLS + 1))
def test_a_worker_that_dies_during_a_mixed_start_leaves_a_run_that_goes_on(new_world, dies_at, after):
    """Both parts of the fleet belong to one attempt."""
    world = new_world((SMALL, MIXED.rest), spec=SPEC, backend=ElasticBackend)
    lives = {"calls": 0, "dies_at": dies_at, "after": after}

    got = _play(world, lives, _changed_once(MIXED))

    _checked(world, got, MIXED)


def test_the_deaths_above_cover_every_call(new_world, tmp_path):
    """The undisturbed runs make no more calls than the tests above have deaths for."""
    found = []
    for offers, target, answers in (
        ((SMALL, LARGE), Allocation(LARGE), ["going", "done"]),
        ((SMALL, LARGE), Allocation(SMALL, 3), ["done"]),
        ((SMALL, MIXED.rest), MIXED, ["done"]),
    ):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        world = type(new_world())(folder, offers=offers, spec=SPEC, backend=ElasticBackend)
        world.backend.answers = answers
        lives = {"calls": 0, "dies_at": -1, "after": False}
        _play(world, lives, _changed_once(target))
        found.append(lives["calls"])

    assert found == [RESIZE_CALLS, RESCALE_CALLS, MIXED_CALLS]


def test_a_change_in_place_is_a_move_to_the_policy(world):
    """Cool-down and count apply after it, and a change under way counts as the one action."""
    world.backend.answers = ["going", "done"]
    owner = started(world)
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        monotonic=world.clock.monotonic,
    )
    world.clock.advance(100)
    before = watcher.snapshot().check.observation
    world.ask_move(target=Allocation(LARGE))
    owner.resume(Wake("request"))
    during = watcher.snapshot().check.observation
    owner.resume(Wake("status"))
    first = watcher.snapshot().check.observation
    world.clock.advance(5)
    later = watcher.snapshot().check
    again = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        monotonic=world.clock.monotonic,
    )

    assert (before.moves, before.since_move_s) == (0, None)
    assert during.pending == "attempt 1 is being changed to scripted/node:cpu-2/on-demand"
    assert (first.moves, first.since_move_s) == (1, 0.0)
    assert later.observation.since_move_s == 5.0
    assert later.decision.reason.startswith("cool-down: 5 s of 10 s")
    assert again.snapshot().check.observation.moves == 1
