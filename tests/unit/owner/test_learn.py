"""Every run teaches the next: the owner adds what a run measured to the stage's profile, and reads it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from envscaler_agent.protocol import Ended, Progress, Status, status_name
from envscaler_airflow.cli import main
from envscaler_airflow.errors import StoreError
from envscaler_airflow.owner.learn import code_of
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Delivered, Stage, Wake
from envscaler_airflow.run import Actor
from envscaler_airflow.run.measured import profiled_metric
from envscaler_airflow.store.profiles import stage_folder, stored_profiles
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import cpu_offer

OFFERS = (cpu_offer(1, usd_per_hour=1.0), cpu_offer(2, usd_per_hour=1.5))
TIMED = {"elapsed_s": 1020.0, "first_step_s": 20.0, "save_s": 1.0, "batch": 32, "step_time_s": 0.99}


def finish(world):
    """Train all 1000 steps in 999 s after a first step of 20 s."""
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    ended, used = Ended(exit_code=0, reason="succeeded"), {"memory_bytes": 7e8}
    world.say(ended=ended, step=1000, outputs={"model": "file:///etc"}, usage=used, **TIMED)
    world.backend.end(world.handle)
    return owner.resume(Wake("status"))


@pytest.fixture
def world(new_world):
    """A run that has not begun, on two offers."""
    return new_world(OFFERS)


def next_run(world, name="later", store=None):
    """Begin the next run of the same stage; return it and its owner."""
    key = replace(world.key, run_id=name)
    run = Run(store or world.store, key, clock=world.clock.time)
    stage = Stage(spec=world.owner().owned.stage.spec, spec_source="train.yaml", value_of_hour=0.0)
    return run, Owner(run=run, backend=world.backend, actor=Actor("ti-9", 1, 3), stage=stage)


def profiles(world):
    """Return the profiles of the stage."""
    return stored_profiles(world.store, stage_folder(world.key), now=world.clock.time())


def test_a_run_adds_what_it_measured_to_the_profile_of_its_stage(world):
    """Speed, step, work, memory and start-up (feature B5)."""
    assert isinstance(finish(world), Delivered)

    [found] = profiles(world).runs
    assert (found.run, found.status, found.unit, found.units) == (world.prefix, "succeeded", "steps", 1000.0)
    assert found.speeds["scripted/cpu-1"].mean == pytest.approx(1.0)
    assert found.steps["scripted/cpu-1"].step_s == 0.99
    assert found.usage["memory_bytes"].peak == 7e8
    assert found.start_s["first_step"] == 20.0
    assert found.forecast is None


def test_the_second_run_is_planned_with_what_the_first_measured(world):
    """It ranks by expected cost, with the stated ratio to the offer that was never used (feature B10)."""
    finish(world)
    run, owner = next_run(world)

    owner.enter()

    made = run.plan()
    assert made["inputs"]["knowledge"]["sources"]["speed"] == "measured in 1 run, stated in scaling.speedup"
    assert made["inputs"]["knowledge"]["units"] == 1000.0
    assert made["chosen"]["allocation"]["offer"]["instance_type"] == "cpu-2"
    assert made["chosen"]["estimate"]["hours_low"] < made["chosen"]["estimate"]["hours_high"]
    assert made["forecast"]["estimate"] == made["chosen"]["estimate"]
    assert any("work: measured in 1 run" in note for note in made["notes"])


def test_advice_names_the_machine_and_what_it_saves(world):
    """The plan of the newest run, with the stated ratio, and what it measured itself."""
    finish(world)

    found = CliRunner().invoke(main, ["advise", "dag/train", "--store", world.store.url])

    assert found.exit_code == 0, found.output
    assert "request memory: 960Mi" in found.stdout
    assert "plan: scripted/cpu-2/on-demand, 0.1" in found.stdout
    assert "it saves 0.14 h" in found.stdout


def test_the_sensor_knows_what_earlier_runs_measured_elsewhere(world):
    """Speeds and steps of machines that this run has not used, marked as learned."""
    finish(world)
    run, owner = next_run(world)
    owner.enter()
    state = run.events.load()

    seen = ScalingWatcher(run=run, backend=world.backend).observation(state, state.live)

    assert seen.speeds["scripted/cpu-1/on-demand"].source == "learned"
    assert seen.speeds["scripted/cpu-1/on-demand"].mean == pytest.approx(1.0)
    assert seen.measured["scripted/cpu-1/on-demand"].batch == 32
    assert seen.overheads.start_s == pytest.approx(20.0)


def test_the_forecast_is_compared_with_what_became_of_it(world):
    """The second run tells how long it took against the range that its plan expected."""
    finish(world)
    run, owner = next_run(world)
    owner.enter()
    expected = run.plan()["forecast"]["estimate"]["hours"]
    world.log, world.key, prefix = run.events, run.key(), run.prefix
    live = run.events.load().live

    status = Status(
        generation=1,
        attempt=1,
        sequence=1,
        phase="ended",
        progress=Progress(step=1000, total_steps=1000),
        start_step=0,
        ended=Ended(exit_code=0, reason="succeeded"),
        outputs={"model": "file:///etc"},
    )
    world.store.write(f"{prefix}/{status_name(1, 1, 0)}", status.to_json())
    world.clock.advance(600.0)
    world.backend.end(live.handle)
    owner.resume(Wake("status"))

    found = profiles(world).runs[-1].forecast

    assert found.hours == expected
    assert found.actual_hours == pytest.approx(600 / 3600)


def test_a_store_that_fails_only_profiles_fails_no_stage(world, monkeypatch, caplog):
    """Neither the write at the end nor the read at the next plan."""

    def down(*_args, **_kwargs):
        raise StoreError("no answer", transient=True)

    monkeypatch.setattr("envscaler_airflow.owner.learn.add_profile", down)
    monkeypatch.setattr("envscaler_airflow.owner.learn.stored_profiles", down)
    with caplog.at_level(logging.WARNING):
        assert isinstance(finish(world), Delivered)
        run, owner = next_run(world)
        owner.enter()

    assert run.plan()["inputs"]["knowledge"]["sources"]["start"] == "not measured yet: a chosen default"
    assert "is not added to the profile of its stage: no answer" in caplog.text
    assert "the profile of earlier runs cannot be read, and is not used: no answer" in caplog.text


def test_a_torn_profile_is_named_and_the_stage_starts(world, caplog):
    """The plan goes on without it."""
    world.store.write(f"{stage_folder(world.key)}/000000000000001-torn.json", b"{")

    with caplog.at_level(logging.WARNING):
        world.owner().enter()

    assert "a profile of an earlier run is ignored: profiles.v1/" in caplog.text
    assert world.state.live.phase == "started"


def test_a_stage_without_steps_is_learned_as_a_whole(new_world):
    """A stage of 500 s: its second run is forecast to take as long (feature B5)."""
    spec = (
        "version: v1\nname: train\nresources: {requests: {cpu: 1, memory: 1Gi}}\nentrypoint: [python, a.py]\n"
    )
    world = new_world(OFFERS, spec=spec)
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    world.clock.advance(500.0)
    world.backend.end(world.handle)

    status = Status(
        generation=1, attempt=1, sequence=1, phase="ended", ended=Ended(exit_code=0, reason="succeeded")
    )
    world.store.write(f"{world.prefix}/{status_name(1, 1, 0)}", status.to_json())
    owner.resume(Wake("status"))
    run, later = next_run(world)

    later.enter()

    made = run.plan()
    assert made["inputs"]["knowledge"]["unit"] == "stages"
    assert made["chosen"]["estimate"]["train_s"] == pytest.approx(500.0, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpu3_utilization_percent", "gpu_utilization_percent"),
        ("gpu0_memory_used_bytes", "gpu_memory_used_bytes"),
        ("memory_bytes", "memory_bytes"),
        ("cpu_percent", "cpu_percent"),
        ("memory_limit_bytes", None),
        ("disk_free_bytes", None),
        ("threads", None),
    ],
)
def test_a_profile_keeps_the_metrics_that_sizes_depend_on(name, kept):
    """Those of all GPUs together."""
    assert profiled_metric(name) == kept


def test_dates_and_inputs_are_not_what_runs():
    """The daily run of one code is the same stage; another command or workdir is not."""
    today = {
        "entrypoint": ["python", "t.py", "--day", "2026-05-01", "--data", "s3://b/r1/x"],
        "inputs": {"data": "s3://b/r1/x"},
        "workdir_archive": "workdir-1.tar.zst",
        "resources": {"requests": {"cpu": 1}},
    }
    tomorrow = json.loads(json.dumps(today).replace("2026-05-01", "2026-05-02").replace("r1", "r2"))

    assert code_of(today) == code_of(tomorrow)
    assert code_of(today) == code_of({**today, "resources": {"requests": {"cpu": 2}}})
    assert code_of(today) != code_of({**today, "workdir_archive": "workdir-2.tar.zst"})
    assert code_of(today) != code_of({**today, "entrypoint": ["python", "t.py", "--epochs", "3"]})
