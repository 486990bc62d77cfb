"""``scaling.decide`` on the elastic model: views become observations, decisions configurations."""

from __future__ import annotations

from dataclasses import replace

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed, measure, merged
from envscaler_airflow.scaling import Check, Memory, Observation, Policy, decide
from envscaler_airflow.scaling.cost_to_finish import COST_TO_FINISH
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.history import averaged
from envscaler_airflow.simulate.elastic import Config, ElasticJob, ElasticView

MAX_POINTS = 240
"""Progress points of which a speed is measured. Chosen: as many as a watcher keeps."""


class LiveDecision:
    """A stage's decision with default settings, guards and cool-down inside, at every check."""

    def __init__(self, settings: Policy | None = None) -> None:
        """Decide with *settings*; the default is a spec that states only ``policy: cost-to-finish``."""
        self._settings = settings or Policy(max_nodes=1 << 16)
        self._policies = {COST_TO_FINISH.name: COST_TO_FINISH}

    def begin(self, job: ElasticJob) -> None:
        """Forget the previous job."""
        model = job.model
        self._places = {config: allocation_of(config, job) for config in job.configs}
        self._configs = {place.name: config for config, place in self._places.items()}
        self._policy = replace(self._settings, value_of_hour=job.value_of_hour)
        self._memory = Memory()
        self._points: list[tuple[float, float]] = []
        self._earlier: Speed | None = None
        self._here: Config | None = None
        self._came_s: float | None = None
        self._moves = 0
        self._always = Observation(
            current=self._places[job.start],
            candidates=tuple(self._places.values()),
            uneven={place.name: config.gpus for config, place in self._places.items()},
            gpu_speeds=dict(model.bandwidth_gbs),
            overheads=Overheads(start_s=model.restart_s),
            batches=None if model.init_batch == model.max_batch else (model.init_batch, model.max_batch),
        )

    def choose(self, view: ElasticView) -> Config:
        """Decide, and remember the check."""
        check = self.check(view)
        decision = check.decision
        return view.config if decision.action == "keep" else self._configs[decision.target.name]

    def check(self, view: ElasticView) -> Check:
        """The check of *view*, as a sensor would record it."""
        observation = self._observation(view)
        decision = decide(observation, self._policy, policies=self._policies)
        check = Check(observation, self._policy, decision)
        self._memory = self._memory.after(check)
        return check

    def _observation(self, view: ElasticView) -> Observation:
        memory, place = self._memory, self._places[view.config]
        if self._here != view.config:
            if self._here is not None:
                self._moves, self._came_s = self._moves + 1, view.began_s
            self._here, self._points = view.config, [(view.began_s, view.began_with)]
            self._earlier = memory.speeds.get(place.name)
        self._points.append((view.elapsed_s, view.work_done))
        del self._points[:-MAX_POINTS]
        speed = merged(self._earlier, measure(self._points))
        total = view.work_done + view.work_left
        step = Measured(view.batch, view.step_s, view.sync_s, view.noise_scale, view.micro_batches)
        history = memory.history.after(place.name, moves=self._moves, done=view.work_done / total, step=step)
        before = memory.measured.get(place.name)
        return replace(
            self._always,
            current=place,
            elapsed_s=view.elapsed_s,
            units_done=view.work_done,
            units_total=total,
            epoch=view.epoch,
            speeds={**memory.speeds, **({} if speed is None else {place.name: speed})},
            measured={**memory.measured, place.name: averaged(before, step)},
            history=history,
            since_move_s=None if self._came_s is None else view.elapsed_s - self._came_s,
            moves=self._moves,
            wanted=memory.wanted,
        )


def allocation_of(config: Config, job: ElasticJob) -> Allocation:
    """*config* as an allocation; where its nodes have different numbers of GPUs, the price is their mean."""
    offer = Offer(
        cloud="model",
        region="",
        instance_type=config.name,
        capacity_type="on-demand",
        vcpus=config.gpus,
        memory_gib=config.gpus,
        gpu_name=config.gpu,
        gpus=-(-config.gpus // config.nodes),
        gpu_memory_gb=job.model.memory_gb.get(config.gpu),
        usd_per_hour=job.usd_per_hour(config) / config.nodes,
    )
    return Allocation(offer, config.nodes)
