"""The registry: immutable versions, one winner, ranges, and a cache that works without a store."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from envscaler_airflow.cli import main
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.images.spec_registry import (
    SpecRegistry,
    shipped_names,
    split_reference,
)
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing.faulty_store import FaultyStore

MODULE = "version: v1\nsystem_packages: [git]\n"


class Offline:
    """An unreachable store."""

    def __init__(self, url: str) -> None:
        """Keep the URL of the unreachable store."""
        self.url = url

    def __getattr__(self, name: str):
        """Every call fails as with an unplugged cable."""

        def fail(*_args: object, **_options: object) -> None:
            raise StoreError("no route to host", transient=True)

        return fail


@pytest.fixture
def store(tmp_path):
    """A store in a folder."""
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def registry(store, tmp_path):
    """A registry on it, with a cache of its own and a stopped clock."""
    return SpecRegistry(lambda: store, cache=tmp_path / "cache", clock=lambda: 1_700_000_000.0)


def test_a_published_version_is_found_by_range(registry):
    """1.2 means the newest 1.2.x."""
    for version in ("1.2.0", "1.2.4", "1.3.0"):
        registry.publish("team/base", version, f"{MODULE}# {version}\n")

    assert registry.pull("registry://team/base@1.2").read_text() == f"{MODULE}# 1.2.4\n"
    assert [str(version) for version in registry.versions("team/base")] == ["1.2.0", "1.2.4", "1.3.0"]


def test_a_version_never_changes(registry):
    """Another text under the same version is refused with its publisher; the same text is not an error."""
    registry.publish("team/base", "1.0.0", MODULE, by="ana")

    with pytest.raises(
        SpecError, match=r"published by ana on 2023-11-14 22:13 UTC with other content.*write.* 1\.0\.1"
    ):
        registry.publish("team/base", "1.0.0", MODULE + "# changed\n")

    assert registry.publish("team/base", "1.0.0", MODULE).by == "ana"
    assert registry.find("team/base@1.0.0").text == MODULE


def test_of_two_publishers_at_once_one_wins_and_the_other_is_informed(registry):
    """Eight threads, eight texts, one version: one entry, seven clear errors."""

    def publish(number: int) -> str | None:
        try:
            return registry.publish("team/race", "1.0.0", f"{MODULE}# {number}\n").text
        except SpecError as err:
            return None if "with other content" in str(err) else "another error"

    with ThreadPoolExecutor(8) as pool:
        won = [text for text in pool.map(publish, range(8)) if text is not None]

    assert won == [registry.find("team/race@1.0.0").text]


def test_a_lost_answer_is_settled_by_reading_back(store, tmp_path):
    """The store wrote it and the answer was lost: published, not refused."""
    faulty = FaultyStore(store)
    faulty.add("lose-answer", "create")
    registry = SpecRegistry(lambda: faulty, cache=tmp_path / "cache")

    assert registry.publish("team/base", "1.0.0", MODULE, by="me").by == "me"


def test_an_unreachable_store_is_never_a_success(store, tmp_path):
    """Nothing was written and nothing can be read back: an error reports it."""
    faulty = FaultyStore(store)
    SpecRegistry(lambda: store, cache=tmp_path / "cache").publish("team/other", "1.0.0", MODULE)
    faulty.add("refuse", "create")
    registry = SpecRegistry(lambda: faulty, cache=tmp_path / "cache")

    with pytest.raises(StoreError, match="it is unknown whether it was published; try again: ") as told:
        registry.publish("team/base", "1.0.0", MODULE)
    assert "create" in str(told.value)


def test_the_cache_works_offline(registry, store, tmp_path):
    """An entry that was pulled once needs no store: exact, by range, and through a spec (feature A8)."""
    registry.publish("team/base", "1.2.0", MODULE)
    registry.pull("team/base@1.2")
    offline = SpecRegistry(lambda: Offline(store.url), cache=tmp_path / "cache")
    spec = tmp_path / "envscaler.yaml"
    spec.write_text("version: v1\nname: s\nbase: {image: i}\nextends: [registry://team/base@^1]\n")

    assert offline.find("team/base@1.2.0").text == MODULE
    assert load_spec(spec, registry=offline).system_packages == ("git",)
    spec.write_text("version: v1\nname: s\nbase: {image: i}\nextends: [registry://team/base@2]\n")
    with pytest.raises(
        SpecError, match=r"envscaler.yaml:4: extends\[0\]: .*cache has no such version"
    ) as told:
        load_spec(spec, registry=offline)
    assert str(told.value).count("registry://team/base@2") == 1
    with pytest.raises(StoreError, match="team/base@2: the cache has no such version, and no route to host"):
        offline.find("team/base@2")


def test_a_spoilt_copy_is_fetched_again(registry, tmp_path):
    """A copy whose text does not match its hash counts as absent."""
    registry.publish("team/base", "1.0.0", MODULE)
    registry.pull("team/base@1.0.0")
    copy = next((tmp_path / "cache").rglob("1.0.0.json"))
    copy.write_text(copy.read_text().replace("git", "evil"))

    assert registry.pull("team/base@1.0.0").read_text() == MODULE


def test_an_entry_that_was_tampered_with_is_refused(registry, store):
    """The store's bytes are data: a text that does not match its hash is never used."""
    registry.publish("team/base", "1.0.0", MODULE)
    name = store.names("registry.v1")[0]
    body = json.loads(store.read(name))
    store.write(name, json.dumps({**body, "text": MODULE + "# evil\n"}).encode())

    with pytest.raises(ProtocolError, match="not what its sha256 says"):
        registry.find("team/base@1.0.0")


@pytest.mark.parametrize(
    "reference",
    [
        "../x@1",
        "team/../x@1",
        "team",
        "Team/x",
        "team/x@",
        "/team/x",
        "team//x",
        "registry://team/x y",
        "a/b\n@1",
        "t/..@1",
    ],
)
def test_a_reference_that_could_leave_its_folder_is_refused(reference):
    """Names are plain words between slashes."""
    with pytest.raises(SpecError, match="is not a registry reference"):
        split_reference(reference)


def test_nobody_publishes_under_the_shipped_name(registry):
    """``envscaler/...`` is what came with the package."""
    with pytest.raises(SpecError, match="cannot be published"):
        registry.publish("envscaler/python", "9.0.0", MODULE)


def test_a_missing_version_names_those_that_exist(registry):
    """So that the user can correct the reference at once."""
    registry.publish("team/base", "1.0.0", MODULE)

    with pytest.raises(SpecError, match=r"no such version .*; write one of 1\.0\.0"):
        registry.find("team/base@2")


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_module_loads_in_every_variant(name, tmp_path):
    """With its defaults, for each of its targets, and without a store."""
    spec = tmp_path / "envscaler.yaml"
    spec.write_text(f"version: v1\nname: s\nbase: {{image: debian}}\nmodules: [registry://{name}@1]\n")
    registry = SpecRegistry(lambda: Offline("s3://away"), cache=tmp_path / "cache")

    for target in (None, "local", "docker", "kubernetes", "vm"):
        assert load_spec(spec, target=target, registry=registry).name == "s"


def test_the_shell_publishes_lists_shows_and_pulls(tmp_path, monkeypatch):
    """The whole way, with a module in a file and a spec that uses it by range (feature A8)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{tmp_path}/store")
    (tmp_path / "module.yaml").write_text(MODULE)
    (tmp_path / "envscaler.yaml").write_text(
        "version: v1\nname: s\nbase: {image: i}\nmodules: [registry://team/base@1]\n"
    )
    call = lambda *words: CliRunner().invoke(main, list(words), catch_exceptions=False)  # noqa: E731 (one line)

    assert call("registry", "publish", "module.yaml", "team/base@1.2.0").output.startswith(
        "registry://team/base@1.2.0"
    )
    assert "team/base: 1.2.0\n" in call("registry", "list").output
    assert call("registry", "show", "team/base@1").output.endswith(MODULE)
    assert call("validate").exit_code == 0
    call("registry", "pull", "team/base@1", "--to", "copy.yaml")
    assert (tmp_path / "copy.yaml").read_text() == MODULE


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("version: v1\nworkdir: .\n", "workdir: is a folder"),
        ("version: v1\nextends: [./other.yaml]\n", "is a file; publish it"),
        ("version: v1\nruntimes: [{type: python, requirements: r.txt}]\n", "requirements: is a file"),
        ("version: v1\nentrypont: [a]\n", "module.yaml:2: entrypont"),
        (
            "version: v1\nenv: [{name: API_KEY, value: abcdefgh12345678}]\n",
            "a literal under the secret's name",
        ),
    ],
)
def test_what_means_nothing_elsewhere_is_not_published(tmp_path, monkeypatch, text, fault):
    """Files beside the document, unknown fields and secrets, with the file that the user named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module.yaml").write_text(text)

    got = CliRunner().invoke(
        main, ["registry", "--store", f"file://{tmp_path}/store", "publish", "module.yaml", "t/m@1.0.0"]
    )

    assert got.exit_code == 2
    assert fault in got.output
    assert not (tmp_path / "store").exists()
