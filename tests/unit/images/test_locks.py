"""An image's name, sources and permissions; its lock; no builder is started."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.models import Base, Runtime
from envscaler_airflow.errors import ProtocolError, SpecError
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.build import assemble, check_base, qualified, step_of
from envscaler_airflow.images.locks import Lock, apply_lock, parse_versions
from envscaler_airflow.images.programs import ca_bundle, netrc
from envscaler_airflow.images.requirement_files import Requirements


def stage(**body):
    """A stage on Debian's Python."""
    return EnvSpec.from_dict({"version": "v1", "name": "s", "base": {"image": "python:3.11-slim"}, **body})


@pytest.mark.parametrize(
    ("base", "image", "family", "python"),
    [
        ({"image": "python:3.10-slim"}, "python:3.10-slim", "apt", "3.10"),
        ({"image": "python:3.12.1-alpine"}, "python:3.12.1-alpine", "apk", "3.12.1"),
        (
            {"image": "nvidia/cuda:11.8.0-runtime-ubuntu22.04"},
            "nvidia/cuda:11.8.0-runtime-ubuntu22.04",
            "apt",
            None,
        ),
        ({"image": "nvidia/cuda:12.4.1-base-ubi9"}, "nvidia/cuda:12.4.1-base-ubi9", "dnf", None),
        ({"distro": "debian"}, "debian:12-slim", "apt", None),
        ({"distro": "ubuntu-24.04"}, "ubuntu:24.04", "apt", None),
        ({"distro": "debian-bookworm"}, "debian:12", "apt", None),
        ({"distro": "fedora"}, "fedora:40", "dnf", None),
        ({"image": "r.example.com:5000/own:1", "distro": "alpine"}, "r.example.com:5000/own:1", "apk", None),
    ],
)
def test_what_is_known_of_a_base(base, image, family, python):
    """By its name and tag; a written distribution takes precedence."""
    got = facts(Base(**base))

    assert (got.image, got.family, got.python) == (image, family, python)


def test_an_unknown_distribution_names_the_known_ones():
    """So that the user can correct it at once."""
    with pytest.raises(SpecError, match="'plan9' is not known; write one of almalinux, alpine"):
        facts(Base(distro="plan9"))


@pytest.mark.parametrize(
    ("allowed", "passes"), [((), True), (("python:*",), True), (("nvidia/*", "debian:*"), False)]
)
def test_a_base_may_be_held_to_a_list(allowed, passes):
    """One glob must match the name as written; without a list every base is allowed."""
    if passes:
        check_base(stage(), allowed)
    else:
        with pytest.raises(SpecError, match=r"python:3\.11-slim is not allowed here"):
            check_base(stage(), allowed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("python:3.11", "docker.io/library/python:3.11"),
        ("nvidia/cuda:1", "docker.io/nvidia/cuda:1"),
        ("localhost/x", "localhost/x"),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x"),
        ("r.example.com/x", "r.example.com/x"),
    ],
)
def test_short_names_are_docker_hubs(name, expected):
    """As docker reads them; other builders do not know short names."""
    assert qualified(name) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("STEP 3/12: RUN --mount=type=cache,target=/x apt-get update", "[3/12] RUN apt-get update"),
        ("[2/2] STEP 1/9: FROM x", "[1/9] FROM x"),
        ("#7 [stage-1 2/9] RUN a", "[2/9] RUN a"),
        ("#8 CACHED", "     from cache"),
        ("--> Using cache 12ab", "     from cache"),
        ("Collecting torch", None),
    ],
)
def test_steps_of_both_builders_are_shown_alike(line, expected):
    """Everything else is in the log alone."""
    assert step_of(line) == expected


def test_equal_content_is_an_equal_context(tmp_path):
    """Times, owners and the place do not count; a byte and an executable bit do."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.py").write_text("1")
    spec = stage(workdir="work", base_dirs={"workdir": str(tmp_path)})

    first = assemble(spec, Requirements(), tmp_path / "1").content
    (work / "a.py").touch()
    assert assemble(spec, Requirements(), tmp_path / "2").content == first
    (work / "a.py").chmod(0o755)
    second = assemble(spec, Requirements(), tmp_path / "3").content
    (work / "a.py").write_text("2")
    third = assemble(spec, Requirements(), tmp_path / "4").content

    assert len({first, second, third}) == 3
    assert (tmp_path / "4" / "work" / "a.py").read_text() == "2"
    assert (tmp_path / "4" / "envscaler" / "envscaler_agent" / "session.py").is_file()


def test_credentials_are_for_the_hosts_of_the_indexes():
    """A user with a password, or a token; never without a host."""
    wanted = Requirements(
        Runtime(
            index_url="https://a.example.com/simple", extra_index_urls=("http://b.example.com:81/simple",)
        )
    )

    assert netrc(wanted, "me:pw:2") == (
        "machine a.example.com login me password pw:2\nmachine b.example.com login me password pw:2\n"
    )
    assert netrc(wanted, "tok").startswith("machine a.example.com login __token__ password tok\n")
    with pytest.raises(SpecError, match="there is no index_url"):
        netrc(Requirements(Runtime()), "tok")


def test_what_is_no_certificate_is_refused(tmp_path):
    """Before a build that could not trust any server."""
    (tmp_path / "ca.pem").write_text("no certificate")

    with pytest.raises(SpecError, match="no certificates can be read"):
        ca_bundle(tmp_path / "ca.pem")


LOCK = Lock(
    name="s", python="3.11", requirements="attrs==25.1.0 \\\n    --hash=sha256:00\n", base="b",
    base_digest="sha256:0", system_packages={"git": "1:2.39"}, image="i:1", gpus=("T4",),
)  # fmt: skip


def test_a_lock_is_read_back_and_shows_versions():
    """The same lock, and a human-readable list."""
    text = LOCK.to_text()

    assert Lock.from_text(text, "lock.json") == LOCK
    assert json.loads(text)["packages"] == {"attrs": "25.1.0"}


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"schema": "9.0"}', '{"name": "x"}'])
def test_what_is_no_lock_is_refused(text):
    """Torn, of another shape, of another version."""
    with pytest.raises(ProtocolError, match="lock"):
        Lock.from_text(text, "lock.json")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("requirements", 5, "requirements"),
        ("system_packages", "git", "system_packages"),
        ("system_packages", {"git": 5}, "system_packages.git"),
        ("python", 3.11, "python"),
        ("base_digest", [], "base_digest"),
        ("gpus", "A100", "gpus"),
    ],
)
def test_a_field_of_a_lock_that_cannot_be_is_named(field, value, named):
    """Users edit locks: no traceback, and nothing is built from it."""
    text = json.dumps({**json.loads(LOCK.to_text()), field: value})

    with pytest.raises(ProtocolError, match=rf"^lock.json is not the lock of an environment: {named}: got "):
        Lock.from_text(text, "lock.json")


def test_a_lock_pins_packages_of_both_kinds():
    """System packages by version, Python's by version and hash."""
    spec = stage(system_packages=["git"], runtimes=[{"type": "python", "packages": ["attrs"]}])

    pinned, wanted = apply_lock(spec, Requirements(spec.runtimes[0]), LOCK)

    assert pinned.system_packages == ("git=1:2.39",)
    assert wanted.text() == LOCK.requirements


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"base": {"image": "python:3.12"}}, "Python is 3.12 in the spec and 3.11 in the lock"),
        ({"system_packages": ["git", "jq"]}, "has no version of jq"),
    ],
)
def test_a_lock_of_another_environment_is_refused(body, fault):
    """It could not be rebuilt exactly."""
    with pytest.raises(SpecError, match=fault):
        apply_lock(stage(**body), Requirements(), LOCK)


@pytest.mark.parametrize(
    ("packages", "file", "absent"),
    [
        (["attrs", "NumPy>=2"], "", "numpy"),
        ([], "attrs==25.1.0 --hash=sha256:00 # pinned\nsix\nattrs[tests]\n", "six"),
        (["six"], "numpy  # later", "six, numpy"),
    ],
)
def test_a_package_that_was_written_since_is_in_no_lock(packages, file, absent):
    """An exact install would lack the package, and the training would end at its import."""
    spec = stage(runtimes=[{"type": "python", "packages": packages}])
    wanted = Requirements(spec.runtimes[0], {"r.txt": file}, "r.txt" if file else None)

    with pytest.raises(SpecError, match=f"^--locked: the lock does not hold {absent}; run without it$"):
        apply_lock(spec, wanted, LOCK)


def test_what_need_not_be_in_a_lock_is_not_missed_there():
    """Of the base, for other machines, from an address, an option, a constraint."""
    spec = stage(
        base={"image": "b", "provides": {"python": "3.11", "torch": "2.1.0"}},
        runtimes=[{"type": "python", "packages": ["Attrs", "torch", "pywin32; sys_platform == 'win32'"]}],
    )
    text = "--index-url https://example.com/simple\n-c c.txt\nx @ https://example.com/x.whl\n\n# six\n"
    wanted = Requirements(spec.runtimes[0], {"r.txt": text, "c.txt": "numpy<2\n"}, "r.txt")

    assert apply_lock(spec, wanted, LOCK)[1].locked == LOCK.requirements


def test_a_lock_of_a_machine_holds_the_packages_that_were_there():
    """The run worked without the other, and so does its repetition."""
    lock = replace(LOCK, image=None, requirements=None, system_packages={"git": "1:2.39"})

    spec, _ = apply_lock(stage(system_packages=["git", "jq"]), Requirements(), lock)

    assert spec.system_packages == ("git=1:2.39", "jq")


def test_versions_of_every_package_manager_are_read():
    """Both dpkg and rpm print name=version, apk name-version; other packages are left out."""
    assert parse_versions(["git=1:2.39", "other=1"], ["git"]) == {"git": "1:2.39"}
    assert parse_versions(["git-lfs-3.2-r1", "git-2.40-r0"], ["git", "git-lfs"]) == {
        "git-lfs": "3.2-r1",
        "git": "2.40-r0",
    }
