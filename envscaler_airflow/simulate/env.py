"""Both models as environments to train a policy in, with Gymnasium's methods (but without requiring it)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND, SpotJob, SpotView, is_safe
from envscaler_airflow.simulate.elastic import ElasticJob, ElasticTraining

Draw = Callable[[Random], tuple[SpotJob, Mapping[str, Sequence[int]]]]
"""Draws a job and the availability of its zones, starting with the job."""


class SpotEnv:
    """Steps of one tick. Actions: 0 nothing, 1 on-demand, 2 and above: the zones in order.

    The observation has resources, queue and prices: ``ticks_left``, ``work_left_s``, ``owed_s``, ``running``
    (as an action), ``up`` (one for each zone), ``on_demand_usd`` and ``spot_usd``. The reward is minus the
    objective: the cost of the tick. The guard turns an unsafe action into on-demand, and ``info["answer"]``
    contains what was run.
    """

    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(self, draw: Draw) -> None:
        """Draw each episode with *draw*."""
        self._draw = draw
        self._random = Random()  # noqa: S311  # episodes, not secrets
        self._running: str | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; the same seed starts the same one. *options* are not used."""
        del options
        if seed is not None:
            self._random = Random(seed)  # noqa: S311  # episodes, not secrets
        self._job, self._zones = self._draw(self._random)
        self._names = list(self._zones)
        self._work, self._owed, self._tick, self._running = self._job.work_s, 0.0, 0, None
        return self._observation(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Run a tick: observation, reward, terminated, truncated, info."""
        answer = self._answer(action)
        cost = 0.0
        if answer is None:
            self._running, self._owed = None, 0.0
        else:
            if answer != self._running:
                self._owed = self._job.overhead_s
            self._running = answer
            price = self._job.on_demand_usd if answer == ON_DEMAND else self._job.spot_usd
            cost = price * self._job.gap_s / 3600
            paid = min(self._job.gap_s, self._owed)
            self._owed -= paid
            self._work = max(0.0, self._work - (self._job.gap_s - paid))
        self._tick += 1
        is_done = self._work <= 1e-6
        if self._running in self._names and not self._is_up(str(self._running)):
            self._running, self._owed = None, 0.0
        return self._observation(), -cost, is_done, False, {"answer": answer}

    def _is_up(self, name: str) -> bool:
        row = self._zones[name]
        return self._tick < len(row) and row[self._tick] > 0

    def _answer(self, action: int) -> str | None:
        answers = [None, ON_DEMAND, *self._names]
        answer = answers[action]
        view = SpotView(
            self._tick, self._job.ticks - self._tick, self._work, self._owed, self._running,
            {name: self._is_up(name) for name in self._names},
        )  # fmt: skip
        if answer in self._names and not view.up[str(answer)]:
            answer = None
        return answer if is_safe(self._job, view, answer) else ON_DEMAND

    def _observation(self) -> dict[str, Any]:
        return {
            "ticks_left": self._job.ticks - self._tick,
            "work_left_s": self._work,
            "owed_s": self._owed,
            "running": [None, ON_DEMAND, *self._names].index(self._running),
            "up": [int(self._is_up(name)) for name in self._names],
            "on_demand_usd": self._job.on_demand_usd,
            "spot_usd": self._job.spot_usd,
        }


class ElasticEnv:
    """Steps of one minute of an elastic training. Actions: its configurations in order.

    The observation has what a policy sees: ``action`` (where it runs), ``batch``, ``step_s``, ``sync_s``,
    ``noise_scale``, ``work_left``, and the price of every action. The reward is minus the objective: cost and
    value of the time of the step, including the restart if the action changes.
    """

    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(self, draw: Callable[[Random], ElasticJob]) -> None:
        """Draw each episode with *draw*."""
        self._draw = draw
        self._random = Random()  # noqa: S311  # episodes, not secrets

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; the same seed starts the same one. *options* are not used."""
        del options
        if seed is not None:
            self._random = Random(seed)  # noqa: S311  # episodes, not secrets
        self._training = ElasticTraining(self._draw(self._random), seed=self._random.randrange(2**31))
        self._training.advance()
        return self._observation(), {"objective": self._training.objective}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Switch if *action* is another place, and train a minute: observation, reward, terminated, ..."""
        training = self._training
        before = training.objective
        training.switch(training.job.configs[action])
        training.advance()
        reward = before - training.objective
        return self._observation(), reward, training.is_done, False, {"restarts": training.restarts}

    def _observation(self) -> dict[str, Any]:
        training, job = self._training, self._training.job
        view = training.view()
        return {
            "action": job.configs.index(view.config),
            "batch": view.batch,
            "step_s": view.step_s,
            "sync_s": view.sync_s,
            "noise_scale": view.noise_scale,
            "work_left": view.work_left,
            "usd_per_hour": [job.usd_per_hour(config) for config in job.configs],
        }
