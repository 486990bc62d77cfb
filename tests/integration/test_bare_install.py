"""The packages as a person installs them: from a clone, from the wheel, and the agent alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.pythons import oldest_python

import envscaler_airflow

REPOSITORY = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
VERSION = envscaler_airflow.__version__


def made(*words: object) -> str:
    """Run a program that only prepares; what it printed."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone: the last commit, without what only this working tree has."""
    folder = tmp_path_factory.mktemp("clone") / "repository"
    made("git", "clone", "--quiet", REPOSITORY, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The provider's wheel, built from the source distribution of the clone."""
    folder = tmp_path_factory.mktemp("dist")
    made(UV, "build", "--quiet", "--out-dir", folder, clone)  # the sdist, and from it the wheel
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the built wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    made(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    made(UV, "pip", "install", "--quiet", "--python", python, "--constraint", constraints, wheel)
    return python.parent


@pytest.fixture
def home_env(bare: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a person who has just installed the wheel."""
    home = tmp_path / "home"
    home.mkdir()
    env = {
        "HOME": str(home),
        "PATH": str(bare),  # a machine's own programs may include uv
        "ENVSCALER_LOCAL_ROOT": str(tmp_path / "local"),
    }
    assert shutil.which("uv", path=env["PATH"]) is None
    return env


@pytest.fixture
def shell(bare: Path, home_env: dict[str, str]) -> Callable[..., str]:
    """Run a command of that person; returns its whole output."""

    def run(folder: Path, *words: str) -> str:
        done = subprocess.run(
            [bare / "envscaler", *words],
            cwd=folder,
            env=home_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.mark.timeout(600)
def test_the_first_stage_runs_without_uv(shell: Callable[..., str], tmp_path: Path):
    """``init``, ``validate``, ``dry-run``, which finds nothing missing, and ``run``, which ends well (F4)."""
    shell(tmp_path, "init", "first")
    valid = shell(tmp_path / "first", "validate")
    missing = shell(tmp_path / "first", "dry-run")
    ran = shell(tmp_path / "first", "run")

    assert "my-stage is valid" in valid
    assert "my-stage: nothing missing on local" in missing
    assert "wrote 1000 rows" in ran
    assert "the stage succeeded" in ran
    (table,) = (tmp_path / "home").rglob("outputs/g1-a1-c1/table")
    assert any(table.rglob("*.csv"))


@pytest.mark.timeout(600)
def test_a_fresh_clone_installs_by_pip(clone: Path, tmp_path: Path):
    """``pip install .`` builds a wheel with both packages, of one version, and the agent's wheel inside."""
    made(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", clone)

    code = "import envscaler_agent, envscaler_airflow as p; print(envscaler_agent.__version__, p.__version__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"{VERSION} {VERSION}\n", done.stderr
    assert len(list((tmp_path / "site" / "envscaler_airflow" / "wheels").glob("*.whl"))) == 1


@pytest.mark.timeout(600)
def test_the_agents_wheel_runs_a_command_on_the_oldest_python(shell: Callable[..., str], tmp_path: Path):
    """The carried wheel installs alone and needs nothing else."""
    written = shell(tmp_path, "agent-wheel", "--out", "wheels").strip()
    venv = tmp_path / "venv"
    made(UV, "venv", "--quiet", "--no-project", "--python", oldest_python(), venv)
    made(UV, "pip", "install", "--quiet", "--offline", "--python", venv / "bin/python", tmp_path / written)

    version = made(venv / "bin/python", "-c", "import envscaler_agent; print(envscaler_agent.__version__)")
    out = made(venv / "bin/envscaler-agent", "run", "--", "echo", "it runs")

    assert (version, out) == (f"{VERSION}\n", "it runs\n")


@pytest.mark.timeout(600)
def test_the_demo_starts_in_an_empty_folder(bare: Path, home_env: dict[str, str], tmp_path: Path):
    """Its DAG and specs come with the wheel; a Ctrl-C then ends it and leaves nothing."""
    folder = tmp_path / "empty"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    env = {**home_env, "PATH": f"{bare}:{os.defpath}", "TMPDIR": str(tmp_path / "tmp")}
    demo = subprocess.Popen(
        [bare / "envscaler", "demo"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert demo.stdout is not None
    try:
        first = demo.stdout.readline().decode()
        demo.send_signal(signal.SIGTERM)
        rest, _ = demo.communicate(timeout=100)
    finally:
        demo.kill()
        demo.wait()

    assert "starting a real Airflow in" in first
    assert demo.returncode == 130, rest.decode()
    assert list(folder.iterdir()) == []
    assert not list((tmp_path / "tmp").glob("envscaler-demo-*"))
