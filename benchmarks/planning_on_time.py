"""Type and number of GPUs chosen before a run and after one probe, against the best fixed choice.

    python benchmarks/planning_on_time.py FOLDER

FOLDER contains throughput_adaptdl_T4.csv, throughput_sia.csv, stat_efficiency.csv and models.json. The
measured tables are the ground truth: the time of a choice is the sum over epochs of its progress over the
best measured batch's gain / step time. The planner knows the packaged library of jobs (fitted to the T4
table) and datasheets; before a probe it has no measurements of the other types. A probe is 5 minutes on the
best choice and 5 on the best of another type, at every measured batch there, with 3 % noise. Value of an
hour: 0.1, 1, 10 and 100 times the $/h of the cheapest choice. Prices per GPU-hour: T4 0.978, V100 3.06, A100
2.7447 (AWS lists).
"""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from envscaler_airflow.catalog.packaged import gpu_facts, job
from envscaler_airflow.planning.jobs import Job, JobModel, job_model
from envscaler_airflow.planning.objective import Overheads, estimate
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.throughput import Step, Timing, roofline_s

PRICES = {"T4": 0.978, "V100-32GB": 3.06, "A100-40GB": 2.7447}
PER_NODE = {"T4": 4, "V100-32GB": 8, "A100-40GB": 8}
NAMES = {"A100-40GB": "A100"}
JOBS = {
    "imagenet": "resnet50-imagenet",
    "cifar10": "resnet18-cifar10",
    "yolov3": "yolov3-voc",
    "ncf": "neumf-movielens",
}
FACTORS = (0.1, 1.0, 10.0, 100.0)
NOISE = 0.03
PROBE_H = 5 / 60

Choice = tuple[str, int, int]
"""GPU type, nodes, GPUs together."""


def read_steps(folder: Path) -> dict[str, dict[Choice, dict[float, float]]]:
    """Step seconds by model, packed choice and local batch."""
    found: dict[str, dict[Choice, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for name in ("throughput_adaptdl_T4.csv", "throughput_sia.csv"):
        for row in csv.DictReader((folder / name).open()):
            gpu, nodes, gpus = row["gpu_type"], int(row["num_nodes"]), int(row["num_replicas"])
            if gpu in PRICES and nodes == math.ceil(gpus / PER_NODE[gpu]):
                found[row["model"]][gpu, nodes, gpus][float(row["local_bsz"])] = float(row["step_time"])
    return found


def read_epochs(folder: Path, models: dict[str, dict]) -> dict[str, list[tuple[float, float]]]:
    """Progress and noise ratio of each epoch at the model's own batch."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last: dict[str, float] = defaultdict(float)
    for row in csv.DictReader((folder / "stat_efficiency.csv").open()):
        model = row["model"]
        if int(row["batch_size"]) == models[model]["init_batch"]:
            progress = float(row["progress"])
            noise = float(row["grad_var"]) / max(float(row["grad_sqr"]), 1e-9)
            found[model].append((progress - last[model], noise))
            last[model] = progress
    return found


def true_hours(
    model: dict, epochs: list[tuple[float, float]], choice: Choice, steps: dict[float, float]
) -> float:
    """Hours of the whole training on *choice*, at the best measured batch of each epoch."""
    batches = [(local * choice[2], step) for local, step in steps.items()]
    batches = [item for item in batches if model["init_batch"] <= item[0] <= model["max_batch"] * 1.001]
    if not batches:
        return math.inf
    seconds = float(model["restart_s"])
    for progress, noise in epochs:
        gains = [(noise + 1) / (noise * model["init_batch"] / batch + 1) / step for batch, step in batches]
        seconds += progress / max(gains)
    return seconds / 3600


class Planner:
    """The product's choice: speeds of a JobModel in the product's own objective."""

    def __init__(self, item: Job, work: float, restart_s: float) -> None:
        """Store the job, its amount of work, and the seconds of a start."""
        self.item, self.work, self.restart_s = item, work, restart_s
        self.measured: dict[str, list[Timing]] = {}

    def objectives(self, choices: list[Choice], hour_usd: float) -> dict[Choice, float]:
        """Expected cost + value of an hour x expected time."""
        model = job_model(self.item, gpu_facts(), measured=self.measured)
        found = {}
        for choice in choices:
            worth = self._objective(model, choice, hour_usd)
            if worth is not None:
                found[choice] = worth
        return found

    def _objective(self, model: JobModel, choice: Choice, hour_usd: float) -> float | None:
        gpu, nodes, gpus = choice
        name = NAMES.get(gpu, gpu)
        # Uneven nodes are measured too: the model computes all GPUs in the measured layout.
        kind = InstanceType("", gpu, 8.0 * gpus / nodes, 1e3, name, gpus / nodes, gpu_facts()[name].memory_gb)
        speed = model.at(name, together=gpus, nodes=nodes, vcpus=kind.vcpus * nodes)
        if speed is None:
            return None
        return estimate(
            self.work,
            speed,
            usd_per_hour=PRICES[gpu] * gpus,
            value_of_hour=hour_usd,
            overheads=Overheads(start_s=self.restart_s),
        ).objective


def run(folder: Path, *, is_known: bool) -> None:
    """Print regrets by model and value of an hour."""
    models = json.loads((folder / "models.json").read_text())["models"]
    steps, epochs = read_steps(folder), read_epochs(folder, models)
    before, after = defaultdict(list), defaultdict(list)
    for model, name in JOBS.items():
        truth = {
            at: true_hours(models[model], epochs[model], at, found) for at, found in steps[model].items()
        }
        truth = {at: hours for at, hours in truth.items() if hours < math.inf}
        item = job(name) if is_known else by_datasheet(job(name))
        work = sum(progress for progress, _ in epochs[model]) * models[model]["init_batch"]
        cheapest = min(PRICES[gpu] * gpus for gpu, _, gpus in truth)
        for factor in FACTORS:
            worth = {at: hours * (PRICES[at[0]] * at[2] + factor * cheapest) for at, hours in truth.items()}
            best = min(worth, key=worth.__getitem__)
            planner = Planner(item, work, models[model]["restart_s"])
            first = pick(planner, list(truth), factor * cheapest)
            second = pick(planner, [at for at in truth if at[0] != first[0]], factor * cheapest)
            probe(planner, steps[model], (first, second))
            final = pick(planner, list(truth), factor * cheapest)
            charged = PROBE_H * sum(PRICES[at[0]] * at[2] + factor * cheapest for at in (first, second))
            before[model].append(worth[first] / worth[best] - 1)
            after[model].append(worth[final] / worth[best] - 1)
            with_probes = (worth[final] + charged) / worth[best] - 1
            print(
                f"  {model} x{factor:g}: {show(first)} {before[model][-1]:.0%}, probed {show(second)} too, "
                f"then {show(final)} {after[model][-1]:.0%} (with the probes' own cost {with_probes:.0%}); "
                f"best {show(best)}"
            )
    for label, found in (("no history", before), ("after a probe", after)):
        means = sorted(statistics.mean(values) for values in found.values())
        by_value = [statistics.median(values[at] for values in found.values()) for at in range(len(FACTORS))]
        words = ", ".join(f"x{factor:g} {value:.0%}" for factor, value in zip(FACTORS, by_value, strict=True))
        print(
            f"{label}: median model {statistics.median(means):.0%} above the best fixed choice (mean over "
            f"four values); median model by value: {words}; worst model {means[-1]:.0%}"
        )


def by_datasheet(item: Job) -> Job:
    """The same job without any measurement: a step from the T4's datasheet and 25 Gbit/s."""
    t4 = gpu_facts()["T4"]
    sample_s = roofline_s(t4, flops=item.flops, moved_bytes=item.moved_bytes, precision=item.precision)
    gradients = item.footprint.params * 4
    step = Step(0.02, sample_s or 1.0, 2 * gradients / 10e9, 0.001, 2 * gradients / 2.5e9, 0.001, 1.5)
    return replace(item, step=step, is_measured=False)


def pick(planner: Planner, choices: list[Choice], hour_usd: float) -> Choice:
    """The choice with the lowest objective."""
    found = planner.objectives(choices, hour_usd)
    return min(found, key=lambda at: (found[at], at))


def probe(planner: Planner, steps: dict[Choice, dict[float, float]], choices: tuple[Choice, ...]) -> None:
    """Measure steps on *choices*."""
    rng = random.Random(1)
    for gpu, nodes, gpus in choices:
        timings = planner.measured.setdefault(NAMES.get(gpu, gpu), [])
        for local, step in sorted(steps[gpu, nodes, gpus].items()):
            timings.append(Timing(local, gpus, nodes, step * math.exp(rng.gauss(0, NOISE))))


def show(choice: Choice) -> str:
    """``8 x A100-40GB on 1``."""
    return f"{choice[2]} x {choice[0]} on {choice[1]}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("give the folder of the measured profiles; without it there is nothing to compare with")
        sys.exit(0)
    for known in (True, False):
        print("with the packaged library:" if known else "with datasheets alone:")
        run(Path(sys.argv[1]), is_known=known)
