"""A simulated training, watched by the simulator's adapter and by a sensor of a real run: one decision."""

from __future__ import annotations

from envscaler_agent.protocol import Progress, Status, status_name
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.scaling import replay
from envscaler_airflow.simulate.elastic import Config, ElasticJob, ElasticTraining, Model, Step
from envscaler_airflow.simulate.live_decision import LiveDecision
from envscaler_airflow.store.decisions import DecisionLog, read_decisions
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling: {policy: cost-to-finish}
"""
STEPS = {1: (1.0, 0.0), 2: (0.56, 0.05), 4: (0.33, 0.07), 8: (0.32, 0.2)}
"""Seconds of a step and of its synchronization by GPUs, at one global batch: eight gain nothing over four."""
BATCH, TOTAL = 256, 60_000


def offers():
    """A machine of each size, at $1 for a GPU-hour."""
    size = {"vcpus": 8, "memory_gib": 32, "gpu_name": "T4", "gpu_memory_gb": 16.0}
    return tuple(
        Offer("scripted", "", f"node:t4-{gpus}", "on-demand", gpus=gpus, usd_per_hour=float(gpus), **size)
        for gpus in STEPS
    )


def job():
    """The same training and machines in the model."""
    steps = {Config("T4", 1, gpus): (Step(BATCH, *took),) for gpus, took in STEPS.items()}
    model = Model("kept", BATCH, BATCH, 30.0, steps, (float(TOTAL),), {BATCH: (100.0,)})
    return ElasticJob(model, tuple(steps), {"T4": 1.0}, 4.0, 1.0, Config("T4", 1, 1))


class Lived:
    """The run of the model's training: its statuses, its owner and its sensor."""

    def __init__(self, world):
        """Start the run on one GPU."""
        self.world = world
        self.owner = world.owner(value_of_hour=4.0)
        self.owner.enter()
        self.log = DecisionLog(Run(world.store, world.prefix), writer="s", monotonic=world.clock.monotonic)
        self.sequence = 0
        self.restart()

    def restart(self):
        """A new sensor, as after a restart of the triggerer."""
        clock = self.world.clock
        self.watcher = ScalingWatcher(
            run=Run(self.world.store, self.world.prefix, clock=clock.time),
            backend=self.world.backend,
            monotonic=clock.monotonic,
        )

    def check(self, view):
        """Report the step that the model's training sees, and look at it a minute after the last check."""
        live = self.world.state.live
        self.world.clock.advance(60)
        self.sequence += 1
        status = Status(
            generation=live.generation,
            attempt=live.number,
            node=0,
            sequence=self.sequence,
            phase="running",
            start_step=int(view.began_with),
            progress=Progress(
                step=int(view.work_done),
                total_steps=TOTAL,
                elapsed_s=view.elapsed_s - view.began_s + 1,
                first_step_s=1.0,
                batch=view.batch,
                step_time_s=view.step_s,
                sync_time_s=view.sync_s,
                noise_scale=view.noise_scale,
            ),
        )
        name = f"{self.world.prefix}/{status_name(live.generation, live.number, 0)}"
        self.world.store.write(name, status.to_json())
        check = self.watcher.snapshot().check
        self.log.add(check)
        return check

    def move(self, check, step):
        """Request the move that *check* decided, and let the owner carry it out."""
        live = self.world.state.live
        request_move(
            Run(self.world.store, self.world.prefix),
            target=check.decision.target,
            from_attempt=(live.generation, live.number),
            because={"reason": check.decision.reason, "numbers": {}, "check": check.to_dict()},
        )
        self.owner.resume(Wake("request"))
        answer = self.world.log.read()[-1]
        self.world.leave(step)
        self.owner.resume(Wake("status"))
        return answer


def test_a_stage_decides_what_the_simulator_decides(new_world):
    """Every minute of an hour, over restarts of the sensor: the same moves at the same checks."""
    lived = Lived(new_world(offers(), spec=SPEC, backend=ElasticBackend))
    training, policy = ElasticTraining(job(), seed=1), LiveDecision()
    policy.begin(training.job)
    moves, answers = [], []

    for minute in range(60):
        training.advance()
        view = training.view()
        simulated, live = policy.check(view), lived.check(view)
        target = live.decision.target.offer.gpus
        assert (live.decision.action, target) == (
            simulated.decision.action,
            simulated.decision.target.offer.gpus,
        )
        if live.decision.action == "move":
            moves.append(target)
            answers.append(lived.move(live, int(view.work_done)).type)
            training.switch(Config("T4", 1, target))
        elif minute % 7 == 3:
            lived.log.close()
            lived.restart()
    lived.log.close()

    assert moves[-1] == 4
    assert set(answers) == {"move-accepted"}
    recorded = [check for check, _ in read_decisions(Run(lived.world.store, lived.world.prefix))]
    assert [replay(check) for check in recorded] == [check.decision for check in recorded]
