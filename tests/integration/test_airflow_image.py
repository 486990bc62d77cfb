"""The Airflow image, built by buildah on a base of Debian's packages and started; and the compose file."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from envscaler_airflow import get_provider_info
from envscaler_airflow.images.programs import uv_program

TOOLS = ("buildah", "mmdebstrap")
ROOT = Path(__file__).parents[2]
STARTER = ROOT / "tests/standins/airflow_start.py"
COMPOSE = ROOT / "docker/compose.yaml"
MOST_BYTES = 800 << 20
"""Chosen: Debian's packages use 150 MiB of it, Airflow with its dependencies 450 MiB."""

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("CI") and any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs {', '.join(TOOLS)}; CI installs them",
    ),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the base has Python 3.11"),
    pytest.mark.timeout(700),
]


def buildah(*words, **options):
    """Run it; returns its output."""
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory, base_tar):
    """The image, in a storage of this module alone, isolated by chroot."""
    folder = tmp_path_factory.mktemp("airflow-image")
    config = folder / "storage.conf"
    config.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(config))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        shutil.copyfile(base_tar, folder / "base.tar")
        (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
        buildah("build", "--quiet", "-f", "Base", "-t", "localhost/base:1", ".", cwd=folder)
        (folder / "base.tar").unlink()
        make_wheels(folder / "wheels")
        [pip] = (folder / "wheels").glob("pip-*.whl")
        values = {
            "BASE": "localhost/base:1",
            "PIP": f"/wheels/{pip.name}/pip",
            "PIP_FIND_LINKS": "/wheels",
            "PIP_NO_INDEX": "1",
        }
        words = [
            "build",
            "--quiet",
            "--file",
            str(ROOT / "docker/airflow.Dockerfile"),
            "--tag",
            "airflow:test",
        ]
        words += [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
        buildah(*words, "--volume", f"{folder}/wheels:/wheels:ro", str(ROOT))
        yield "airflow:test"
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")


def make_wheels(folder):
    """The packages that the image installs, for its Python, which is the same version as ours.

    uv resolves them: pip alone would read the index page of each, which takes 20 s of CPU.
    """
    folder.mkdir()
    lock, tools = folder / "pylock.toml", folder / "tools.txt"
    tools.write_text("pip\n")
    words = [uv_program(), "pip", "compile", "--quiet", "--python", sys.executable, "--only-binary", ":all:"]
    words += ["--output-file", lock, ROOT / "docker/requirements.txt", tools]
    subprocess.run(words, check=True, timeout=120, stdout=subprocess.DEVNULL)
    links = [best_wheel(package["wheels"]) for package in tomllib.loads(lock.read_text())["packages"]]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *links]
    subprocess.run(words, check=True, timeout=240)


def best_wheel(wheels):
    """URL or path of the one that this Python prefers."""
    rank = {tag: number for number, tag in enumerate(sys_tags())}
    links = [wheel.get("url") or wheel["path"] for wheel in wheels]

    def place(link):
        _, _, _, tags = parse_wheel_filename(unquote(link.rpartition("/")[2]))
        return min(rank.get(tag, len(rank)) for tag in tags)

    return min(links, key=place)


def run(image, *command, copy=None):
    """Output of a command in a container of it, as the image's own user."""
    container = buildah("from", image)
    try:
        if copy is not None:
            buildah("copy", "--quiet", container, str(copy), f"/opt/{copy.name}")
        return buildah("run", "--user", "50000:0", container, "--", *command)
    finally:
        buildah("rm", container)


def test_airflow_starts_in_it_with_the_provider(image):
    """All four parts are healthy, as an arbitrary user; provider and plugin load without errors."""
    said = run(image, "python3", "/opt/airflow_start.py", copy=STARTER)

    [line] = [line for line in said.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert set(found["health"]) == {"metadatabase", "scheduler", "triggerer", "dag_processor"}
    assert get_provider_info()["package-name"] in found["providers"]
    assert "apache-airflow-providers-cncf-kubernetes" in found["providers"]
    assert "envscaler" in found["plugins"]
    assert found["broken"] == []
    assert found["page"] == "There is no run store to read"
    assert found["version"].startswith("3.")
    assert found["user"] == 50000


def test_its_size_is_reported(image, capsys):
    """It has no compiler and no caches, and does not run as root."""
    user = buildah("inspect", "--type", "image", "--format", "{{.OCIv1.Config.User}}", image)
    size = int(run(image, "sh", "-c", "du -sbx / 2>/dev/null || true").split()[0])

    with capsys.disabled():
        sys.stdout.write(f"\nAirflow image: {size / (1 << 20):.0f} MiB\n")
    assert user == "50000:0"
    assert size < MOST_BYTES


COMMANDS = """
import argparse
from airflow.cli.cli_parser import get_parser
[commands] = [a for a in get_parser()._actions if isinstance(a, argparse._SubParsersAction)]
print(*commands.choices)
"""


def test_every_service_of_the_compose_file_is_a_command_of_the_image(image):
    """The image's user may write to the folders that they share."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    commands = sorted({service["command"][0] for service in services.values()})
    folders = {
        volume.split(":")[1]
        for service in services.values()
        for volume in service["volumes"]
        if not volume.endswith(":ro")
    }
    touch = "; ".join(f"touch {folder}/x" for folder in sorted(folders))

    known = run(image, "sh", "-ec", f"{touch}; python3 -c '{COMMANDS}'").splitlines()[-1].split()

    assert commands == ["api-server", "dag-processor", "db", "scheduler", "triggerer"]
    assert set(commands) <= set(known)
    assert folders == {"/opt/airflow", "/var/lib/envscaler"}


def test_the_compose_file_names_settings_that_exist():
    """Airflow's settings from its own list, ours from the provider's."""
    from airflow.configuration import conf

    environment = yaml.safe_load(COMPOSE.read_text())["services"]["scheduler"]["environment"]
    ours = get_provider_info()["config"]["envscaler"]["options"]
    for name in environment:
        _, section, option = name.lower().split("__")
        known = ours if section == "envscaler" else conf.configuration_description[section]["options"]
        assert option in known, name


def test_the_compose_file_is_one():
    """Docker's own program can read it; it publishes to this machine alone."""
    program = shutil.which("docker-compose")
    if program is None and not os.environ.get("CI"):
        pytest.skip("needs docker-compose; CI installs it")

    done = subprocess.run(
        [str(program), "--file", str(COMPOSE), "config"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == {"init", "api-server", "scheduler", "triggerer", "dag-processor"}
    assert [str(port) for port in services["api-server"]["ports"]] == ["127.0.0.1:8080:8080/tcp"]
    assert services["scheduler"]["build"]["args"] == {"EXTRA_REQUIREMENTS": ""}
