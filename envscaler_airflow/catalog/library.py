"""Packaged facts of GPUs and of common jobs; the README in this folder gives the source of each."""

from __future__ import annotations

import csv
import json
from functools import cache
from importlib import resources

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.jobs import Job
from envscaler_airflow.planning.throughput import Gpu

_PRECISIONS = ("fp32", "tf32", "fp16", "fp8")


def _text(name: str) -> str:
    return resources.files("envscaler_airflow.catalog").joinpath(name).read_text(encoding="utf-8")


@cache
def gpu_facts() -> dict[str, Gpu]:
    """Datasheet facts of GPUs by canonical name."""
    lines = [line for line in _text("gpus.csv").splitlines() if not line.startswith("#")]
    return {
        cells["gpu"]: Gpu(
            name=cells["gpu"],
            memory_gb=float(cells["memory_gb"]),
            bandwidth_gb_s=float(cells["bandwidth_gb_s"]),
            tflops={name: float(cells[name]) for name in _PRECISIONS if cells[name]},
            link_gb_s=float(cells["link_gb_s"]),
            has_direct_link=cells["direct"] == "yes",
            source=f"{cells['source']} ({cells['checked']})",
        )
        for cells in csv.DictReader(lines)
    }


@cache
def jobs() -> dict[str, Job]:
    """Common jobs by name."""
    return {body["name"]: Job.from_dict(body) for body in json.loads(_text("jobs.json"))}


def job(name: str) -> Job:
    """One of :func:`jobs`.

    Raises:
        SpecError: There is no job of that name; lists the names.
    """
    found = jobs().get(name)
    if found is None:
        raise SpecError(f"no job is named {name!r}; there are {', '.join(jobs())}")
    return found
