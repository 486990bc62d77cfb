"""Builders replaced by stand-in programs: how they are called, and the meaning of their answers."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images import builders
from envscaler_airflow.images.build import scan_image
from envscaler_airflow.images.builders import (
    Access,
    Buildah,
    Container,
    Docker,
    Order,
    find_builder,
)

GRYPE_FOUND = "discovered vulnerabilities at or above the severity threshold"
INSPECTED = [
    {
        "Id": "sha256:1", "RepoDigests": ["r.example.com/x@sha256:d"], "RootFS": {"Layers": ["sha256:a"]},
        "Config": {"Labels": {"k": "v"}, "Entrypoint": ["python"], "Cmd": ["train.py"]},
    }
]  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a program that records its arguments and answers by *cases* of its first ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("ENVSCALER_BUILDER", raising=False)

    def make(name: str, cases: str = "") -> str:
        path = folder / name
        path.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.words\ncase "$*" in\n{cases}\nesac\nexit 0\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    make.words = lambda name: (tmp_path / f"{name}.words").read_text().splitlines()
    return make


def test_docker_is_taken_where_its_daemon_answers_else_buildah(program):
    """A client without a daemon builds nothing."""
    program("buildah")
    program("docker")
    assert find_builder(None).name == "docker"

    program("docker", "version*) exit 1;;")
    assert find_builder(None).name == "buildah"
    with pytest.raises(SpecError, match="daemon does not answer"):
        find_builder("docker")


def test_without_a_builder_it_is_said_what_to_install(monkeypatch, tmp_path):
    """Both names, as in Debian."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SpecError, match=r"install it \(Debian: docker.io, buildah\)"):
        find_builder(None)


def test_docker_without_buildx_keeps_its_layers_in_the_cache_image(program, tmp_path):
    """Inline cache, and the image pushed under the cache's name."""
    docker = Docker(program("docker", "'buildx version') exit 1;;\n'image inspect'*) exit 1;;"))
    order = Order(tmp_path, "r/x:1", labels={"l": "1"}, secrets={"s": tmp_path / "f"}, cache="r/cache")

    assert docker.build(order, Access(), print) == 0

    words = program.words("docker")
    assert words[1] == (
        f"build --progress=plain --tag r/x:1 --label l=1 --secret id=s,src={tmp_path}/f "
        f"--cache-from r/cache --build-arg BUILDKIT_INLINE_CACHE=1 {tmp_path}"
    )
    assert words[2:4] == ["tag r/x:1 r/cache", "push --quiet r/cache"]


def test_docker_with_buildx_sends_every_layer_to_the_registry(program, tmp_path):
    """mode=max keeps the layers of all stages."""
    docker = Docker(program("docker"))

    docker.build(Order(tmp_path, "r/x:1", cache="r/cache"), Access(), print)

    assert program.words("docker")[1] == (
        "buildx build --load --progress=plain --tag r/x:1 --cache-from type=registry,ref=r/cache "
        f"--cache-to type=registry,ref=r/cache,mode=max {tmp_path}"
    )


def test_docker_tells_what_an_image_is(program):
    """Labels, layers, the command, and the digest from its registry."""
    docker = Docker(program("docker", f"'image inspect'*) echo '{json.dumps(INSPECTED)}';;"))

    got = docker.inspect("x")

    assert got is not None
    assert (got.digest, got.labels, got.layers) == ("sha256:d", {"k": "v"}, ("sha256:a",))
    assert got.command == ("python", "train.py")


def test_a_container_gets_volumes_and_limits_and_secrets_by_name_alone(program):
    """The arguments, which every user of the machine can read, contain no value of a variable."""
    docker = Docker(program("docker", "info*) echo N/A;;"))
    container = Container(
        env={"TOKEN": "canary", "KEY": "canary\nof two lines"}, mounts=(("/srv/a,b", "/data", True),),
        cpus=1.5, memory_bytes=1 << 30, shm_bytes=1 << 20, gpus=2,
    )  # fmt: skip

    docker.run("x", ["python", "train.py"], container, print)

    words = re.sub(r"envscaler-[0-9a-f]{12}|(?<=env-file=)\S+", "X", program.words("docker")[-1])
    assert words == (
        "run --rm --name X --env-file=X --env=KEY "
        '--mount=type=bind,"source=/srv/a,b",target=/data,readonly --memory=1073741824 --shm-size=1048576 '
        "--cpus=1.5 --gpus=2 --entrypoint=python x train.py"
    )


def test_variables_of_a_stage_are_not_those_of_docker_itself(program, tmp_path):
    """A stage's DOCKER_HOST and PATH are in the file for the container, which only its owner can read."""
    docker = Docker(
        program(
            "docker", f'run*) env > {tmp_path}/own; ls -l "${{5#*=}}" > {tmp_path}/mode; cat "${{5#*=}}";;'
        )
    )
    lines: list[str] = []

    docker.run("x", [], Container(env={"DOCKER_HOST": "tcp://canary", "PATH": "/canary"}), lines.append)

    assert lines == ["DOCKER_HOST=tcp://canary", "PATH=/canary"]
    assert "canary" not in (tmp_path / "own").read_text()
    assert (tmp_path / "mode").read_text().startswith("-rw------- ")


def test_an_interrupted_run_leaves_no_container(program):
    """Exactly that run's container is removed, however our process ends."""
    docker = Docker(program("docker", "run*) echo line; sleep 0.1;;"))

    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        docker.run("x", [], Container(), stop)

    words = program.words("docker")
    name = re.search(r"--name (\S+)", words[-2])
    assert name is not None
    assert words[-1] == f"rm --force {name[1]}"


def test_a_daemon_without_an_init_runs_commands_without_one(program):
    """Debian's docker.io has it in another package."""
    for told, has_init in [("N/A", False), ("", True), ("de40ad0", True)]:
        docker = Docker(program("docker", f"info*) echo '{told}';;"))
        docker.run("x", [], Container(), print)
        assert ("--init" in program.words("docker")[-1].split()) == has_init, told


def test_docker_that_cannot_build_is_not_taken(program):
    """From version 23 on the client builds by buildx alone; the message names what to install."""
    program("buildah")
    for version, has_buildx, name in [
        ("28.2.2", 0, "docker"),
        ("28.2.2", 1, "buildah"),
        ("20.10", 1, "docker"),
    ]:
        program("docker", f"version*) echo {version};;\n'buildx version') exit {has_buildx};;")
        assert find_builder(None).name == name, version

    program("docker", "version*) echo 28.2.2;;\n'buildx version') exit 1;;")
    with pytest.raises(SpecError, match="install buildx"):
        find_builder("docker")


def test_the_digest_is_that_of_the_images_own_registry(program):
    """One image in two registries has two: a push to one is not a push to the other."""
    body = [{**INSPECTED[0], "RepoDigests": ["a.example.com/x@sha256:1", "b.example.com:5000/x@sha256:2"]}]
    docker = Docker(program("docker", f"'image inspect'*) echo '{json.dumps(body)}';;"))

    got = [docker.inspect(name).digest for name in ("a.example.com/x:1", "b.example.com:5000/x", "x")]

    assert got == ["sha256:1", "sha256:2", "sha256:1"]


def test_buildah_says_what_it_cannot_do(program):
    """No GPU, and no path that it would split; nothing is started."""
    buildah = Buildah(program("buildah", "from*) echo c-1;;"))

    with pytest.raises(SpecError, match="hands no GPU"):
        buildah.run("x", ["true"], Container(gpus=1), print)
    with pytest.raises(SpecError, match="':' in a path"):
        buildah.run("x", ["true"], Container(mounts=(("/srv/a:b", "/d", True),)), print)

    assert not any(line.startswith("run") for line in program.words("buildah"))


def test_variables_can_be_read_by_the_image_s_user_whatever_the_umask_is(program, monkeypatch):
    """The file is mounted unchanged; only its owner can enter its folder."""
    seen = []

    def stream(words, *_given, **_named):
        path = Path(next(word for word in words if word.endswith(":/run/secrets/variables:ro")).split(":")[0])
        seen.extend([path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777])
        return 0

    monkeypatch.setattr(builders, "stream_program", stream)
    before = os.umask(0o077)
    try:
        Buildah(program("buildah", "from*) echo c-1;;")).run("x", ["true"], Container(env={"A": "b"}), print)
    finally:
        os.umask(before)

    assert seen == [0o644, 0o700]


def test_buildah_removes_its_container_whatever_the_command_did(program):
    """Exit code 3 is passed on, and nothing remains; the secret is in a temporary file."""
    buildah = Buildah(program("buildah", "from*) echo c-1;;\nrun*) exit 3;;"))

    assert buildah.run("x", ["false"], Container(env={"TOKEN": "canary"}), print) == 3

    words = program.words("buildah")
    assert words[-1] == "rm c-1"
    assert not any("canary" in line for line in words)


def test_a_push_that_fails_says_why(program):
    """The program's own message."""
    buildah = Buildah(program("buildah", "push*) echo denied >&2; exit 125;;"))

    with pytest.raises(BackendError, match="cannot be pushed: denied"):
        buildah.push("x", Access())


@pytest.mark.parametrize(
    ("scanner", "cases", "expected"),
    [
        ("trivy", "*) echo clean;;", None),
        ("trivy", "*) echo CVE-1; exit 10;;", "vulnerabilities of severity high or above"),
        ("grype", f"*) echo {GRYPE_FOUND} >&2; exit 2;;", "vulnerabilities of severity high or above"),
        ("trivy", "*) echo no database >&2; exit 1;;", "trivy failed"),
    ],
)  # fmt: skip
def test_a_scan_passes_fails_or_breaks(program, scanner, cases, expected):
    """Findings stop the build, a broken scanner does too, and only a clean report passes."""
    program(scanner, cases)
    builder = Buildah(program("buildah"))

    if expected is None:
        assert scan_image(builder, "x") == "clean"
    else:
        with pytest.raises((SpecError, BackendError), match=expected):
            scan_image(builder, "x")


def test_a_scan_asks_for_the_severity_and_all_above(program):
    """Medium means medium, high and critical."""
    program("trivy")

    scan_image(Buildah(program("buildah")), "x", severity="medium")

    assert "--severity MEDIUM,HIGH,CRITICAL" in program.words("trivy")[0]


def test_without_a_scanner_nothing_passes(program):
    """An unscanned image does not count as scanned."""
    with pytest.raises(SpecError, match="neither trivy nor grype is installed"):
        scan_image(Buildah(program("buildah")), "x")
