"""A real docker daemon of this module alone: images built, pushed, pulled back and run; stages in them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from click.testing import CliRunner
from moto.server import ThreadedMotoServer

from envscaler_airflow.cli import main
from envscaler_airflow.images.builders import Access, Container, Docker
from envscaler_airflow.images.programs import uv_program

TOOLS = ("dockerd", "mmdebstrap", "docker-registry")
CANARY = "zq7canaryzq7"
OPEN_FILES = 20_000
"""Debian's containerd of bookworm takes hours to start below a limit of a million open files."""
START_S = 60

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("CI") and (os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS)),
        reason=f"needs {', '.join(TOOLS)} and root; CI has them",
    ),
    pytest.mark.timeout(300),
]


def client_of_daemon() -> str:
    """A docker client that can build on this machine: Debian's includes BuildKit, newer ones need buildx."""
    for folder in os.environ["PATH"].split(os.pathsep):
        program = Path(folder, "docker")
        if not os.access(program, os.X_OK):
            continue
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        buildx = subprocess.run([program, "buildx", "version"], capture_output=True, check=False)
        if buildx.returncode == 0 or int(version.split("version ")[1].partition(".")[0]) < 23:
            return str(program)
    pytest.fail("no docker client here can build; install docker.io")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A dockerd with socket, storage and state of its own; it changes no bridge and no firewall."""
    root = tmp_path_factory.mktemp("dockerd")
    socket = f"unix://{root}/docker.sock"
    (root / "bin").mkdir()
    (root / "bin" / "docker").symlink_to(client_of_daemon())
    (root / "config.json").write_text("{}")
    words = ["dockerd", "--host", socket, "--data-root", f"{root}/data", "--exec-root", f"{root}/exec"]
    words += ["--pidfile", f"{root}/pid", "--config-file", f"{root}/config.json", "--bridge", "none"]
    words += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    limited = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh", *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{root}/bin{os.pathsep}{os.environ['PATH']}")
        patch.setenv("DOCKER_HOST", socket)
        patch.setenv("DOCKER_CONFIG", str(root / "client"))
        patch.setenv("ENVSCALER_DOCKER_NETWORK", "host")
        patch.setenv("ENVSCALER_BUILDER", "docker")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("UV_CACHE_DIR", str(root / "uv"))
        with (root / "log").open("w") as log:
            process = subprocess.Popen(limited, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_S
            while (fault := Docker().fault()) is not None:
                said = (root / "log").read_text()[-2000:]
                assert process.poll() is None, said
                assert time.monotonic() < until, f"{fault}: {said}"
                time.sleep(0.2)
            yield root
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if line.split()[1].startswith(f"{root}/"):
            subprocess.run(["umount", line.split()[1]], check=True)
    shutil.rmtree(root)


def docker(*words: str) -> str:
    """Output of the client, which must succeed."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def base(daemon, registry, base_tar, tmp_path_factory):
    """Debian with Python as an image in the registry and pulled from there; the installer as another."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copy(uv_program(), folder / "uv")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY uv /uv\n")
    docker("import", str(base_tar), f"{registry}/base:1")
    docker("build", "--quiet", "-t", f"{registry}/uv:1", str(folder))
    for name in ("base", "uv"):
        docker("push", "--quiet", f"{registry}/{name}:1")
    docker("rmi", f"{registry}/base:1")
    assert Docker().pull(f"{registry}/base:1", Access()) is None
    return f"{registry}/base:1"


@pytest.fixture
def project(base, registry, wheels, tmp_path, monkeypatch):
    """A stage with a requirement and a program, and the shell's commands on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("ENVSCALER_UV_IMAGE", f"{registry}/uv:1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "main.py").write_text(
        "import greeting, os\nprint(greeting.text, os.getuid(), os.environ['MODE'])\n"
    )
    body = {
        "version": "v1", "name": "tiny", "base": {"image": base}, "workdir": "work",
        "runtimes": [
            {
                "type": "python", "version": "3.11", "package_manager": "uv", "packages": ["greeting>=1"],
                "index_url": wheels.index.url,
            }
        ],
        "env": {"MODE": "test"}, "entrypoint": ["python", "main.py"],
    }  # fmt: skip

    def write(**more) -> None:
        (tmp_path / "envscaler.yaml").write_text(json.dumps(body | more))

    def call(*words: str, code: int = 0):
        got = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert got.exit_code == code, got.output
        return SimpleNamespace(out=got.stdout, said=got.stderr)

    write()
    return SimpleNamespace(folder=tmp_path, write=write, call=call, registry=registry, body=body)


def run(project, *words: str, code: int = 0):
    """``envscaler run --target docker``."""
    return project.call("run", "-f", "envscaler.yaml", "--target", "docker", *words, code=code)


def run_entrypoint(name: str) -> list[str]:
    """Output of the image's own command."""
    image = Docker().inspect(name)
    assert image is not None
    lines: list[str] = []
    assert Docker().run(name, image.command, Container(), lines.append) == 0, lines
    return lines


def test_an_image_is_built_pushed_pulled_back_and_run(project):
    """Its program runs as a user other than root; an unchanged spec builds nothing."""
    name = f"{project.registry}/team/tiny"
    pushed = project.call("build", "-t", name, "--push").out.strip()
    assert "unchanged, nothing to build" in project.call("build", "-t", name, "--push").said
    tagged, _, digest = pushed.partition("@")
    docker("rmi", tagged)

    assert Docker().inspect(tagged) is None
    assert Docker().pull(f"{name}@{digest}", Access()) is None
    assert run_entrypoint(f"{name}@{digest}") == ["hello 10001 test"]


def test_only_what_changed_is_built_again(project):
    """A changed source file costs one layer, by the digests of all."""
    first = project.call("build").out.strip()
    (project.folder / "work" / "main.py").write_text("print('changed')\n")

    second = project.call("build")

    of_first, of_second = (Docker().inspect(name).layers for name in (first, second.out.strip()))
    assert of_second[:-1] == of_first[:-1]
    assert of_second[-1] != of_first[-1]
    assert second.said.count("from cache") >= 4
    assert run_entrypoint(second.out.strip()) == ["changed"]


def test_layers_travel_through_a_registry(project):
    """Without this machine's own cache, every layer of the packages comes from the first build's cache."""
    (project.folder / "work" / "main.py").write_text("print('cached')\n")
    cache = f"{project.registry}/cache/tiny"
    name = project.call("build", "--cache", cache).out.strip()
    docker("rmi", name, cache)
    docker("builder", "prune", "--all", "--force")

    again = project.call("build", "--cache", cache)

    assert again.said.count("from cache") >= 4
    assert run_entrypoint(again.out.strip()) == ["cached"]


def test_a_stage_runs_with_volumes_variables_limits_and_a_secret(project, monkeypatch):
    """The secret reaches the command, but no command line, layer, label, lock or log."""
    (project.folder / "data").mkdir()
    (project.folder / "data" / "x").write_text("from the host")
    for folder in (project.folder, project.folder / "data"):
        folder.chmod(0o755)
    monkeypatch.setenv("TOKEN", CANARY)
    project.write(
        env=[
            {"name": "MODE", "value": "two words; $HOME"},
            {"name": "KEY", "value_from": "env:TOKEN"},
            {"name": "DOCKER_HOST", "value": "tcp://stage"},
        ],
        volumes=[
            {"name": "data", "source": f"hostPath:{project.folder}/data", "mount_path": "/data",
             "access_mode": "ReadOnly"},
        ],
        resources={"limits": {"cpu": 1, "memory": "256Mi"}, "shm_size": "32Mi"},
        outputs={"note": "/output/note"},
    )  # fmt: skip
    script = (
        "cat /data/x; touch /data/y 2>/dev/null && echo written; echo; echo $MODE; echo $DOCKER_HOST; "
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; "
        "df -k /dev/shm | tail -1 | awk '{print $2}'; echo made > /output/note; test $KEY = " + CANARY
    )

    got = run(project, "--name", "first", "--", "sh", "-c", script)

    lines = ["from the host", "two words; $HOME", "tcp://stage", str(256 << 20), str(32 << 10)]
    assert got.out.splitlines() == lines
    assert (project.folder / "envscaler-outputs" / "first" / "output" / "note").read_text() == "made\n"
    lock = json.loads(next((project.folder / "store").rglob("lock.json")).read_text())
    assert lock["packages"] == {"greeting": "1.0"}
    assert CANARY not in docker("image", "inspect", lock["image"]) + docker("history", lock["image"])
    left = subprocess.run(
        ["grep", "-rlF", CANARY, str(project.folder), os.environ["XDG_CACHE_HOME"]],
        capture_output=True, check=False,
    )  # fmt: skip
    assert left.stdout == b""
    assert run(project, "--name", "second", "--", "sh", "-c", "exit 7", code=7)
    assert docker("ps", "--all", "--quiet") == ""


def test_a_bucket_is_copied_in_for_the_time_of_the_run(project, monkeypatch, tmp_path):
    """The sidecar's own code does it; writable volumes are copied back after a success."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpus")
        client.put_object(Bucket="corpus", Key="glue/train/part-0", Body=b"rows of s3")
        volume = {"name": "data", "source": "s3://corpus/glue", "mount_path": "/data"}
        project.write(volumes=[volume])
        got = run(project, "--", "sh", "-c", "cat /data/train/part-0; echo; env | grep AWS_ || true")
        refused = run(project, "--", "sh", "-c", "echo more > /data/train/part-1", code=2)
        project.write(volumes=[{**volume, "access_mode": "ReadWriteMany"}])
        run(project, "--", "sh", "-c", "echo lost > /data/lost; exit 3", code=3)
        run(project, "--", "sh", "-c", "echo more > /data/train/part-1; echo new > /data/train/part-0")
        listed = client.list_objects_v2(Bucket="corpus")["Contents"]
        changed = client.get_object(Bucket="corpus", Key="glue/train/part-0")["Body"].read()
        client.close()
    finally:
        server.stop()

    assert got.out.splitlines() == ["rows of s3"]
    assert "Read-only file system" in refused.out
    assert [item["Key"] for item in listed] == ["glue/train/part-0", "glue/train/part-1"]
    assert changed == b"new\n"
    assert list(Path("/var/tmp").glob("envscaler-volumes-*")) == []


def test_a_command_that_is_interrupted_ends_and_leaves_no_container(project):
    """Ctrl-C reaches the command; nothing keeps running."""
    words = [sys.executable, "-m", "envscaler_airflow.cli", "run", "-f", "envscaler.yaml"]
    words += ["--target", "docker", "--", "sh", "-c", "echo begun; sleep 250"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"

            process.send_signal(signal.SIGINT)

            assert process.wait(60) != 0
            assert docker("ps", "--all", "--quiet") == ""
        finally:
            process.kill()
