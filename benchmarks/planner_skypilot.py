"""SkyPilot's optimizer on the same tables and requests, beside ``planner.py``.

    PYTHON benchmarks/planner_skypilot.py FOLDER [NUMBER]

PYTHON has ``skypilot==0.14.1`` installed, in an environment of its own; where it has not, this says so and
ends. FOLDER is that of ``planner.py``; NUMBER of its requests are asked (by default every fifth), once after
SkyPilot's caches were cleared and twice warm. Nothing of the network is used: all clouds count as enabled.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

COLUMNS = (
    "InstanceType",
    "AcceleratorName",
    "AcceleratorCount",
    "vCPUs",
    "MemoryGiB",
    "GpuInfo",
    "Price",
    "SpotPrice",
    "Region",
    "AvailabilityZone",
    "Arch",
)


def main(folder: Path, number: int | None) -> None:
    """Print one line for each request, and the medians."""
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        scope = json.loads((folder / "skypilot_scope.json").read_text())
        rows = sum(write_catalog(folder, Path(home), cloud, set(regions)) for cloud, regions in scope.items())
        try:
            sky = importlib.import_module("sky")
        except ImportError:
            print("SkyPilot is not installed for this Python: pip install 'skypilot==0.14.1'")
            return
        examples = list(csv.DictReader((folder / "skypilot_examples.csv").open()))
        chosen = examples[::5] if number is None else examples[:number]
        print(f"SkyPilot {sky.__version__} on {rows} rows, {len(chosen)} requests")
        ask_all(chosen)


def write_catalog(folder: Path, home: Path, cloud: str, regions: set[str]) -> int:
    """The rows of a cloud in SkyPilot's own form; how many."""
    path = home / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
    path.parent.mkdir(parents=True)
    count = 0
    with gzip.open(folder / f"offers-{cloud}.csv.gz", "rt") as source, path.open("w") as target:
        out = csv.writer(target)
        out.writerow(COLUMNS)
        for row in csv.DictReader(source):
            if row["region"] not in regions or (cloud == "aws" and not row["zone"]):
                continue
            gib = row["accelerator_memory_gib"]
            gpu = {"Gpus": [{"MemoryInfo": {"SizeInMiB": int(float(gib) * 1024)}}]} if gib else ""
            names = ("instance_type", "accelerator_name", "accelerator_count", "vcpus", "memory_gib")
            prices = ("price_usd_per_hour", "spot_price_usd_per_hour", "region", "zone", "arch")
            out.writerow([*(row[name] for name in names), gpu, *(row[name] for name in prices)])
            count += 1
    return count


def ask_all(examples: list[dict[str, str]]) -> None:
    """Every request cold, then twice warm."""
    cold, warm, cpu, same = [], [], [], 0
    for example in examples:
        found, took, used = ask(example, is_cold=True)
        cold.append(took)
        for _ in range(2):
            again, took, used = ask(example, is_cold=False)
            warm.append(took)
            cpu.append(used)
            found = again
        now, wanted = found or "error", example["instance_type"] or "error"
        same += now == wanted
        if now != wanted:
            print(f"  {example['id']} {example['request']}: {now} here, {wanted} recorded")
    print(f"same choice as recorded: {same} of {len(examples)}")
    print(
        f"one request: caches cleared median {statistics.median(cold):.0f} ms; warm median "
        f"{statistics.median(warm):.0f} ms, CPU median {statistics.median(cpu):.0f} ms"
    )


def ask(example: dict[str, str], *, is_cold: bool) -> tuple[str | None, float, float]:
    """SkyPilot's instance type, wall ms and CPU ms; None for an error of its own."""
    sky, check = importlib.import_module("sky"), importlib.import_module("sky.check")
    optimizer = importlib.import_module("sky.optimizer")
    registry = importlib.import_module("sky.utils.registry").CLOUD_REGISTRY
    clouds = [registry.from_str(name) for name in example["clouds"].split(",")]
    check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: clouds
    if is_cold:
        importlib.import_module("sky.utils.annotations").clear_request_level_cache()
    begun, used = time.perf_counter(), time.process_time()
    found: Any = None
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(ValueError, sky.exceptions.ResourcesUnavailableError),
    ):
        with sky.Dag() as dag:
            task = sky.Task(run="true", num_nodes=int(example["num_nodes"]))
            task.set_resources(sky.Resources.from_yaml_config(json.loads(example["request"])))
        optimizer.Optimizer.optimize(dag, quiet=True)
        found = dag.tasks[0].best_resources.instance_type
    return found, (time.perf_counter() - begun) * 1e3, (time.process_time() - used) * 1e3


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("give the folder of the tables; without it there is nothing to compare with")
        sys.exit(0)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
