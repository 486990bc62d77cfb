"""Conflicts before the build: real resolutions on an index in a folder, a scripted conda program."""

from __future__ import annotations

import json
import re
import sys
import zipfile

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.models import Runtime
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.locks import Finding, find_conflicts, resolve
from envscaler_airflow.images.programs import uv_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements


def wheel(folder, name: str, version: str, *needs: str) -> None:
    """A package without content."""
    info = f"{name}-{version}.dist-info"
    lines = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index in a folder: one framework in two versions, and its dependencies."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("1.26.0", "2.1.0"):
        wheel(folder, "arrays", version)
    wheel(folder, "frame", "1.0", "arrays<2")
    wheel(folder, "frame", "2.0", "arrays>=2")
    wheel(folder, "trainer", "5.0", "frame<2", "arrays")
    return folder


def stage(tmp_path, index, *lines: str, **base):
    """A stage with these requirements and this base, and its requirements as read."""
    (tmp_path / "requirements.txt").write_text(
        "\n".join([f"--no-index\n--find-links {index}", *lines]) + "\n"
    )
    spec = EnvSpec.from_dict({
        "version": "v1", "name": "s", "base": {"image": "example/base:1", **base},
        "runtimes": [{"type": "python", "version": "3.11", "requirements": "requirements.txt"}],
        "base_dirs": {"runtimes[0].requirements": str(tmp_path)},
    })  # fmt: skip
    return spec, read_requirements(spec)


def test_packages_that_go_together_have_exact_versions(tmp_path, index):
    """The trainer needs frame below 2, which needs arrays below 2."""
    got = resolve(*stage(tmp_path, index, "trainer"))

    assert got.versions == {"trainer": "5.0", "frame": "1.0", "arrays": "1.26.0"}


def test_a_conflict_is_told_with_the_chain_of_who_needs_what(tmp_path, index):
    """The chain trainer -> frame<2 -> arrays<2 against the stage's own arrays>=2 (feature A5)."""
    with pytest.raises(SpecError, match="cannot be installed together") as caught:
        resolve(*stage(tmp_path, index, "trainer", "arrays>=2"))

    for link in ("trainer", "frame<2", "arrays<2", "arrays>=2"):
        assert link in str(caught.value).replace(" ", "")


def test_what_the_base_holds_takes_part_and_is_not_installed_again(tmp_path, index):
    """The base's arrays 1.24, which no index has, fits; no lock contains it."""
    got = resolve(*stage(tmp_path, index, "trainer", provides={"arrays": "1.24.0", "python": "3.11"}))

    assert got.versions == {"trainer": "5.0", "frame": "1.0"}


def test_a_conflict_with_the_base_names_the_base(tmp_path, index):
    """Version 2 of frame needs arrays 2, the base has 1.24."""
    with pytest.raises(SpecError, match=r"arrays==1\.24\.0 is what the base example/base:1 contains"):
        resolve(*stage(tmp_path, index, "frame==2.0", provides={"arrays": "1.24.0"}))


def test_a_lock_names_every_file_by_its_hash(tmp_path, index):
    """One sha256 for each package at least."""
    got = resolve(*stage(tmp_path, index, "frame==1.0"), hashes=True)

    assert got.text.count("--hash=sha256:") == 2
    assert got.versions == {"arrays": "1.26.0", "frame": "1.0"}


def test_an_unreachable_index_is_unknown_and_no_conflict(tmp_path, monkeypatch):
    """The index is down: the result is unknown, and reported as that."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    runtime = Runtime(version="3.11", packages=("arrays",), index_url="http://127.0.0.1:9/simple")
    spec = EnvSpec.from_dict({"version": "v1", "name": "s", "base": {"image": "b"}})

    with pytest.raises(BackendError, match="cannot be reached"):
        resolve(spec, Requirements(runtime))
    (finding,) = find_conflicts(spec, Requirements(runtime))
    assert finding.kind == "unchecked"


@pytest.fixture
def conda(tmp_path, monkeypatch):
    """A stand-in for micromamba: records its arguments and returns the scripted answer."""

    def make(answer: str, code: int) -> None:
        program = tmp_path / "bin" / "micromamba"
        program.parent.mkdir(exist_ok=True)
        (tmp_path / "answer").write_text(answer)
        program.write_text(
            "#!/bin/sh\n"
            f'echo "$@" > {tmp_path}/words\n'
            f'for last; do :; done; cp "$last" {tmp_path}/environment.yml\n'
            f"cat {tmp_path}/answer\nexit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return make


def conda_stage(tmp_path, index, *lines: str):
    """Conda's numbers 2 beside a requirements file of pip."""
    spec, _ = stage(tmp_path, index, *lines)
    runtime = spec.runtimes[0].model_copy(update={"package_manager": "conda", "packages": ("numbers=2",)})
    spec = spec.model_copy(update={"runtimes": (runtime,)})
    return spec, read_requirements(spec)


def test_conda_and_pip_are_in_one_report(tmp_path, index, conda):
    """The solver's own words for conda's packages, the chain for pip's."""
    conda(json.dumps({"message": "numbers 2 needs libs 3, which is not to be had"}), 1)

    got = find_conflicts(*conda_stage(tmp_path, index, "trainer", "arrays>=2"))

    assert got[0] == Finding("conflict", "conda packages: numbers 2 needs libs 3, which is not to be had")
    assert got[1].kind == "conflict"
    assert "trainer" in got[1].text
    assert "--dry-run" in (tmp_path / "words").read_text()
    assert "numbers=2" in (tmp_path / "environment.yml").read_text()
    assert "pip" not in (tmp_path / "environment.yml").read_text()


def test_packages_of_conda_are_in_no_lock(tmp_path, index):
    """An index of pip has others by the same names: a lock would name packages that no image contains."""
    with pytest.raises(SpecError, match="conda's packages cannot be locked"):
        resolve(*conda_stage(tmp_path, index, "trainer"), hashes=True)


def test_conda_packages_that_go_together_are_no_finding(tmp_path, index, conda):
    """Exit code 0 of the dry run."""
    conda("{}", 0)

    assert find_conflicts(*conda_stage(tmp_path, index, "trainer")) == []


def test_without_a_conda_program_it_is_said_that_nobody_looked(tmp_path, index, monkeypatch):
    """An unchecked stage is never a silent success."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    (got,) = find_conflicts(*conda_stage(tmp_path, index, "trainer"))

    assert got.kind == "unchecked"
    assert "none of micromamba, mamba and conda is installed" in got.text


def test_without_uv_the_extra_that_brings_it_is_named(monkeypatch, tmp_path):
    """It is large, and workers that only start pods do not need it."""
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SpecError, match=r"pip install 'envscaler-airflow\[build\]'"):
        uv_program()


def test_a_rendering_is_locked_when_asked_to(tmp_path, index, monkeypatch):
    """The requirements have every file's hash and the script checks them; conda's packages have none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text(f"--no-index\n--find-links {index}\ntrainer\n")
    runtime = "{type: python, version: '3.11', requirements: requirements.txt}"
    (tmp_path / "envscaler.yaml").write_text(f"version: v1\nname: s\nruntimes: [{runtime}]\n")

    got = CliRunner().invoke(main, ["render", "--target", "venv", "--lock", "--to", "out"])
    refused = CliRunner().invoke(main, ["render", "--target", "conda", "--lock"])

    assert got.exit_code == 0, got.output
    text = (tmp_path / "out" / "requirements.txt").read_text()
    assert re.search(r"^trainer==5.0 .*\n +--hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert "--require-hashes" in (tmp_path / "out" / "venv.sh").read_text()
    assert refused.exit_code == 2
