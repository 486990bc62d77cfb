"""SkyPilot's optimizer on the same tables and requests, beside ``planner.py``.

    PYTHON benchmarks/planner_skypilot.py FOLDER [NUMBER]

PYTHON has ``skypilot==0.14.1`` installed, in its own environment; if it does not, this script reports that
and ends. FOLDER is that of ``planner.py``. NUMBER of its requests are run (by default every fifth), once
after SkyPilot's caches were cleared and twice warm. The network is not used: all clouds count as enabled.
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

PARTS = ("accelerator_name", "accelerator_count", "accelerator_memory_gib", "region", "zone")
CATALOGS = Path(".sky") / "catalogs" / "v8"
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
        names: dict[str, float] = {}
        rows = sum(
            write_catalog(folder, Path(home), cloud, set(regions), names) for cloud, regions in scope.items()
        )
        write_names(Path(home), names)
        try:
            sky = importlib.import_module("sky")
        except ImportError:
            print("SkyPilot is not installed for this Python: pip install 'skypilot==0.14.1'")
            return
        examples = list(csv.DictReader((folder / "skypilot_examples.csv").open()))
        chosen = examples[::5] if number is None else examples[:number]
        print(f"SkyPilot {sky.__version__} on {rows} rows, {len(chosen)} requests")
        ask_all(chosen)


def write_names(home: Path, names: dict[str, float]) -> None:
    """GPUs that SkyPilot knows by name, and their memory."""
    folder = home / CATALOGS / "common"
    folder.mkdir(parents=True)
    everywhere = "AWS GCP Azure Lambda Nebius"
    lines = [f"{name},{everywhere}" for name in sorted(names)]
    (folder / "accelerators.csv").write_text("\n".join(["AcceleratorName,Clouds", *lines]) + "\n")
    lines = [f"{name},{gib},{'AMD' if name.startswith('MI') else 'NVIDIA'}" for name, gib in names.items()]
    (folder / "metadata.csv").write_text("\n".join(["GPU,MemoryGB,Manufacturer", *lines]) + "\n")


def write_catalog(
    folder: Path, home: Path, cloud: str, regions: set[str], gpu_names: dict[str, float]
) -> int:
    """Write the rows of a cloud in SkyPilot's own form and return their number. Adds to *gpu_names*."""
    path = home / CATALOGS / cloud / "vms.csv"
    path.parent.mkdir(parents=True)
    count, built_in = 0, set()
    with gzip.open(folder / f"offers-{cloud}.csv.gz", "rt") as source, path.open("w") as target:
        out = csv.writer(target)
        out.writerow(COLUMNS)
        for row in csv.DictReader(source):
            if row["region"] not in regions or (cloud == "aws" and not row["zone"]):
                continue
            if row["accelerator_name"]:
                gib = float(row["accelerator_memory_gib"] or 0)
                gpu_names.setdefault(row["accelerator_name"], gib)
            without = {}
            if cloud == "gcp" and row["instance_type"] and row["accelerator_name"]:
                # There GPUs also have their own rows, even if they belong to a type: the type's row has the
                # price.
                built_in.add(tuple(row[name] for name in PARTS))
                without = dict.fromkeys(PARTS[:3], "")
            out.writerow(cells_of(row | without))
            count += 1
        for part in sorted(built_in):
            blank = dict.fromkeys(("instance_type", "vcpus", "memory_gib", "arch"), "")
            free = {"price_usd_per_hour": "0", "spot_price_usd_per_hour": "0"}
            out.writerow(cells_of({**blank, **free, **dict(zip(PARTS, part, strict=True))}))
    return count


def cells_of(row: dict[str, str]) -> list[Any]:
    """A row of the tables in SkyPilot's form."""
    gib = row["accelerator_memory_gib"]
    gpu = {"Gpus": [{"MemoryInfo": {"SizeInMiB": int(float(gib) * 1024)}}]} if gib else ""
    names = ("instance_type", "accelerator_name", "accelerator_count", "vcpus", "memory_gib")
    prices = ("price_usd_per_hour", "spot_price_usd_per_hour", "region", "zone", "arch")
    return [*(row[name] for name in names), gpu, *(row[name] for name in prices)]


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
    """SkyPilot's instance type, wall ms and CPU ms; None if SkyPilot raises an error."""
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
