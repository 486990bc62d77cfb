"""The trigger of a stage: one event, its log, its lease, and the effect of a kill. No triggerer, no sleep."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from envscaler_agent.protocol import Status, Transfer, control_name, log_name, status_name
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.owner.stage import Watching
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import NewOwner, read_body
from envscaler_airflow.store import EventLog, RunKey, check_store, open_store
from envscaler_airflow.store.lease import SensorLease, SensorWatch
from envscaler_airflow.store.logs import Tail, read_task_log
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import FaultyStore, ScriptedBackend, cpu_offer
from envscaler_airflow.triggers import stage_trigger as stage_module
from envscaler_airflow.triggers import stage_watch as look_module
from envscaler_airflow.triggers.stage_trigger import StageTrigger, settle_s
from envscaler_airflow.triggers.stage_watch import StageWatcher

KEY = RunKey("deployment", "dag", "run", "train")
OWNER = Actor("ti-1", 1, 3)
ALLOCATION = Allocation(cpu_offer(1))


NO_ANSWER = AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR))


def no_answer(_trigger):
    """Fail as Airflow's API server does during an upgrade."""
    raise NO_ANSWER


class World:
    """A run with one started attempt, in a real store, on scripted machines."""

    def __init__(self, tmp_path):
        """Begin generation 1 and start its first attempt."""
        self.url = f"file://{tmp_path}/store"
        self.task_state = "failed"
        self.store = FaultyStore(open_store(self.url))
        check_store(self.store)
        self.backend = ScriptedBackend()
        self.log = Run(self.store, KEY).events
        request = AttemptRequest(self.url, KEY.prefix, "dag.train", 1, 1, ALLOCATION)
        self.handle = self.backend.submit(request)
        self.append("generation", {"generation": 1, "spec_hash": "h"})
        self.append("attempt-intended", {"generation": 1, "attempt": 1, "allocation": ALLOCATION.to_dict()})
        self.append("attempt-started", {"generation": 1, "attempt": 1, "handle": self.handle.to_dict()})

    def append(self, kind, body, *, actor=OWNER):
        """Append one more event."""
        return self.log.append(self.log.load().number, read_body(kind, body), actor=actor)

    def print(self, chunk, text, *, node=0):
        """Append a closed chunk of the training's output."""
        self.store.write(f"{KEY.prefix}/{log_name(1, 1, node, chunk)}", text.encode())

    def watching(self):
        """Return what the deferring execution gave the trigger to watch."""
        return Watching(self.log.load().number, 1, 1, handle=self.handle).to_dict()

    def trigger(self, **changes):
        """Return a trigger that checks without a pause and fires at once."""
        arguments = {"prefix": KEY.prefix, "watching": self.watching(), "ti_id": "ti-1", **changes}
        return StageTrigger(**arguments, store_url=self.url, poll_s=0.0, settle=0.0)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """The run, wired to what the trigger opens."""
    made = World(tmp_path)
    monkeypatch.setattr(look_module, "open_backend", lambda _name: made.backend)
    place = type("Place", (), {"open": lambda _self: made.store})()
    monkeypatch.setattr(look_module, "store_place", lambda *_: place)
    monkeypatch.setattr(look_module, "close_behind", lambda *_, **__: None)  # a thread
    monkeypatch.setattr(StageTrigger, "_task_state", lambda _self: made.task_state)
    return made


def events_of(trigger):
    """Return everything that the trigger yields."""

    async def collect():
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())


def said(look):
    """Return what one check shows."""
    lines = []
    look.once(lines.append)
    return lines


def test_fires_once_when_the_attempt_is_over(world):
    """The event reports the changed status; nothing follows it."""
    world.backend.end(world.handle)

    assert [event["kind"] for event in events_of(world.trigger())] == ["status"]


def test_the_event_says_where_it_looked(world):
    """The next execution continues with that store, even if the DAG file changed meanwhile."""
    world.backend.end(world.handle)

    (event,) = events_of(world.trigger(compute="kubernetes:eu"))

    assert event["place"] == {"compute": "kubernetes:eu", "store_url": world.url, "store_conn_id": None}


def test_fires_on_a_request(world):
    """A user requested a move while the attempt runs."""
    trigger = world.trigger()
    world.log.append_request(read_body("move-requested", {"target": ALLOCATION.to_dict()}), actor=None)

    assert [(event["kind"], event["detail"]) for event in events_of(trigger)] == [
        ("request", "move-requested")
    ]


def test_follows_the_run_and_says_when_it_is_superseded(world):
    """An old trigger that finds a newer attempt does not keep watching the old one."""
    trigger = world.trigger()
    world.append("attempt-ended", {"generation": 1, "attempt": 1, "outcome": "lost"})
    world.append("attempt-intended", {"generation": 1, "attempt": 2, "allocation": ALLOCATION.to_dict()})

    assert [event["kind"] for event in events_of(trigger)] == ["superseded"]


def test_goes_on_after_a_store_that_cannot_be_read(world, capsys):
    """Unknown is not lost: one warning for a repeated fault, then the real state."""
    world.backend.end(world.handle)
    trigger = world.trigger()
    world.store.add("refuse", "read", "*", times=3)

    found = events_of(trigger)

    assert [event["kind"] for event in found] == ["status"]
    assert capsys.readouterr().out.count("cannot be read") == 1


def test_shows_the_log_once_over_a_restart(world, capsys):
    """The cursor is in the lease: a second trigger shows only what is new."""
    world.print(1, "step 1\nstep 2\n")
    world.backend.end(world.handle)
    events_of(world.trigger())
    world.print(2, "step 3\n")
    events_of(world.trigger())

    assert re.findall(r"step \d", capsys.readouterr().out) == ["step 1", "step 2", "step 3"]


def test_advances_the_cursor_before_it_shows_a_line(world):
    """A triggerer that dies while it writes its log loses lines there, but repeats none."""
    world.print(1, "step 1\n")
    look = world.trigger()._open()

    lines = said(look)

    assert lines == ["step 1"]
    assert read_task_log(Run(world.store, KEY)).shown == {"g1-a1-n0": (2, 0)}


def test_cuts_no_line_at_the_budget(world):
    """The first check ends after a complete line, the next one begins there, across chunks."""
    world.print(1, "aaaa\nbbbb\ncccc\n")
    world.print(2, "dddd\n")
    tail = Tail(Run(world.store, KEY), attempt=(1, 1), nodes=1, holder="t", monotonic=lambda: 0.0)

    looks = [[line for shown in tail.read(budget=8) for line in shown.lines] for _ in range(5)]

    assert looks == [["aaaa"], ["bbbb"], ["cccc"], ["dddd"], []]


def test_shows_a_line_larger_than_the_budget_in_parts(world):
    """Otherwise it would block every line that follows."""
    world.print(1, "a" * 20 + "\nb\n")
    tail = Tail(Run(world.store, KEY), attempt=(1, 1), nodes=1, holder="t", monotonic=lambda: 0.0)

    looks = [[line for shown in tail.read(budget=8) for line in shown.lines] for _ in range(3)]

    assert looks == [["a" * 8], ["a" * 8], ["a" * 4, "b"]]


def test_shows_a_progress_bar_as_it_stands(world):
    """Not every state that it overwrote."""
    world.print(1, "10%\r20%\r30%\ndone\r\n")

    assert said(world.trigger()._open()) == ["30%", "done"]


def test_shows_nothing_when_the_cursor_cannot_be_kept(world):
    """To show lines and then forget the position would repeat them."""
    world.print(1, "step 1\n")
    look = world.trigger()._open()
    world.store.add("refuse", "write", "*lease/log.json")

    with pytest.raises(StoreError):
        said(look)

    assert said(look) == ["step 1"]


def test_renews_the_lease_every_minute(world):
    """Two checks within the minute raise the counter once, one after it once more."""
    now = [0.0]
    look = look_module.StageWatcher(
        Run(world.store, KEY),
        Watching.from_dict(world.watching()),
        compute="local",
        holder="t",
        monotonic=lambda: now[0],
    )
    counters = []
    for now[0] in (0.0, 30.0, 61.0):
        said(look)
        counters.append(Run(world.store, KEY).lease.read().counter)

    assert counters == [1, 1, 2]


def test_marks_lines_with_the_node_when_there_are_several(world):
    """A single node needs no mark."""
    world.print(1, "hello\n", node=1)
    watching = {**world.watching(), "nodes": 2}

    lines = said(world.trigger(watching=watching)._open())

    assert lines == ["[node 1] hello"]


def test_shows_what_it_read_even_when_the_next_look_fails(world):
    """Lines count as shown once they are read, so the trigger logs them before it does anything else."""
    world.print(1, "step 1\n")
    look = world.trigger()._open()
    world.store.add("refuse", "read", "*events*")
    lines = []

    with pytest.raises(StoreError):
        look.once(lines.append)

    assert lines == ["step 1"]


def test_says_how_far_a_transfer_is_that_lasts(world):
    """After a minute, and each minute in which it advanced; a shorter transfer logs nothing (F6)."""
    now = [0.0]
    watching = Watching.from_dict(world.watching())
    look = StageWatcher(Run(world.store, KEY), watching, compute="x", holder="t", monotonic=lambda: now[0])
    shown = []
    for now[0], done in [(0, 0), (30, 10), (59, 20), (61, 30), (90, 40), (121, 50), (200, 50), (260, None)]:
        moving = None if done is None else Transfer("restoring", "checkpoint 440", done, 100)
        status = Status(generation=1, attempt=1, phase="restoring", transfer=moving)
        world.store.write(f"{KEY.prefix}/{status_name(1, 1, 0)}", status.to_json())
        shown.append(said(look))

    line = "restoring checkpoint 440: {} % of 100 bytes"
    assert shown == [[], [], [], [line.format(30)], [], [line.format(50)], [], []]


def test_says_once_what_the_machines_wait_for(world):
    """In the log once per change, and in the lease for a shell; texts that alternate are logged once each."""
    look = StageWatcher(Run(world.store, KEY), Watching.from_dict(world.watching()), compute="x", holder="t")
    pull = {"reason": "image", "detail": "ErrImagePull of train:1"}
    again = {"reason": "image", "detail": "ImagePullBackOff of train:1"}

    def seen(state, **why):
        world.backend.set_state(world.handle, state, **why)
        return said(look), Run(world.store, KEY).lease.read().waits

    shown = [
        seen("pending", reason="scheduling", detail="0/2 nodes are available"),
        seen("pending", reason="scheduling", detail="0/2 nodes are available"),
        seen("starting", **pull),
        seen("starting", **again),
        seen("starting", **pull),
        seen("starting"),
        seen("running"),
        seen("running"),
    ]

    mark = "waits"
    assert shown == [
        ([f"{mark}: scheduling: 0/2 nodes are available"], "scheduling: 0/2 nodes are available"),
        ([], "scheduling: 0/2 nodes are available"),
        ([f"{mark}: image: ErrImagePull of train:1"], "image: ErrImagePull of train:1"),
        ([f"{mark}: image: ImagePullBackOff of train:1"], "image: ImagePullBackOff of train:1"),
        ([], "image: ErrImagePull of train:1"),
        ([], ""),
        ([f"{mark} no longer"], ""),
        ([], ""),
    ]


def test_what_is_waited_for_costs_no_event(world):
    """The next check retries a lease that could not be written; the trigger still reports the request."""
    look = StageWatcher(Run(world.store, KEY), Watching.from_dict(world.watching()), compute="x", holder="t")
    said(look)
    world.backend.set_state(world.handle, "pending", detail="no room")
    world.log.append_request(read_body("move-requested", {"target": ALLOCATION.to_dict()}), actor=None)
    world.store.add("refuse", "write", "*", times=1)

    wake = look.once(lambda _line: None)
    refused, again = said(look), said(look)

    assert (refused, again) == (["waits: no room"], [])
    assert wake["detail"] == "move-requested"
    assert Run(world.store, KEY).lease.read().waits == "no room"


def test_a_stage_that_waits_for_nothing_says_nothing(world):
    """From the first check on."""
    look = StageWatcher(Run(world.store, KEY), Watching.from_dict(world.watching()), compute="x", holder="t")

    assert said(look) == []
    assert said(look) == []


def test_a_scaled_stage_without_a_sensor_says_so_once(world):
    """After five minutes of its own clock, and again after a sensor started and ended."""
    now = [0.0]
    watch = SensorWatch(Run(world.store, KEY), monotonic=lambda: now[0])
    lease = SensorLease(Run(world.store, KEY), monotonic=lambda: now[0])
    told = []
    for now[0] in (0.0, 299.0, 360.0, 420.0):
        told.append(watch.news() is not None)
    lease.renew()
    for now[0] in (480.0, 700.0, 800.0):
        told.append(watch.news() is not None)

    assert told == [False, False, True, False, False, False, True]


def test_refuses_a_store_that_does_not_hold_the_run(world, tmp_path):
    """A triggerer with another file system reports that instead of watching nothing."""
    elsewhere = open_store(f"file://{tmp_path}/elsewhere")
    check_store(elsewhere)
    place = type("Place", (), {"open": lambda _self: elsewhere})()
    trigger = world.trigger()
    look_module.store_place = lambda *_: place  # undone by the fixture's monkeypatch

    with pytest.raises(SpecError, match="the triggerer does not see this run"):
        events_of(trigger)


def test_holds_its_event_until_the_deferring_slice_is_reported(world, monkeypatch):
    """Airflow fails a task that is queued again before the end of its last execution was reported."""
    waited = []
    real = asyncio.sleep

    async def sleep(seconds):
        waited.append(seconds)
        await real(0)

    monkeypatch.setattr(stage_module.asyncio, "sleep", sleep)
    world.backend.end(world.handle)
    trigger = StageTrigger(
        prefix=KEY.prefix, watching=world.watching(), ti_id="ti-1", store_url=world.url, settle=None
    )

    events_of(trigger)

    assert settle_s() == 7.0  # five seconds of heartbeat and two of margin
    assert 6.0 < waited[-1] <= 7.0


def test_a_kill_asks_the_attempt_to_save_and_go(world):
    """A stop request, the control, and a graceful stop of the machine."""
    asyncio.run(world.trigger().on_kill())

    control = json.loads(world.store.read(f"{KEY.prefix}/{control_name(1, 1)}"))
    assert world.log.read()[-1].type == "stop-requested"
    assert (control["action"], control["align"]) == ("drain", "now")
    assert ("stop", world.handle.name) in world.backend.calls


def test_goes_on_while_airflow_gives_no_answer(world, monkeypatch, capsys):
    """An upgrade of the API server ends no trigger, neither while connecting nor at its first question."""
    world.backend.end(world.handle)
    real, faults = look_module.store_place, [NO_ANSWER, NO_ANSWER]

    def place(*names):
        if faults:
            raise faults.pop()
        return real(*names)

    monkeypatch.setattr(look_module, "store_place", place)
    monkeypatch.setattr(StageTrigger, "_is_warm", False)
    monkeypatch.setattr(StageTrigger, "_task_state", no_answer)

    assert [event["kind"] for event in events_of(world.trigger())] == ["status"]
    assert capsys.readouterr().out.count("cannot be read") == 1


def test_a_kill_of_which_airflow_says_nothing_leaves_the_attempt_to_its_lease(world, monkeypatch, capsys):
    """The task may have been cleared, or marked; the log explains what happens next."""
    monkeypatch.setattr(StageTrigger, "_task_state", no_answer)

    asyncio.run(world.trigger().on_kill())

    assert "the lease will end the attempt" in capsys.readouterr().out
    assert not [call for call in world.backend.calls if call[0] == "stop"]


@pytest.mark.parametrize("state", ["deferred", "scheduled", "queued", "running", None])
def test_a_task_that_goes_on_was_not_killed(world, state):
    """Another triggerer took it over or fired its event, or the task was cleared: the attempt continues."""
    world.task_state = state
    before = world.log.load().number

    asyncio.run(world.trigger().on_kill())

    assert world.log.load().number == before
    assert not [call for call in world.backend.calls if call[0] == "stop"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [({"run": {"train": "deferred"}}, "deferred"), ({"run": {"train": None}}, None), ({}, "removed")],
)
def test_the_state_of_the_task_is_airflows(monkeypatch, answer, state):
    """A clear leaves None; no answer at all means that the DAG run was deleted."""
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: answer))
    trigger = StageTrigger(prefix=KEY.prefix, watching={}, ti_id="ti-1")
    trigger.task_instance = SimpleNamespace(dag_id="dag", run_id="run", task_id="train", map_index=-1)

    assert trigger._task_state() == state


def test_a_late_kill_of_an_old_try_does_nothing(world):
    """After a clear, the old trigger may get its kill after the new try took the run over."""
    trigger = world.trigger()
    world.append("owner", {"reason": "taken over"}, actor=Actor("ti-2", 2, 4))
    before = world.log.load().number

    asyncio.run(trigger.on_kill())

    assert world.log.load().number == before
    assert not [call for call in world.backend.calls if call[0] == "stop"]


def test_a_late_kill_of_a_try_whose_id_came_back_does_nothing(world):
    """Airflow failed a try that was not running and kept its id: the next try is another one (A2)."""
    trigger = world.trigger()
    trigger.watching["try_number"] = 1
    world.append("owner", {"reason": "taken over"}, actor=Actor("ti-1", 2, 3))

    asyncio.run(trigger.on_kill())

    assert not [call for call in world.backend.calls if call[0] == "stop"]


def test_a_kill_that_races_with_a_new_owner_does_nothing(world, monkeypatch):
    """The new try's event arrives between read and request: its number is taken, and the kill sees it."""
    trigger = world.trigger()
    rival = Run(world.store, KEY).events
    real, once = EventLog.load, []

    def load(self):
        state = real(self)
        if not once:
            once.append(True)
            rival.append(state.number, NewOwner(reason="taken over"), actor=Actor("ti-2", 2, 4))
        return state

    monkeypatch.setattr(EventLog, "load", load)
    asyncio.run(trigger.on_kill())

    assert world.log.read()[-1].type == "owner"


def test_a_kill_after_the_event_does_nothing(world):
    """Airflow calls on_kill of a trigger that has fired and still runs."""
    world.backend.end(world.handle)
    trigger = world.trigger()

    async def fire_and_kill():
        async for _ in trigger.run():
            await trigger.on_kill()

    asyncio.run(fire_and_kill())

    assert world.log.read()[-1].type == "attempt-started"


def test_a_kill_without_a_store_leaves_it_to_the_lease(world, capsys):
    """It is logged and not raised: Airflow would only log it too."""
    trigger = world.trigger()
    world.store.add("refuse", "read", "*", times=None)

    asyncio.run(trigger.on_kill())

    assert "the lease will end the attempt" in capsys.readouterr().out


def test_cleanup_stops_nothing(world):
    """Every restart of a triggerer calls it."""
    Run(world.store, KEY).lease.renew(holder="t")
    before = world.log.load().number

    asyncio.run(world.trigger().cleanup())

    assert world.log.load().number == before
    assert [call[0] for call in world.backend.calls] == ["submit"]


def test_comes_back_from_its_serialized_arguments(world):
    """They contain all state: a restored trigger serializes to the same."""
    path, arguments = world.trigger().serialize()

    again = StageTrigger(**json.loads(json.dumps(arguments)))

    assert again.serialize() == (path, arguments)


def test_arguments_that_an_older_version_did_not_write_have_defaults(world):
    """The three original arguments are enough."""
    trigger = StageTrigger(prefix=KEY.prefix, watching=world.watching(), ti_id="ti-1")

    assert trigger.serialize()[1]["compute"] == "local"


@pytest.mark.parametrize("scaling", [None, {"policy": "cost-to-finish"}])
def test_whether_a_stage_is_scaled_is_read_without_parsing_its_spec(world, scaling, monkeypatch):
    """A triggerer watches thousands of stages, and would keep each spec as hundreds of objects."""
    spec = {"version": "v1", "name": "train", "entrypoint": ["true"], "scaling": scaling}
    body = EnvSpec.from_dict({name: value for name, value in spec.items() if value}).to_dict()
    world.store.write(f"{KEY.prefix}/spec-h.json", json.dumps(body).encode())
    monkeypatch.setattr(Run, "spec", None)

    assert look_module._is_scaled(Run(world.store, KEY)) is (scaling is not None)
