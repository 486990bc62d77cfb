"""The planner on tables of offers: speed, and the same answers as SkyPilot's or lower.

    python benchmarks/planner.py [FOLDER]

FOLDER contains offers-*.csv.gz, skypilot_scope.json and skypilot_examples.csv. Without it, only the speed on
the packaged snapshot is shown.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from envscaler_airflow.catalog.packaged import pack, packaged, unpack
from envscaler_airflow.catalog.sources import read_scope, read_tables
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.planning import Requirements, is_ordered, requirements_of
from envscaler_airflow.planning.market import Scope, Search, search
from envscaler_airflow.planning.table import OfferTable

REPEATS = 20
GPUS = ("T4", "V100", "A100", "A100-80GB", "H100", "H200", "L4", "A10G", "L40S", "A10", "P100", "MI300X")


def main(folder: Path | None) -> None:
    """Print one line for each figure."""
    if folder is None:
        table, scope, examples = packaged(), Scope(), []
    else:
        table = unpack(pack(read_tables(folder)))
        scope = read_scope(folder / "skypilot_scope.json", None)
        examples = list(csv.DictReader((folder / "skypilot_examples.csv").open()))
    inside = sum(scope.has(*table.places[at][:2]) for at in table.place)
    print(f"{len(table)} rows of {len(table.kinds)} types, {inside} of them in scope")
    show_examples(examples, table, scope)
    requests = [needs for needs, _, _ in map(request_of, examples)] + random_requests(500)
    show_speed(requests, table, scope)
    show_start(folder)
    if folder is not None:
        show_equal(requests, table, scope)


def request_of(example: dict[str, str]) -> tuple[list[Requirements], bool, list[str]]:
    """A request of SkyPilot in our spec's form: needs, whether they are ordered, clouds."""
    body = json.loads(example["request"])
    if "memory" in body:
        body["memory"] = str(body["memory"]).rstrip("+") + "Gi"
    body.setdefault("use_spot", False)
    spec = {"version": "v1", "name": "x", "resources": body, "num_nodes": int(example["num_nodes"])}
    spec |= {"entrypoint": ["true"], "checkpoint": {"path": "/ckpt"}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(json.dumps(spec))
        loaded = load_spec(path)
    needs = [replace(need, arch="x86_64", exact_gpus=True) for need in requirements_of(loaded)]
    return needs, is_ordered(loaded), example["clouds"].split(",")


def show_examples(examples: list[dict[str, str]], table: OfferTable, scope: Scope) -> None:
    """Print each answer beside SkyPilot's."""
    lower = equal = higher = 0
    for example in examples:
        needs, ordered, clouds = request_of(example)
        how = Search(scope=replace(scope, clouds=clouds))
        chosen = search(needs, table, how=how, is_ordered=ordered).chosen
        theirs = float(example["price_total_hour"]) if example["price_total_hour"] else None
        mine = chosen.usd_per_hour if chosen else None
        if theirs is None:
            found = chosen.allocation.name if chosen else "no offer"
            print(f"  {example['id']} {example['request']}: error there, here {found}")
        elif mine is None or mine > theirs + 1e-5:
            higher += 1
            print(f"  {example['id']} {example['request']}: {mine} here, {theirs} there")
        elif mine < theirs - 1e-5:
            lower += 1
        else:
            equal += 1
    if examples:
        print(f"examples with a price: {lower} lower, {equal} equal, {higher} higher than SkyPilot's choice")


def random_requests(number: int) -> list[list[Requirements]]:
    """Requests of every kind."""
    rng = random.Random(7)
    made = []
    for _ in range(number):
        gpus = rng.choice([0, 1, 1, 1, 2, 4, 8])
        types = tuple(rng.sample(GPUS, rng.choice([0, 1, 1, 2]))) if gpus else ()
        nodes = rng.choice([(1, 1), (1, 1), (4, 4), (1, 4)])
        made.append(
            [
                Requirements(
                    vcpus=rng.choice([0, 2, 4, 8, 16, 32, 96]),
                    memory_gib=rng.choice([0, 4, 16, 64, 256, 768]),
                    gpus=gpus,
                    gpu_types=types,
                    gpu_memory_gb=rng.choice([None, 24, 40, 80]) if gpus and not types else None,
                    cloud=rng.choice([None, None, None, "aws", "gcp", "azure"]),
                    min_nodes=nodes[0],
                    max_nodes=nodes[1],
                    capacity=rng.choice(["auto", "spot", "on-demand"]),
                    arch=rng.choice(["x86_64", "x86_64", None]),
                )
            ]
        )
    return made


def show_speed(requests: list[list[Requirements]], table: OfferTable, scope: Scope) -> None:
    """Print the warm time of one plan."""
    took, used = [], []
    how = Search(scope=scope)
    for needs in requests:
        search(needs, table, how=how)
    for _ in range(3):
        for needs in requests:
            begun, cpu = time.perf_counter(), time.thread_time()
            search(needs, table, how=how)
            took.append((time.perf_counter() - begun) * 1e3)
            used.append((time.thread_time() - cpu) * 1e3)
    for what, found in (("", took), (", CPU", used)):
        found.sort()
        print(
            f"plan, {len(requests)} requests x 3, warm{what}: median {statistics.median(found):.2f} ms, "
            f"p99 {found[int(0.99 * len(found))]:.2f} ms, max {found[-1]:.2f} ms"
        )


def show_start(folder: Path | None) -> None:
    """Print the time from the start of a process to its first plan, by the CLI's own command."""
    with tempfile.TemporaryDirectory() as home:
        spec = Path(home) / "s.yaml"
        spec.write_text('{version: v1, name: x, resources: {accelerators: "A100:8"}, entrypoint: [python]}')
        command = [sys.executable, "-m", "envscaler_airflow.cli", "plan", "-f", str(spec)]
        if folder is not None:
            command += ["--offers", str(folder), "--scope", str(folder / "skypilot_scope.json")]
        wall, cpu = [], []
        for _ in range(REPEATS):
            begun, used = time.perf_counter(), children_cpu_s()
            subprocess.run(command, check=True, capture_output=True, env={"ENVSCALER_CACHE": home})
            wall.append((time.perf_counter() - begun) * 1e3)
            cpu.append((children_cpu_s() - used) * 1e3)
    what = "of these tables, read and kept" if folder else "of the package"
    print(
        f"process start to printed plan, offers {what}: the first {wall[0]:.0f} ms; then "
        f"median {statistics.median(wall[1:]):.0f} ms, at best {min(wall[1:]):.0f} ms, "
        f"CPU median {statistics.median(cpu[1:]):.0f} ms"
    )


def children_cpu_s() -> float:
    """CPU seconds of the processes that ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show_equal(requests: list[list[Requirements]], table: OfferTable, scope: Scope) -> None:
    """Compare every answer with plain loops over every row."""
    path = Path(__file__).parents[1] / "tests" / "exhaustive.py"
    made = importlib.util.spec_from_file_location("exhaustive", path)
    assert made is not None
    assert made.loader is not None
    exhaustive = importlib.util.module_from_spec(made)
    made.loader.exec_module(exhaustive)
    rows = [row_of(offer) for offer in table.offers() if scope.has(offer.cloud, offer.region)]
    same, differ = 0, []
    for needs in requests:
        found = [exhaustive.cheapest(rows, vars_of(need)) for need in needs]
        best = min((item for item in found if item is not None), default=None)
        chosen = search(needs, table, how=Search(scope=scope)).chosen
        price = None if chosen is None else chosen.usd_per_hour
        if (best is None) == (chosen is None) and (chosen is None or (best[1] == chosen.allocation.name)):
            same += 1
        else:
            differ.append((needs, best, chosen and chosen.allocation.name, price))
    print(f"against plain loops over {len(rows)} offers: {same} of {len(requests)} the same")
    for item in differ[:5]:
        print("  differs:", item)


def vars_of(need: Requirements) -> dict[str, Any]:
    """Needs as a plain dict."""
    return need.to_dict()


def row_of(offer: Any) -> dict[str, Any]:
    """An offer as a plain dict."""
    return {
        **{name: getattr(offer, name) for name in ("name", "cloud", "region", "instance_type", "vcpus")},
        **{
            name: getattr(offer, name) for name in ("memory_gib", "arch", "gpu_name", "gpus", "gpu_memory_gb")
        },
        "zone": offer.zone or "",
        "capacity": offer.capacity_type,
        "usd": offer.usd_per_hour,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
