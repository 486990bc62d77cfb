"""A command finds the spec's paths where the spec says, and the machine's own folders are untouched."""

import os
import subprocess
import sys
from pathlib import Path

import attempts
import pytest
from click.testing import CliRunner

from envscaler_airflow.backends.local import mount_main, node_plan
from envscaler_airflow.backends.local.node_plan import mount_faults, mount_warnings, mounted_paths, no_mounts
from envscaler_airflow.cli import main
from envscaler_airflow.launch import Paths

SPEC = {
    "volumes": [{"name": "data", "source": "s3://b/p", "mount_path": "/data-of-a-test"}],
    "outputs": {"model": "/output-of-a-test/model", "report": "/output-of-a-test/r"},
    "checkpoint": {"path": "/output-of-a-test/checkpoints"},
}
PATHS = attempts.paths(**SPEC)
SCRIPT = ["bash", "-c", "echo weights > /output-of-a-test/model"]

allowed = pytest.mark.skipif(no_mounts() is not None, reason="this machine allows no mount namespaces")


def run(tmp_path, script, *options):
    """Run a shell script under mount_main.py, and return the finished process."""
    words = [sys.executable, "-I", "-S", mount_main.__file__, "--root", str(tmp_path / "mounts"), *options]
    return subprocess.run(
        [*words, "--", "bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )


@allowed
def test_a_volume_is_where_the_spec_says(tmp_path):
    """Code that opens its path itself finds it, in its own working directory (F9)."""
    (tmp_path / "root/data").mkdir(parents=True)
    (tmp_path / "root/data/train.csv").write_text("1,2")

    done = run(
        tmp_path, "cat /data-of-a-test/train.csv; pwd", "--bind", f"{tmp_path}/root/data", "/data-of-a-test"
    )

    assert done.stdout == f"1,2{tmp_path}\n", done.stderr
    assert not Path("/data-of-a-test").exists()


@allowed
def test_a_shell_script_writes_into_the_attempts_folder(tmp_path):
    """As root it would have made the folder on the machine; it may overwrite what it replaces (F9)."""
    root = tmp_path / "root/output-of-a-test"
    script = "cd /output-of-a-test && echo weights > part && mv part model && mkdir checkpoints"

    done = run(
        tmp_path,
        script,
        *("--out", f"{root}/model", "/output-of-a-test/model"),
        *("--out", f"{root}/checkpoints", "/output-of-a-test/checkpoints"),
    )

    assert done.returncode == 0, done.stderr
    assert (root / "model").read_text() == "weights\n"
    assert (root / "checkpoints").is_dir()
    assert not Path("/output-of-a-test").exists()


@allowed
def test_checkpoints_that_lie_elsewhere_are_beside_the_outputs(tmp_path):
    """Outputs are the attempt's, checkpoints the run's: both are below one folder of the spec (F9)."""
    done = run(
        tmp_path,
        "echo w > /output-of-a-test/model; echo s > /output-of-a-test/checkpoints/last.pt",
        *("--out", f"{tmp_path}/root/output/model", "/output-of-a-test/model"),
        *("--out", f"{tmp_path}/saves/output/checkpoints", "/output-of-a-test/checkpoints"),
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root/output/model").read_text() == "w\n"
    assert (tmp_path / "saves/output/checkpoints/last.pt").read_text() == "s\n"


@allowed
def test_a_folder_of_the_machine_with_content_is_not_hidden(tmp_path):
    """Only the path itself is mounted over it (F9)."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/notes.txt").write_text("mine")

    done = run(
        tmp_path,
        "cat own/notes.txt; echo x > own/model/w",
        "--out",
        f"{tmp_path}/root/m",
        f"{tmp_path}/own/model",
    )

    assert (done.stdout, done.returncode) == ("mine", 0), done.stderr
    assert (tmp_path / "root/m/w").read_text() == "x\n"


@allowed
def test_the_user_stays_who_he_is(tmp_path):
    """Also where the mounts need a user namespace (F9)."""
    done = run(tmp_path, "id -u", "--bind", str(tmp_path), "/data-of-a-test")

    assert done.stdout.strip() == str(os.geteuid())


@allowed
def test_a_command_that_does_not_exist_is_named(tmp_path):
    """As a shell names it (F9)."""
    words = [sys.executable, "-I", "-S", mount_main.__file__, "--root", str(tmp_path / "mounts")]

    done = subprocess.run(
        [*words, "--bind", str(tmp_path), "/data-of-a-test", "--", "no-such-program"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (127, "no-such-program: command not found\n")


@pytest.fixture
def forbidden(monkeypatch):
    """Simulate a machine that allows no mounts."""

    def refuse(_root, _triples):
        raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(mount_main, "enter", refuse)


def test_without_mounts_a_script_that_names_a_path_is_refused(forbidden, capsys, tmp_path):
    """It would write into the machine's own folder; the message names an alternative (F9)."""
    options = ["--root", str(tmp_path), "--out", str(tmp_path / "m"), "/output-of-a-test/model"]

    code = mount_main.main([*options, "--", *SCRIPT])

    said = capsys.readouterr().err
    assert code == 78
    assert "the script names /output-of-a-test/model, which would be this machine's own" in said
    assert "envscaler run --target docker" in said


def test_without_mounts_any_other_command_runs_with_a_warning(forbidden, monkeypatch, capsys, tmp_path):
    """Its arguments and variables are rewritten, so it may never need the path (F9)."""
    monkeypatch.setattr(mount_main, "become", lambda command: 0 if command == ["python", "t.py"] else 1)
    options = ["--root", str(tmp_path), "--bind", str(tmp_path / "d"), "/data-of-a-test"]

    assert mount_main.main([*options, "--", "python", "t.py"]) == 0
    assert "/data-of-a-test cannot be mounted here" in capsys.readouterr().err


def test_volumes_are_bound_and_what_is_uploaded_may_be_replaced():
    """Each at its path in the spec (F9)."""
    assert mounted_paths(PATHS) == [
        ("--bind", "/data-of-a-test"),
        ("--out", "/output-of-a-test/model"),
        ("--out", "/output-of-a-test/r"),
        ("--out", "/output-of-a-test/checkpoints"),
    ]


@pytest.mark.parametrize(
    ("command", "is_fault"),
    [
        (SCRIPT, True),
        (["sh", "-ec", "cat /data-of-a-test/x"], True),
        (["bash", "train.sh", "--out=/output-of-a-test/model"], False),
        (["python", "-c", "open('/data-of-a-test')"], False),
    ],
)
def test_a_start_is_refused_where_a_script_would_meet_the_machines_folders(command, is_fault):
    """The backend refuses before it starts anything (F9)."""
    faults = mount_faults(PATHS, command, why=lambda: "Operation not permitted")

    assert bool(faults) == is_fault
    assert mount_faults(PATHS, command, why=lambda: None) == []


def test_what_is_not_mounted_is_said_once():
    """With the paths and an alternative (F9)."""
    [warning] = mount_warnings(PATHS, why=lambda: "Operation not permitted")

    paths = "/data-of-a-test, /output-of-a-test/model, /output-of-a-test/r, /output-of-a-test/checkpoints"
    assert warning.startswith(f"{paths}: not mounted on this machine (Operation not permitted)")
    assert mount_warnings(Paths(), why=lambda: "no") == []


def test_validate_says_what_this_machine_cannot_mount(tmp_path, monkeypatch):
    """An error for a script on local, otherwise a warning (F9)."""
    why = "Operation not permitted"
    monkeypatch.setattr(node_plan, "no_mounts", lambda: why)
    for name in ("mount_faults", "mount_warnings"):
        real = getattr(node_plan, name)
        monkeypatch.setattr(node_plan, name, lambda *words, real=real: real(*words, why=lambda: why))
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: v1\nname: s\nbase: {image: 'python:3.11-slim'}\noutputs: {model: /output-of-a-test/model}\n"
        "entrypoint: [bash, -c, 'echo x > /output-of-a-test/model']\n"
    )

    local, any_target = (
        CliRunner().invoke(main, ["validate", "-f", str(path), *more]) for more in (["--target", "local"], [])
    )

    assert local.exit_code == 2
    assert "entrypoint: the script names /output-of-a-test/model" in local.output
    assert any_target.exit_code == 0, any_target.output
    assert "warning: on local: /output-of-a-test/model: not mounted on this machine" in any_target.output
