"""Builders by programs that stand in for them: how they are called, and what their answers mean."""

from __future__ import annotations

import json
import stat

import pytest

from envscaler_airflow.build.builders import Access, Buildah, Container, Docker, Order, find_builder
from envscaler_airflow.build.scan import scan_image
from envscaler_airflow.errors import BackendError, SpecError

GRYPE_FOUND = "discovered vulnerabilities at or above the severity threshold"
INSPECTED = [
    {
        "Id": "sha256:1", "RepoDigests": ["r.example.com/x@sha256:d"], "RootFS": {"Layers": ["sha256:a"]},
        "Config": {"Labels": {"k": "v"}, "Entrypoint": ["python"], "Cmd": ["train.py"]},
    }
]  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a program that writes down its words and answers by *cases* of its first words."""
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
    """Both names, as Debian has them."""
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
    """Labels, layers, the command, and the digest that its registry gave."""
    docker = Docker(program("docker", f"'image inspect'*) echo '{json.dumps(INSPECTED)}';;"))

    got = docker.inspect("x")

    assert got is not None
    assert (got.digest, got.labels, got.layers) == ("sha256:d", {"k": "v"}, ("sha256:a",))
    assert got.command == ("python", "train.py")


def test_a_container_gets_volumes_and_limits_and_secrets_by_name_alone(program):
    """No value of a variable is among the words, which everybody on the machine can read."""
    docker = Docker(program("docker"))
    container = Container(
        env={"TOKEN": "canary"}, mounts=(("/srv", "/data", True),), cpus=1.5, memory_bytes=1 << 30,
        shm_bytes=1 << 20, gpus=2,
    )  # fmt: skip

    docker.run("x", ["python", "train.py"], container, print)

    expected = (
        "run --rm --env=TOKEN --volume=/srv:/data:ro --memory=1073741824 --shm-size=1048576 "
        "--cpus=1.5 --gpus=2 --entrypoint=python x train.py"
    )
    assert program.words("docker") == [expected]


def test_buildah_removes_its_container_whatever_the_command_did(program):
    """Exit code 3 is handed on, and nothing is left; the secret is in a file that only lives meanwhile."""
    buildah = Buildah(program("buildah", "from*) echo c-1;;\nrun*) exit 3;;"))

    assert buildah.run("x", ["false"], Container(env={"TOKEN": "canary"}), print) == 3

    words = program.words("buildah")
    assert words[-1] == "rm c-1"
    assert not any("canary" in line for line in words)


def test_a_push_that_fails_says_why(program):
    """The program's own words."""
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
    """An unscanned image is no scanned one."""
    with pytest.raises(SpecError, match="neither trivy nor grype is installed"):
        scan_image(Buildah(program("buildah")), "x")
