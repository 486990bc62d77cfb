"""``validate`` and ``render`` from a shell."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main

GOOD = """\
version: v1
name: tiny
base: {image: python:3.11-slim}
parameters: {epochs: {type: integer, default: 3, minimum: 1}}
runtimes: [{type: python, requirements: requirements.txt}]
entrypoint: [python, train.py, --epochs, "{{ parameters.epochs }}"]
targets: {vm: {base: {image: debian:12}}}
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the shell's command in a folder with a valid spec."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envscaler.yaml").write_text(GOOD)
    (tmp_path / "requirements.txt").write_text("attrs\n")
    return lambda *words: CliRunner().invoke(main, list(words), catch_exceptions=False)


def test_a_valid_spec_ends_with_zero_and_its_hash(call):
    """Nothing on standard error, one line on standard output."""
    got = call("validate")

    assert got.exit_code == 0
    assert got.output.startswith("envscaler.yaml: tiny is valid (")


def test_every_fault_is_shown_at_once_and_ends_with_two(call, tmp_path):
    """Two faults, each with file, line and path (feature A4)."""
    (tmp_path / "bad.yaml").write_text(
        "version: v1\nname: x\nresources: {requests: {memory: 4096}}\nentrypont: [a]\n"
    )

    got = call("validate", "-f", "bad.yaml")

    assert got.exit_code == 2
    assert "bad.yaml:3: resources.requests.memory:" in got.stderr
    assert "bad.yaml:4: entrypont:" in got.stderr
    assert "entrypoint" in got.stderr


def test_faults_are_json_for_tools(call, tmp_path):
    """The same faults as a list, the same exit code."""
    (tmp_path / "bad.yaml").write_text("version: v1\nname: x\nresources: {requests: {memory: 4096}}\n")

    got = call("validate", "-f", "bad.yaml", "--json")

    assert got.exit_code == 2
    answer = json.loads(got.stdout)
    assert answer["valid"] is False
    assert answer["faults"][0].startswith("bad.yaml:3: resources.requests.memory:")


def test_a_bad_parameter_is_a_fault(call):
    """Bounds of the spec's own parameters hold on the command line."""
    assert call("validate", "--set", "epochs=5").exit_code == 0
    assert call("validate", "--set", "epochs=0").exit_code == 2
    assert call("validate", "--set", "epochs").exit_code == 2


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("torch --index-url https://user:pw@wheels.example.com/simple", "contains a user or password"),
        ("-e ./mine", "installs from this machine"),
        ("-r ../outside.txt", "leads out of its folder"),
        ("-r absent.txt", "cannot be read"),
    ],
)
def test_a_requirements_file_is_checked_too(call, tmp_path, line, fault):
    """An error has file and line of what an image cannot or must not contain, and never a password."""
    (tmp_path / "requirements.txt").write_text(f"attrs\n{line}\n")

    got = call("validate")

    assert got.exit_code == 2
    assert fault in got.stderr
    assert "requirements.txt:2" in got.stderr
    assert "pw@" not in got.output


def test_renders_to_a_folder_with_scripts_that_run(call, tmp_path):
    """Names of the files are printed; the script is executable."""
    got = call("render", "--target", "venv", "--to", "out", "--set", "epochs=4")

    assert got.exit_code == 0
    assert (tmp_path / "out" / "venv.sh").stat().st_mode & 0o111
    assert (tmp_path / "out" / "requirements" / "requirements.txt").read_text() == "attrs\n"


def test_renders_the_composed_spec_with_where_each_value_came_from(call):
    """Resolved values, then file and line of each (feature A2)."""
    got = call("render", "--target", "spec")

    assert '- "3"' in got.output
    assert "# entrypoint[3]: envscaler.yaml:6" in got.output


def test_a_target_takes_its_overlay(call):
    """``targets.vm`` counts for the machine's rendering and for no other (feature A2)."""
    assert "debian:12" in call("render", "--target", "vm").output
    assert "FROM python:3.11-slim" in call("render", "--target", "docker").output


def test_a_dockerfile_copies_the_code_and_says_where_it_must_lie(call, tmp_path):
    """A stage with a workdir does not work without it."""
    (tmp_path / "envscaler.yaml").write_text(GOOD + "workdir: code\n")
    (tmp_path / "code").mkdir()

    got = call("render", "--target", "dockerfile").output

    assert "COPY --chown=10001:10001 work/ /app/\n" in got
    assert "# work/ is code beside the spec" in got


def test_a_job_needs_the_name_of_an_image_when_the_base_is_not_enough(call):
    """The message explains how to get one."""
    got = call("render", "--target", "kubernetes")

    assert got.exit_code == 2
    assert "envscaler build" in got.stderr
    assert "image: team/tiny:1" in call("render", "--target", "kubernetes", "--image", "team/tiny:1").output


@pytest.mark.parametrize(
    ("output", "reason"),
    [("a-file", "File exists"), ("a-file/out", "Not a directory"), ("loop", "File exists")],
)
def test_a_place_that_cannot_be_written_is_one_message(call, tmp_path, output, reason):
    """No traceback, exit code 2, and the path is named."""
    (tmp_path / "a-file").write_text("")
    (tmp_path / "loop").symlink_to("loop")

    got = call("render", "--target", "venv", "--to", output)

    assert got.exit_code == 2
    assert got.stderr.startswith(f"Error: {output}: {reason}; name another path")
    assert len(got.stderr.splitlines()) == 1


@pytest.mark.parametrize("requirements", ["requirements.txt", "round/requirements.txt"])
def test_links_in_a_circle_are_a_fault(call, tmp_path, requirements):
    """For the requirements file, or for its folder."""
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / requirements.partition("/")[0]).symlink_to(requirements.partition("/")[0])
    (tmp_path / "envscaler.yaml").write_text(GOOD.replace("requirements.txt", requirements))

    got = call("validate")

    assert got.exit_code == 2
    assert "its links lead round in a circle" in got.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["registry", "publish", "pipe", "team/x@1.0.0"],
        ["build", "--builder", "buildah", "--ca-file", "pipe"],
        ["registry", "publish", "/dev/zero", "team/x@1.0.0"],
    ],
)
def test_a_pipe_or_device_in_place_of_a_file_is_refused(call, tmp_path, monkeypatch, words):
    """Reading it would wait for ever, or never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "buildah").write_text("#!/bin/sh\n")
    (tmp_path / "buildah").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    got = call(*words)

    assert got.exit_code == 2
    assert "is not a plain file" in got.stderr


def test_a_scan_that_nobody_can_make_is_refused_before_the_build(call, monkeypatch, tmp_path):
    """Before the hour that the image takes."""
    monkeypatch.setenv("PATH", str(tmp_path))

    got = call("build", "--scan")

    assert got.exit_code == 2
    assert got.stderr.startswith("Error: --scan: neither trivy nor grype is installed")
