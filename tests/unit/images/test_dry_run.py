"""``dry-run`` reports what ``run`` needs besides its sizes, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images import venv_cache
from envscaler_airflow.images.dry_run import Here, missing_here, python_of

VOLUME = "volumes: [{{name: d, source: '{}', mount_path: {}, access_mode: ReadOnly}}]\n"
HEAD = "version: v1\nname: s\n"
BARE = Here(
    4,
    1 << 34,
    1 << 36,
    has_uv=lambda: False,
    python_of=lambda version: "/usr/bin/python" if version == "3.11" else None,
)


@pytest.fixture
def stage(tmp_path):
    """A spec of those lines in a folder with ``train.py``; and what a machine without uv lacks."""
    (tmp_path / "train.py").write_text("")

    def made(text, *, here=BARE, store_url=None):
        (tmp_path / "s.yaml").write_text(HEAD + text)
        return missing_here(load_spec(tmp_path / "s.yaml"), here=here, store_url=store_url)

    return made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workdir: .\nentrypoint: [python, trian.py]\n", "entrypoint: trian.py is not in the workdir"),
        (
            "workdir: .\nentrypoint: [python3, -u, trian.py, --x]\n",
            "entrypoint: trian.py is not in the workdir",
        ),
        ("entrypoint: [python, train.py]\n", "the spec has no workdir; write workdir: ."),
        ("workdir: code\nentrypoint: [python, train.py]\n", "is not a folder; name the folder of the code"),
        ("entrypoint: [python, /nowhere/train.py]\n", "entrypoint: /nowhere/train.py is not on this machine"),
        ("workdir: .\n", "entrypoint: is empty; write entrypoint: [python, train.py]"),
    ],
)
def test_code_that_is_not_there_is_named(stage, text, words):
    """The script, the workdir, the entrypoint (F4)."""
    (fault,) = stage(text)

    assert words in fault


@pytest.mark.parametrize(
    "text",
    [
        "workdir: .\nentrypoint: [python, train.py, --out, x.py]\n",
        "entrypoint: [python, -m, http.server]\n",
        "entrypoint: [python, -c, 'print(1)']\n",
        "entrypoint: [nvidia-smi]\n",
        f"entrypoint: [python, /code/x.py]\n{VOLUME.format('hostPath:/tmp', '/code')}",
    ],
)
def test_what_may_be_there_is_not_refused(stage, text):
    """Modules, commands, and files of volumes."""
    assert stage(text) == []


def test_dry_run_names_what_run_would_fail_for(tmp_path, monkeypatch):
    """From the shell, before anything starts: earlier it printed ``nothing missing`` (F4)."""
    (tmp_path / "s.yaml").write_text(f"{HEAD}workdir: .\nentrypoint: [python, trian.py]\n")
    monkeypatch.chdir(tmp_path)

    got = CliRunner().invoke(main, ["dry-run", "-f", "s.yaml", "--target", "local"])

    assert got.exit_code != 0
    assert "entrypoint: trian.py is not in the workdir" in got.output


def test_an_installer_that_is_not_there_is_named_with_the_extra(stage):
    """Packages need uv; a stage without any needs only a Python of its version (F4)."""
    code = "workdir: .\nentrypoint: [python, train.py]\n"
    packages = 'runtimes: [{type: python, version: "3.11", packages: [numpy]}]\n'
    other = 'runtimes: [{type: python, version: "3.10"}]\n'

    assert "pip install 'envscaler-airflow[build]'" in "".join(stage(code + packages))
    assert stage(code + packages, here=replace(BARE, has_uv=lambda: True)) == []
    assert stage(code + packages.replace(", packages: [numpy]", "")) == []
    assert stage(code + other)[0].startswith("runtimes: Python 3.10 is not here, and uv")


def test_a_store_or_volume_whose_package_is_not_there_is_named(stage, monkeypatch):
    """The same message as from `run`, but earlier (F4)."""

    def absent(url):
        raise SpecError(f"{url}: install the [amazon] extra")

    monkeypatch.setattr("envscaler_airflow.images.dry_run.open_store", absent)
    text = f"entrypoint: ['true']\n{VOLUME.format('s3://b/x', '/d')}"

    assert stage(text, store_url="s3://b/store") == [
        "store: s3://b/store: install the [amazon] extra",
        "volumes: d: s3://b/x: install the [amazon] extra",
    ]  # fmt: skip


def test_an_environment_without_packages_needs_no_uv(tmp_path, monkeypatch):
    """Python's own venv creates it, for this Python (F4)."""
    monkeypatch.setattr(venv_cache, "has_uv", lambda: False)
    monkeypatch.setattr(
        venv_cache, "python_of", lambda version: python_of("3.11") if version == "3.11" else None
    )
    (tmp_path / "none.txt").write_text("# One package a line\n\n")
    runtime = 'runtimes: [{type: python, version: "3.11", requirements: none.txt}]\n'
    (tmp_path / "s.yaml").write_text(HEAD + runtime)
    (tmp_path / "t.yaml").write_text(HEAD + 'runtimes: [{type: python, version: "3.10"}]\n')

    made = venv_cache.ensure(load_spec(tmp_path / "s.yaml"), tmp_path / "cache")

    assert made.exists()
    assert venv_cache.locked_requirements(made) == ""
    with pytest.raises(
        SpecError, match=r"Python 3.10 is not here; run `pip install 'envscaler-airflow\[build\]'`"
    ):
        venv_cache.ensure(load_spec(tmp_path / "t.yaml"), tmp_path / "cache")
