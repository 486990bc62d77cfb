"""Renderings against golden files; UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envscaler_airflow.envspec import spec_hash
from envscaler_airflow.envspec.loading import load_with_sources
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.dockerfile import ImageOptions
from envscaler_airflow.images.requirement_files import read_requirements
from envscaler_airflow.images.targets import VARIANTS, render, render_spec

HERE = Path(__file__).parents[1]
GOLDEN = HERE / "golden"
SPECS = GOLDEN / "specs"
USUAL = HERE / "data"
PINNED = "docker.io/nvidia/cuda@sha256:" + "0123456789abcdef" * 4

CASES = [
    *((name, target) for name in ("short", "long") for target in ("conda", "venv", "dockerfile")),
    *(("hostile", target) for target in ("conda", "venv", "dockerfile", "vm")),
    *(("wide", target) for target in ("venv", "dockerfile", "vm")),
    ("conda", "conda"),
    ("conda", "dockerfile"),
    ("short", "spec"),
]


def rendered(name: str, target: str, tmp_path: Path) -> dict[str, str]:
    """Name of each artefact to its text."""
    source = next(folder / f"{name}.yaml" for folder in (SPECS, USUAL) if (folder / f"{name}.yaml").is_file())
    work = tmp_path / "specs"
    (work / "extra").mkdir(parents=True)
    for path in ("requirements.txt", "extra/metrics.txt"):
        (work / path).write_text((SPECS / path).read_text())
    (work / source.name).write_text(source.read_text())
    os.chdir(work)
    loaded = load_with_sources(source.name, target=VARIANTS.get(target))
    if target == "spec":
        found = render_spec(loaded)
    else:
        options = ImageOptions(base=PINNED if name == "short" else None, has_agent=True, has_workdir=True)
        image = f"registry.example.com/{name}:1" if target == "vm" and name != "wide" else None
        found = render(target, loaded.spec, read_requirements(loaded.spec), image=image, options=options)
    # The hash covers every default too, which another test checks; YAML quotes a hash of digits first.
    digest = spec_hash(loaded.spec)
    return {
        item.name: item.text.replace(f'"{digest}"', digest).replace(digest, "SPEC-HASH") for item in found
    }


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch):
    """Each test leaves the working folder unchanged."""
    monkeypatch.chdir(HERE)


@pytest.mark.parametrize(("name", "target"), CASES)
def test_renders_as_the_golden_files_say(name, target, tmp_path):
    """Every artefact of every target equals its reviewed golden file (feature A6)."""
    folder = GOLDEN / name / target

    got = rendered(name, target, tmp_path)

    if os.environ.get("UPDATE_GOLDEN"):
        for file, text in got.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{file}").write_text(text)
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert got == kept


def test_a_machine_refuses_a_claim_of_kubernetes(tmp_path):
    """pvc:// has no meaning on a virtual machine; the message shows the overlay to write."""
    with pytest.raises(SpecError, match=r"claim of Kubernetes.*targets: \{vm:"):
        rendered("short", "vm", tmp_path)


@pytest.mark.parametrize("name", ["short", "long", "wide", "hostile"])
def test_the_composed_spec_is_a_spec_that_means_the_same(name, tmp_path):
    """A reloaded spec has the same hash: nothing is lost and nothing is added."""
    text = rendered(name, "spec", tmp_path)["spec.yaml"]
    (tmp_path / "specs" / "again.yaml").write_text(text)

    loaded = load_with_sources(tmp_path / "specs" / f"{name}.yaml")
    again = load_with_sources(tmp_path / "specs" / "again.yaml")

    assert spec_hash(again.spec.model_copy(update={"parameters": loaded.spec.parameters})) == spec_hash(
        loaded.spec
    )
