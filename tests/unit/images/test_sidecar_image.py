"""The sidecar image: what it is built from, how it is called, and what a shell shows of it."""

import json
import os
import stat
from importlib.metadata import version

import pytest
from click.testing import CliRunner

import envscaler_airflow
from envscaler_airflow.cli import images as commands
from envscaler_airflow.cli import main
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.build import sidecar_image_name, write_context

VERSION = envscaler_airflow.__version__
DIGEST = "sha256:" + "1" * 64


class Recorder:
    """A builder that writes down what is built and pushed."""

    name = "recorder"

    def __init__(self):
        """Nothing so far."""
        self.built, self.pushed = [], []

    def build(self, order, _access, _on_line):
        """Keep the order and the names of its folder, which is gone afterwards."""
        self.built.append((order, sorted(path.name for path in order.folder.iterdir())))
        return 0

    def push(self, image, access):
        """Keep the name and whether TLS is verified."""
        self.pushed.append((image, access.tls_verify))
        return DIGEST


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """The builder of the command, with logs of its own."""
    made = Recorder()
    monkeypatch.setattr(commands, "find_builder", lambda _name: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_the_context_is_the_installed_package(tmp_path):
    """Both packages without bytecode, their entry points, and the pinned packages in their versions here."""
    write_context(tmp_path / "context")

    packages = tmp_path / "context" / "packages"
    metadata = packages / f"envscaler_airflow-{VERSION}.dist-info"
    lines = (tmp_path / "context" / "requirements.txt").read_text().splitlines()
    pins = [line.split()[0] for line in lines if "==" in line]
    assert (packages / "envscaler_agent" / "wrapper.py").is_file()
    assert (packages / "envscaler_airflow" / "sidecar").is_dir()
    assert not list(packages.rglob("__pycache__"))
    assert "[console_scripts]" in (metadata / "entry_points.txt").read_text()
    assert {"boto3", "pydantic"} <= {pin.partition("==")[0] for pin in pins}
    assert pins == [f"{name}=={version(name)}" for name in (pin.partition("==")[0] for pin in pins)]


def test_every_user_may_read_the_context(tmp_path):
    """Under any umask: the image's user is not the one who builds it."""
    before = os.umask(0o077)
    try:
        write_context(tmp_path / "context")
    finally:
        os.umask(before)

    found = list((tmp_path / "context").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} <= {0o644, 0o755}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o755}


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("registry.example.com/ml/sidecar", f"registry.example.com/ml/sidecar:{VERSION}"),
        ("registry.example.com/ml/sidecar:7", "registry.example.com/ml/sidecar:7"),
        ("registry.example.com:5000/sidecar", f"registry.example.com:5000/sidecar:{VERSION}"),
        ("ml/sidecar", f"docker.io/ml/sidecar:{VERSION}"),
    ],
)
def test_the_tag_is_the_version_unless_it_is_given(repository, name):
    """A port does not count as a tag."""
    assert sidecar_image_name(repository) == name


def test_what_is_not_a_name_is_refused_before_anything_is_built(builder):
    """By the option."""
    with pytest.raises(SpecError, match="--push 'Not A Name' is not an image name"):
        sidecar_image_name("Not A Name")

    done = CliRunner().invoke(main, ["images", "build-sidecar", "--push", "Not A Name"])

    assert (done.exit_code, builder.built) == (2, [])


def test_without_a_repository_the_image_has_the_name_of_the_setting(builder):
    """And stays on this machine."""
    done = CliRunner().invoke(main, ["images", "build-sidecar", "--build-arg", "BASE=base:1"])

    [(order, names)] = builder.built
    assert (done.exit_code, done.stdout) == (0, "envscaler/sidecar:latest\n")
    assert (order.name, order.args, builder.pushed) == ("envscaler/sidecar:latest", {"BASE": "base:1"}, [])
    assert order.labels == {"org.opencontainers.image.version": VERSION}
    assert names == ["Dockerfile", "packages", "requirements.txt"]


def test_a_pushed_image_is_named_by_its_digest(builder):
    """As the setting sidecar_image takes it."""
    words = ["images", "build-sidecar", "--push", "registry.example.com/sidecar:1", "--insecure", "--json"]

    done = CliRunner().invoke(main, words)

    name = "registry.example.com/sidecar:1"
    assert json.loads(done.stdout) == {"image": name, "digest": DIGEST, "name": f"{name}@{DIGEST}"}
    assert builder.pushed == [(name, False)]
