"""Capacity that is unavailable now, for ever, or not yet; and how long machines may take to stop."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from envscaler_agent.ending import Ask, due_signal
from envscaler_agent.ending import Facts as AgentFacts
from envscaler_agent.protocol import Ended, Progress, Status
from envscaler_airflow.errors import BudgetError, RunFailedError
from envscaler_airflow.owner import choose, limits, start
from envscaler_airflow.owner.request import kill_quietly, request_stop
from envscaler_airflow.owner.stage import Stage, Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import RunState
from envscaler_airflow.store.availability import stockouts
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

GPU = Offer(
    "kubernetes", "r", "node:gpu-1", "on-demand", vcpus=8, memory_gib=32, gpu_name="T4", gpus=1,
    gpu_memory_gb=16, usd_per_hour=1.0,
)  # fmt: skip
SPOT = replace(GPU, capacity_type="spot", usd_per_hour=0.3)
FULL = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu"
SPEC = """\
version: v1
name: train
resources: {requests: {gpu: {count: 1}}}
num_nodes: 2
entrypoint: [python, train.py]
checkpoint: {every: 10m}
"""


@pytest.fixture
def world(new_world):
    """A run of two nodes that has not begun, on spot and on demand."""
    return new_world((GPU, SPOT), spec=SPEC, backend=ElasticBackend)


def never_came(world, *nodes):
    """Let the cluster have no capacity for these nodes, so that the backend withdraws them."""
    for node in nodes:
        world.backend.set_state(world.handle, "pending", node=node, reason="capacity", detail=FULL)


def test_nodes_that_do_not_come_lead_to_the_next_offer_and_are_remembered(world):
    """No spot capacity: the owner releases the machine, tells other runs, tries on-demand (feature B6)."""
    owner = world.owner()
    waiting = owner.enter()
    first = world.state.live.allocation
    never_came(world, 0, 1)
    wake = world.watch(waiting).poll()
    owner.resume(wake)
    for node in range(2):
        world.backend._lives[world.handle.name].nodes[node] = replace(
            world.backend.observe(world.handle).nodes[node], state="ended", reason="capacity", detail=FULL
        )
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    ended = world.state.attempts[0].ended
    [known] = stockouts(world.store, now=world.clock.time())
    assert first.offer == SPOT
    assert (ended.outcome, ended.refused) == ("not-started", (SPOT.name,))
    assert known.excludes(SPOT, world.clock.time()) is not None
    assert known.excludes(GPU, world.clock.time()) is None
    assert world.state.live.allocation == Allocation(GPU, 2)


def test_of_a_fleet_only_the_part_that_did_not_come_is_passed_over(world):
    """Node 1 was requested on spot: on-demand is still available."""
    fleet = Allocation(GPU, 2, rest=SPOT, rest_nodes=1)
    world.owner().enter()
    live = replace(world.state.live, allocation=fleet)

    assert choose.refused_by(live, (1,)) == (SPOT,)
    assert choose.refused_by(live, ()) == (GPU, SPOT)


def test_what_was_had_is_no_longer_sold_out(world):
    """An attempt that ran and was lost shows that its offer is available."""
    owner = world.owner()
    owner.enter()
    choose_now = world.clock.time()
    start.remember_refused(owner.owned, [SPOT], FULL)
    before = len(stockouts(world.store, now=choose_now))
    world.say()
    world.backend.lose(world.handle)

    owner.resume(Wake("status"))

    assert (before, stockouts(world.store, now=choose_now)) == (1, [])


@pytest.mark.parametrize(
    "detail",
    [
        "InvalidImageName of a b",
        "ErrImageNeverPull of x",
        "ErrImagePull of x: rpc error: code = NotFound desc = failed to pull x: not found",
    ],
)
def test_an_image_that_never_can_be_had_fails_the_run_also_late(world, detail):
    """An hour after the start, when a node is recreated: no other attempt, and the reason is reported."""
    owner = world.owner()
    waiting = owner.enter()
    world.clock.advance(3600)
    world.backend.set_state(world.handle, "pending", reason="image", detail=detail)

    owner.resume(world.watch(waiting).poll())
    with pytest.raises(RunFailedError, match="its image is not available: " + detail[:12]):
        owner.resume(Wake("status"))

    assert len(world.state.attempts) == 1
    assert world.backend.live == []


def test_what_trains_saves_before_the_run_fails_for_an_image_that_is_gone(world):
    """Node 1 was lost and is being recreated, but the image's tag is gone: node 0 saves its work."""
    owner = world.owner()
    owner.enter()
    world.say(step=10)
    world.backend.set_state(
        world.handle, "pending", node=1, reason="image", detail="ErrImagePull of x: not found"
    )

    waiting = owner.resume(Wake("status"))
    asked, seen = world.control(), world.backend.observe(world.handle).nodes
    quiet = world.watch(waiting).poll()
    saved = world.save(50)
    world.say(step=50, checkpoint=saved, phase="uploading")
    owner.resume(Wake("status"))
    going = world.backend.observe(world.handle).nodes[0].state
    world.say(ended=Ended(exit_code=85, reason="drained"), step=50, checkpoint=saved)
    world.backend.end(world.handle, node=0, exit_code=85, reason="drained")
    owner.resume(Wake("status"))
    with pytest.raises(RunFailedError, match="its image is not available: ErrImagePull of x"):
        owner.resume(Wake("status"))

    assert (asked.action, [node.state for node in seen]) == ("drain", ["running", "pending"])
    assert (quiet.detail, going) == ("no capacity", "running")
    assert world.state.attempts[0].end.checkpoint == saved
    assert world.backend.live == []


def test_what_trains_saves_before_it_makes_room_for_the_next_attempt(world):
    """Node 1 was lost and there is no capacity to recreate it: node 0, elastic, trained on without it."""
    owner = world.owner()
    owner.enter()
    world.say(step=50)
    never_came(world, 1)

    owner.resume(Wake("status"))
    asked, seen = world.control(), world.backend.observe(world.handle).nodes
    saved = world.save(60)
    world.say(step=60, checkpoint=saved, ended=Ended(exit_code=85, reason="drained"))
    world.backend.end(world.handle, node=0, exit_code=85, reason="drained")
    owner.resume(Wake("status"))
    world.backend.end(world.handle, node=1, signal=9, reason="killed")
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    assert (asked.action, [node.state for node in seen]) == ("drain", ["running", "pending"])
    assert (world.state.live.number, world.control().candidates) == (2, (saved,))


def test_what_only_waits_for_others_is_given_back_at_once(world):
    """It made no step: node 0 alone, of two that start together."""
    owner = world.owner()
    owner.enter()
    world.say(step=0)
    never_came(world, 1)

    owner.resume(Wake("status"))

    assert world.backend.observe(world.handle).nodes[0].state == "ended"


def test_what_trains_and_does_not_go_is_killed_when_its_time_is_over(world):
    """As any attempt that is asked to stop: no one pays for longer than that."""
    owner = world.owner()
    owner.enter()
    world.say(step=10)
    world.backend.set_state(world.handle, "pending", node=1, reason="image", detail="not found")
    watch = world.watch(owner.resume(Wake("status")))
    watch.poll()
    world.clock.advance(30 + 60)
    wake = watch.poll()
    owner.resume(wake)

    with pytest.raises(RunFailedError, match="its image is not available"):
        owner.resume(Wake("status"))

    assert wake.kind == "overdue"
    assert world.backend.live == []


@pytest.mark.parametrize(
    ("reason", "detail"),
    [
        ("pulling", "ErrImagePull of x: rpc error: code = Unavailable desc = connection refused"),
        ("quota", "exceeded quota: gpus"),
        ("scheduling", FULL),
        ("queue", "waits for its Kueue queue q"),
        ("config", "secret not found"),
    ],
)
def test_what_may_come_is_waited_for(world, reason, detail):
    """Registries, quotas, nodes, queues and secrets come back."""
    owner = world.owner()
    waiting = owner.enter()
    world.backend.set_state(world.handle, "pending", reason=reason, detail=detail)

    assert world.watch(waiting).poll() is None
    owner.resume(Wake("status"))
    assert (world.state.live.phase, len(world.state.attempts)) == ("started", 1)


def test_an_attempt_has_twice_its_checkpoint_to_go(world):
    """A save of 90 s: 180 s to stop, for the current machine and for the next one."""
    asked = []
    submit = world.backend.submit
    world.backend.submit = lambda request: asked.append(request.grace_s) or submit(request)
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10), checkpoint_s=90.0)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))
    grace_s = world.control().grace_s

    assert (asked, grace_s) == ([30.0, 180.0], 180.0)


@pytest.mark.parametrize("align", ["step", "now"])
def test_steps_that_take_long_are_awaited_by_whoever_asks_to_go(world, align):
    """Ranks on several nodes see a request at every tenth step: of 40 s each, beyond 30 s and a minute."""
    owner = world.owner()
    owner.enter()
    world.say(step_time_s=40.0)
    if align == "now":
        request_stop(Run(world.store, world.prefix), reason="enough", by="t")
        waiting = owner.resume(Wake("request"))
    else:
        owner.time_out("over")
        waiting = owner.resume(Wake("status"))
    asked, watch = world.control(), world.watch(waiting)
    watch.poll()
    world.clock.advance(10 * 40.0 + 10.0)
    ask = Ask(asked.action, 0.0, 0.0 if align == "now" else asked.align_timeout_s, asked.grace_s)

    assert asked.align == align
    assert due_signal(ask, 10 * 40.0 + 10.0, AgentFacts(cooperates=True)) is None
    assert watch.poll() is None
    world.clock.advance(asked.grace_s)
    assert watch.poll().kind == "overdue"


def test_steps_that_no_longer_come_are_not_awaited(world):
    """A training that stalled gets the shortest grace, however long its steps took."""
    owner = world.owner()
    owner.enter()
    world.say(step_time_s=40.0, health="stalled")

    owner.resume(Wake("status"))

    assert (world.control().action, world.control().grace_s) == ("stop", 30.0)


@pytest.mark.parametrize(
    ("checkpoint_s", "step_time_s", "grace_s"),
    [
        (None, None, 30.0),
        (1.0, None, 30.0),
        (90.0, None, 180.0),
        (1e6, None, 3600.0),
        (None, 0.1, 30.0),
        (None, 10.0, 130.0),
        (90.0, 10.0, 310.0),
        (90.0, 1e6, 3600.0),
    ],
)
def test_the_grace_has_bounds(checkpoint_s, step_time_s, grace_s):
    """At least Kubernetes' 30 s, at most an hour."""
    said = Status(checkpoint_s=checkpoint_s, progress=Progress(step_time_s=step_time_s))

    assert limits.grace_s(RunState(), said) == grace_s


@pytest.mark.parametrize(
    ("facts", "hours"),
    [
        ({}, 720),
        ({"usd_left": 10.0, "usd_per_hour": 2.0}, 5),
        ({"usd_left": 10.0}, 720),
        ({"usd_left": -1.0, "usd_per_hour": 2.0}, 0),
        ({"usd_left": 50.0, "usd_per_hour": 100.0}, 0.5),
        ({"deadline_left_s": 2 * 3600.0, "deadline_s": 4 * 3600.0}, 7),
        ({"deadline_left_s": -9 * 3600.0, "deadline_s": 4 * 3600.0}, 1),
        ({"usd_left": 10.0, "usd_per_hour": 2.0, "deadline_left_s": 3600.0, "deadline_s": 3600.0}, 3),
        ({"deadline_left_s": -9 * 3600.0, "deadline_s": -9 * 3600.0}, 720),  # of a day that is made up for
        ({"usd_left": 10.0, "usd_per_hour": 2.0, "deadline_left_s": -60.0, "deadline_s": -60.0}, 5),
    ],
)
def test_every_machine_has_an_end_of_its_own(facts, hours):
    """When the budget is spent (A6), at twice the deadline and an hour, or after 30 days."""
    known = dict.fromkeys(("usd_left", "usd_per_hour", "deadline_left_s", "deadline_s"))

    assert limits.machine_deadline_s(**(known | facts)) == hours * 3600


def test_a_budget_of_which_nobody_knows_the_rest_buys_nothing():
    """Unknown does not mean that nothing was spent."""
    stage = Stage(None, "s.yaml", budget_usd=5.0)

    with pytest.raises(BudgetError, match=r"a budget of \$5.00 cannot be kept"):
        choose.goal_of(RunState(), stage, spent_usd=None, now=0.0)


def test_a_claim_holds_a_stage_to_its_zone(new_world):
    """The less expensive offer is in another zone: neither start nor move nor the sensor uses it."""
    here, there = replace(GPU, zone="z-b"), replace(SPOT, zone="z-a")
    claim = "volumes: [{name: data, source: pvc://data, mount_path: /d, region: r, zone: z-b}]\n"
    world = new_world((here, there), spec=SPEC + claim)
    world.owner().enter()

    made = json.loads(world.store.read(f"{world.prefix}/plan.json"))

    assert world.state.live.allocation == Allocation(here, 2)
    assert [one["misfits"] for one in made["rejected"]] == [
        [{"need": "data", "reason": "data can be used in r/z-b alone", "shortfall": 1.0}]
    ]
    assert {one["offer"]["zone"] for one in made["targets"]} == {"z-b"}
    assert choose.fits(world.owner().owned.stage.spec, Allocation(there, 2), (here, there)) == (
        "data can be used in r/z-b alone"
    )


def test_gpus_that_the_packages_have_no_kernels_for_are_passed_over(new_world):
    """Built for CUDA 11.8, torch has no kernels for a B200: the more expensive H100 is chosen, and stays."""
    b200 = replace(GPU, instance_type="node:b200", gpu_name="B200", gpu_memory_gb=180, usd_per_hour=0.5)
    h100 = replace(GPU, instance_type="node:h100", gpu_name="H100", gpu_memory_gb=80)
    unheard_of = replace(
        GPU, instance_type="node:other", gpu_name="GPU", gpu_memory_gb=None, usd_per_hour=2.0
    )
    world = new_world(
        (b200, h100, unheard_of), spec=SPEC + "runtimes: [{type: python, packages: [torch==2.1.0+cu118]}]\n"
    )
    world.owner().enter()

    made = json.loads(world.store.read(f"{world.prefix}/plan.json"))

    assert world.state.live.allocation == Allocation(h100, 2)
    assert [
        (one["allocation"]["offer"]["gpu_name"], one["misfits"][0]["need"]) for one in made["rejected"]
    ] == [("B200", "cuda")]
    assert "CUDA 11.8 has no kernels for B200" in made["rejected"][0]["misfits"][0]["reason"]
    assert {one["offer"]["gpu_name"] for one in made["targets"]} == {"H100", "GPU"}
    refused = choose.fits(world.owner().owned.stage.spec, Allocation(b200, 2), (b200, h100))
    assert "CUDA 11.8 has no kernels for B200" in refused


@pytest.mark.parametrize(
    ("cloud", "runtime"),
    [
        ("local", "{type: python, packages: [torch==2.1.0+cu118]}"),
        ("kubernetes", "{type: python, packages: [torch==2.1.0+cu118], requirements: requirements.txt}"),
        ("kubernetes", "{type: python, packages: [pandas]}"),
    ],
)
def test_packages_that_are_not_known_or_not_used_exclude_no_gpu(new_world, cloud, runtime):
    """This machine has its own environment, a requirements file is not frozen, pandas needs no kernels."""
    b200 = replace(GPU, cloud=cloud, gpu_name="B200", gpu_memory_gb=180)
    world = new_world((b200,), spec=SPEC + f"runtimes: [{runtime}]\n", backend=ElasticBackend)

    world.owner().enter()

    assert world.state.live.allocation == Allocation(b200, 2)


def test_a_killed_task_leaves_its_training_as_long_as_a_checkpoint_takes(world):
    """Marked or deleted in Airflow: a save of 90 s has 180 s, for the training and for the machine."""
    world.owner().enter()
    world.say(checkpoint=world.save(10), checkpoint_s=90.0)
    stopped = []
    world.backend.stop = lambda _handle, *, grace_s: stopped.append(grace_s)

    kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="marked")

    assert (world.control().action, world.control().grace_s, stopped) == ("drain", 180.0, [180.0])
