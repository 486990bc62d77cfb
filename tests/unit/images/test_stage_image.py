"""Which image a stage on a cluster runs in."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.requirement_files import read_requirements
from envscaler_airflow.images.targets import image_name, with_image

build_command = import_module("envscaler_airflow.cli.images")
REPOSITORY = "registry.example.com/team/"


@pytest.fixture
def spec(tmp_path):
    """Makes a spec of *text*, beside its code and requirements."""

    def make(text="", *, packages="numpy==2.1.0\n"):
        (tmp_path / "requirements.txt").write_text(packages)
        (tmp_path / "train.py").write_text("print(1)")
        whole = f"version: v1\nname: My_Stage\nentrypoint: [python, train.py]\nworkdir: .\n{text}"
        (tmp_path / "spec.yaml").write_text(whole)
        return load_spec(tmp_path / "spec.yaml")

    return make


BASE = 'base: {image: "python:3.11-slim"}\n'
INSTALLS = "runtimes: [{type: python, requirements: requirements.txt}]\n"


def test_a_base_on_which_nothing_is_installed_is_the_image(spec):
    """The code comes with the run."""
    plain = spec(BASE)

    assert with_image(plain, image=None, repository=REPOSITORY) == plain
    assert with_image(plain, image=None, repository=None) == plain


def test_what_installs_packages_runs_in_its_built_image(spec):
    """Named without a builder: by its packages and its base."""
    made = with_image(spec(BASE + INSTALLS), image=None, repository=REPOSITORY)

    assert re.fullmatch(r"registry\.example\.com/team/my-stage:env-[0-9a-f]{16}", made.base.image)


def test_the_name_follows_the_environment_and_not_the_code(spec, tmp_path):
    """Another requirement, another base: another image. Another line of code: the same."""

    def name(text=BASE + INSTALLS, **more):
        one = spec(text, **more)
        return image_name(one, read_requirements(one), REPOSITORY)

    first = name()
    (tmp_path / "more.py").write_text("print(2)")
    names = [first, name(packages="numpy==2.2.0\n"), name(BASE.replace("3.11", "3.12") + INSTALLS)]

    assert name() == first
    assert len(set(names)) == 3
    assert name(BASE + INSTALLS + "system_packages: [git]\n") not in names


def test_the_deployments_image_is_that_of_every_stage(spec):
    """The deployment vouches that it contains what stages need."""
    assert with_image(spec(INSTALLS), image="all:1", repository=REPOSITORY).base.image == "all:1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BASE + INSTALLS, "its packages are not in base.image, and no image with them is known"),
        ("", r"the spec names no base\.image"),
    ],
)
def test_nothing_is_run_without_its_packages(spec, text, why):
    """The message says what to set."""
    with pytest.raises(
        SpecError, match=f"My_Stage: a pod needs an image, and none is known: {why}; build it"
    ):
        with_image(spec(text), image=None, repository=None)


@pytest.mark.parametrize("given", [(), ("-t", "registry.example.com/own:1")])
def test_a_build_takes_the_name_that_the_stage_will_look_for(spec, tmp_path, monkeypatch, given):
    """Unless the user sets another."""
    one = spec(BASE + INSTALLS)
    names = []

    def build_image(_spec, _requirements, _builder, options, **_more):
        names.append(options.name)
        raise SpecError("no builder in this test")

    monkeypatch.setattr(build_command, "find_builder", lambda _name: None)
    monkeypatch.setattr(build_command, "build_image", build_image)
    monkeypatch.setenv("ENVSCALER_IMAGE_REPOSITORY", REPOSITORY)

    CliRunner().invoke(main, ["build", "-f", str(tmp_path / "spec.yaml"), "--no-resolve", *given])

    looked_for = with_image(one, image=None, repository=REPOSITORY).base.image
    assert names == [given[1] if given else looked_for]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-t", "bad name"], "-t 'bad name' is not an image name; write registry.example.com/team/name"),
        (["--cache", "--all"], "--cache '--all' is not an image name; write registry.example.com/team/name"),
        (
            ["--lock", "absent/lock.json"],
            "--lock absent/lock.json: cannot be written; name a file in a folder",
        ),
        (["--push"], "--push: there is no -t; write -t registry.example.com/team/name"),
        (["--push", "-t", "team/x"], "--push: -t team/x is in no registry; write -t registry.example.com/"),
        (["--push", "-t", "localhost/x"], "--push: -t localhost/x is in no registry; write -t registry"),
        (["--push", "-t", "localhost:5000/x"], "docker or buildah is not available here; install it"),
        (["--lock", "."], "--lock .: cannot be written; name a file in a folder"),
        ([], "docker or buildah is not available here; install it"),
    ],
)
def test_what_a_build_will_lack_is_told_before_its_work(spec, tmp_path, monkeypatch, words, told):
    """It resolves, fetches and builds nothing."""
    spec(BASE + INSTALLS)
    monkeypatch.setattr(build_command, "check_environment", lambda *_words, **_more: pytest.fail("resolved"))
    monkeypatch.setenv("PATH", str(tmp_path))

    got = CliRunner().invoke(main, ["build", "-f", str(tmp_path / "spec.yaml"), *words])

    assert got.exit_code == 2
    assert got.stderr.startswith(f"Error: {told}")
