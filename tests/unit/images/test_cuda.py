"""The chain from wheel to GPU: an error names what does not fit, with a version that would."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.gpus import MEMORY_GB
from envscaler_airflow.envspec.models import Runtime
from envscaler_airflow.images.cuda import (
    ARCHITECTURES,
    CAPABILITY,
    WHEELS,
    Chain,
    broken_links,
    software,
)
from envscaler_airflow.images.requirement_files import Requirements


def stage(image: str = "python:3.11-slim", **gpu):
    """A stage on *image* that requests *gpu*."""
    body = {"version": "v1", "name": "s", "base": {"image": image}}
    return EnvSpec.from_dict(body | ({"resources": {"requests": {"gpu": gpu}}} if gpu else {}))


def test_an_old_wheel_on_a_new_gpu_names_the_versions_that_do():
    """The wheel for CUDA 11.8 has kernels up to Hopper; Blackwell's need CUDA 12.8."""
    (got,) = broken_links(Chain(torch="2.1.0+cu118", cuda="11.8", gpu="B200"), stage())

    assert got == (
        "torch 2.1.0+cu118 built for CUDA 11.8 has no kernels for B200 (compute capability 10); "
        "torch 2.7 to 2.10 for CUDA 12.8, 12.9, 13.0, 13.2 have them"
    )


def test_a_new_wheel_on_an_old_gpu_names_the_versions_that_do():
    """Volta was left out of the wheels for CUDA 12.8."""
    (got,) = broken_links(Chain(torch="2.8.0", cuda="12.8", gpu="V100"), stage())

    assert (
        "has no kernels for V100 (compute capability 7); torch 2.0 to 2.10 for CUDA 11.7, 11.8, 12.1" in got
    )


@pytest.mark.parametrize(
    ("gpu", "cuda"), [("H100", "11.8"), ("L4", "11.7"), ("B200", "12.8"), ("B300", "12.8"), ("T4", "13.0")]
)
def test_kernels_run_on_later_minors_of_their_major(gpu, cuda):
    """8.6 covers 8.9, and 10.0 covers 10.3."""
    assert broken_links(Chain(torch="2", cuda=cuda, gpu=gpu), stage()) == []


def test_an_old_driver_names_the_one_to_install_and_the_cuda_that_goes_with_it():
    """CUDA 12 needs the 525 branch; 470 carries 11.x."""
    (got,) = broken_links(Chain(cuda="12.4", driver="470.82.01"), stage())

    assert (
        got == "CUDA 12.4 needs driver 525 or newer, the machine has 470.82.01; upgrade it, or use CUDA 11.x"
    )
    assert broken_links(Chain(cuda="12.4", driver="535.104.05"), stage()) == []


def test_too_small_a_gpu_is_a_broken_link():
    """The offer's GPU against the one that the spec requests."""
    (got,) = broken_links(Chain(gpu="A100"), stage(count=1, memory="80GB"))

    assert got.startswith("A100 has 40 GB, gpu.memory asks for 80GB")


def test_the_unknown_breaks_nothing():
    """No version, no driver, a GPU that is not in the table."""
    assert broken_links(Chain(), stage()) == []
    assert broken_links(Chain(torch="9.9", cuda="99.1", gpu="Z900", driver="600"), stage()) == []


@pytest.mark.parametrize(
    ("image", "packages", "index", "expected"),
    [
        ("python:3.11-slim", ("torch==2.1.0",), None, Chain("2.1.0", "12.1")),
        ("python:3.11-slim", ("torch==2.1.0+cu118",), None, Chain("2.1.0+cu118", "11.8")),
        (
            "python:3.11-slim",
            ("torch==2.1.0",),
            "https://wheels.example.com/whl/cu118",
            Chain("2.1.0", "11.8"),
        ),
        ("python:3.11-slim", ("torch==2.1.0",), "https://wheels.example.com/whl/cpu", Chain("2.1.0", None)),
        ("nvcr.io/nvidia/pytorch:23.10-py3", (), None, Chain("2.1.0a0", "12.2.2")),
        ("pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime", (), None, Chain("2.6.0", "12.4")),
        ("nvidia/cuda:11.8.0-runtime-ubuntu22.04", (), None, Chain(None, "11.8.0")),
    ],
)
def test_torch_and_cuda_are_read_from_pins_indexes_and_bases(image, packages, index, expected):
    """The wheel's own tag counts most, then the index, then the default of the usual index, then the base."""
    runtime = Runtime(packages=packages, extra_index_urls=(index,) if index else ())

    assert software(stage(image), Requirements(runtime)) == expected


def test_the_tables_cover_each_other():
    """Every NVIDIA GPU of the catalog has a capability, every wheel's CUDA its architectures."""
    assert {name for name in MEMORY_GB if not name.startswith("MI")} == set(CAPABILITY)
    assert {cuda for cudas in WHEELS.values() for cuda in cudas} <= set(ARCHITECTURES)


def test_a_plan_passes_over_gpus_that_the_packages_have_no_kernels_for(tmp_path, monkeypatch):
    """CUDA 11.8 has none for a B200: an H100 is chosen, else the reason has right versions (feature A5)."""
    monkeypatch.chdir(tmp_path)
    head = "version: v1\nname: s\nruntimes: [{type: python, packages: ['torch==2.3.0+cu118']}]\n"
    (tmp_path / "any.yaml").write_text(head + "resources: {accelerators: {B200: 8, H100: 8}}\n")
    (tmp_path / "one.yaml").write_text(head + "resources: {accelerators: 'B200:8'}\n")

    body = json.loads(CliRunner().invoke(main, ["plan", "-f", "any.yaml", "--json"]).stdout)
    none = CliRunner().invoke(main, ["plan", "-f", "one.yaml"])

    assert {tuple(item["accelerators"]) for item in body["candidates"]} == {("H100",)}
    assert none.exit_code == 2
    assert "torch 2.3.0+cu118 built for CUDA 11.8 has no kernels for B200" in none.output
    assert "torch 2.7 to 2.10" in none.output
