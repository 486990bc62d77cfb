"""``envscaler run`` on this machine: it builds its environment once, locks it, and rebuilds it exactly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
from wheel_index import Index, write_wheel

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SPEC = """\
version: v1
name: tiny
base: {{image: python:3.11-slim}}
system_packages: [no-such-package-of-debian, bash]
workdir: work
runtimes: [{{type: python, version: "{version}", requirements: requirements.txt, index_url: "{url}"}}]
resources: {{requests: {{gpu: {{count: 1}}}}, cpu_fallback: true}}
entrypoint: [python, main.py]
"""


@pytest.fixture
def project(tmp_path):
    """A stage with a requirement and a program, and ``run`` for it."""
    wheels, work = tmp_path / "wheels", tmp_path / "work"
    wheels.mkdir()
    work.mkdir()
    write_wheel(wheels, "greeting", "1.0", "hello")
    index = Index(wheels)
    (work / "main.py").write_text(
        "import greeting, sys, envscaler_agent\nprint(greeting.text, sys.prefix != sys.base_prefix)\n"
    )
    (tmp_path / "requirements.txt").write_text("greeting>=1\n")
    (tmp_path / "envscaler.yaml").write_text(SPEC.format(version=VERSION, url=index.url))
    env = {
        "ENVSCALER_STORE_URL": f"file://{tmp_path}/store",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "ENVSCALER_LOCAL_ROOT": str(tmp_path / "root"),
    }

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "envscaler_airflow.cli", "run", "-f", "envscaler.yaml", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.wheels, run.folder = wheels, tmp_path
    yield run
    index.close()


def lock_of(folder: Path, name: str) -> dict:
    """The lock of the run of that name, from the store."""
    (path,) = (folder / "store").rglob(f"{name}/*/*/lock.json")
    return json.loads(path.read_text())


def test_a_run_has_its_own_environment_which_a_lock_makes_again(project):
    """A newer version on the index counts for a new run, not for a locked one; a deleted one is named."""
    first = project("--name", "first")
    assert "hello True" in first.stdout
    assert "missing system packages: no-such-package-of-debian; run `apt-get install" in first.stderr
    assert "runs on CPUs, as resources.cpu_fallback allows" in first.stderr
    lock = lock_of(project.folder, "first")
    assert lock["packages"] == {"greeting": "1.0"}
    assert "--hash=sha256:" in lock["requirements"]
    if shutil.which("dpkg-query"):
        assert list(lock["system_packages"]) == ["bash"]

    again = project("--name", "again", "--", "python", "-c", "import greeting; print(greeting.text * 2)")
    assert "hellohello" in again.stdout
    assert "environment " not in again.stderr  # built once, used twice

    write_wheel(project.wheels, "greeting", "1.1", "newer")
    (project.folder / "requirements.txt").write_text("greeting>1\n")
    assert "newer True" in project("--name", "newer").stdout
    assert "hello True" in project("--name", "locked", "--locked", "first").stdout

    (project.wheels / "greeting-1.0-py3-none-any.whl").unlink()
    for environment in (project.folder / "cache" / "envscaler" / "venvs").glob("*/.envscaler-ready"):
        environment.unlink()
    gone = project("--name", "gone", "--locked", "first", code=2)
    assert "greeting==1.0" in gone.stderr


def test_a_build_that_is_told_to_end_leaves_no_credentials(tmp_path):
    """SIGTERM, as from CI, during the download of the base: exit code 143, and its scratch folder is gone."""
    scratch, programs = tmp_path / "scratch", tmp_path / "bin"
    scratch.mkdir()
    programs.mkdir()
    builder = programs / "buildah"
    builder.write_text(f'#!/bin/sh\n[ "$1" = pull ] || exit 1\ntouch {tmp_path}/fetches\nexec sleep 60\n')
    builder.chmod(0o755)
    (tmp_path / "envscaler.yaml").write_text(
        "version: v1\nname: tiny\nbase: {image: 'r.example.com/b:1', credentials: 'env:LOGIN'}\n"
    )
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(scratch), "LOGIN": "user:password"}
    command = [sys.executable, "-m", "envscaler_airflow.cli", "build", "--builder", "buildah"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | env) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "fetches").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        held = [path.name for path in scratch.glob("envscaler-build-*/auth/*")]

        process.terminate()

        assert process.wait(30) == 143
    assert held == ["config.json"]
    assert list(scratch.iterdir()) == []
