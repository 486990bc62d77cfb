"""The wheel in an environment of its own, as ``pip install envscaler-airflow`` makes it: no extra, no uv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def made(*words: object) -> None:
    """Run uv, which only makes the environment."""
    done = subprocess.run([UV, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that holds the built wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("bare")
    made("build", "--quiet", "--wheel", "--out-dir", folder / "dist", REPOSITORY)
    (wheel,) = (folder / "dist").glob("*.whl")
    made("venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    made("pip", "install", "--quiet", "--python", python, "--constraint", constraints, wheel)
    return python.parent


@pytest.fixture
def shell(bare: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a command of a person who has just installed the wheel; returns all that it printed."""
    home = tmp_path / "home"
    home.mkdir()
    env = {
        "HOME": str(home),
        "PATH": str(bare),  # a machine's own programs may include uv
        "ENVSCALER_LOCAL_ROOT": str(tmp_path / "local"),
    }
    assert shutil.which("uv", path=env["PATH"]) is None

    def run(folder: Path, *words: str) -> str:
        done = subprocess.run(
            [bare / "envscaler", *words],
            cwd=folder,
            env=env,
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
