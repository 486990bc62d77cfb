"""Environments of the local target: built once for each content, never partly."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distributions

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images import venv_cache
from envscaler_airflow.images.requirement_files import read_requirements

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """A stage that needs a package of one module from a folder."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "greeting-1.0-py3-none-any.whl", "w") as file:
        file.writestr("greeting.py", "text = 'hello'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")

    def make(*lines: str) -> EnvSpec:
        (tmp_path / "requirements.txt").write_text(
            "\n".join([f"--no-index\n--find-links {tmp_path}", *lines]) + "\n"
        )
        return EnvSpec.from_dict({
            "version": "v1", "name": "s", "base": {"image": "b"},
            "runtimes": [{"type": "python", "version": VERSION, "requirements": "requirements.txt"}],
            "base_dirs": {"runtimes[0].requirements": str(tmp_path)},
        })  # fmt: skip

    return make


def test_an_environment_holds_the_packages_and_is_used_again(stage, tmp_path):
    """The second call builds and prints nothing."""
    said: list[str] = []
    python = venv_cache.ensure(stage("greeting"), tmp_path / "cache", say=said.append)

    assert venv_cache.ensure(stage("greeting"), tmp_path / "cache", say=said.append) == python
    assert len(said) == 1
    shown = subprocess.run(
        [python, "-c", "import greeting; print(greeting.text)"], capture_output=True, check=True
    )
    assert shown.stdout == b"hello\n"
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    assert {item.name: item.version for item in distributions(path=[str(packages)])} == {"greeting": "1.0"}
    assert "greeting==1.0 \\\n    --hash=sha256:" in venv_cache.locked_requirements(python)


def test_other_content_is_another_environment(stage, tmp_path):
    """The key covers Python and every requirements file."""
    first, second = stage("greeting"), None
    key = venv_cache.environment_key(first, read_requirements(first))
    second = stage("greeting", "# changed")

    assert venv_cache.environment_key(second, read_requirements(second)) != key


@pytest.mark.parametrize("absent", [venv_cache.READY, "bin/python"])
def test_what_was_interrupted_or_lost_its_python_is_recreated(stage, tmp_path, absent):
    """Without its mark, or with a link to a removed Python, an environment counts as absent."""
    python = venv_cache.ensure(stage("greeting"), tmp_path / "cache")
    (python.parent.parent / absent).unlink()

    said: list[str] = []
    assert venv_cache.ensure(stage("greeting"), tmp_path / "cache", say=said.append).exists()
    assert len(said) == 1


def test_what_cannot_be_installed_says_why_and_leaves_nothing(stage, tmp_path):
    """The installer's own message."""
    with pytest.raises(SpecError, match="absent-package was not found"):
        venv_cache.ensure(stage("absent-package"), tmp_path / "cache")

    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_conda_is_refused_here_with_what_to_write(tmp_path):
    """There is no conda program in a virtual environment."""
    spec = EnvSpec.from_dict({
        "version": "v1", "name": "s", "base": {"image": "b"},
        "runtimes": [{"type": "python", "package_manager": "conda", "packages": ["numpy=1.26"]}],
    })  # fmt: skip

    with pytest.raises(SpecError, match=r"targets\.local"):
        venv_cache.ensure(spec, tmp_path)
