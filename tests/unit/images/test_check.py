"""What a machine or a cluster lacks, reported before anything starts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.backends.local.machine import Gpu
from envscaler_airflow.cli import main
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.models import Runtime
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.dry_run import Here, installed_versions, look_here, missing_here, missing_on
from envscaler_airflow.images.requirement_files import Requirements

GIB = 1 << 30
T4 = Gpu(0, "T4", 16.0)


def machine(**other) -> Here:
    """Four cores, 16 GiB, 50 GiB of disk, nothing installed, docker running."""
    facts = {
        "cpus": 4, "memory_bytes": 16 * GIB, "disk_bytes": 50 * GIB,
        "has_path": lambda path: path == "/srv/data", "is_mounted": lambda path: path == "/mnt/nfs",
        "has_variable": lambda name: name == "SET",
        "installed_versions": lambda names: dict.fromkeys(names, "1"), "has_docker": lambda: True,
    }  # fmt: skip
    return Here(**(facts | other))


def stage(requests=None, **body):
    """A stage that requests *requests*."""
    resources = {"requests": requests or {}, **body.pop("resources", {})}
    told = {"version": "v1", "name": "s", "base": {"image": "b"}, "entrypoint": ["true"]}
    return EnvSpec.from_dict({**told, "resources": resources, **body})


def local(spec, **other):
    """What a machine like ours lacks."""
    return missing_here(spec, Requirements(), here=machine(**other))


def test_what_fits_lacks_nothing():
    """Up to the last core, and to the part of the memory that the local backend offers."""
    assert local(stage({"cpu": 4, "memory": "14Gi"}, resources={"disk_size": "50Gi"})) == []
    assert local(stage({"memory": "14.5Gi"}))[0].startswith("memory: 14.5Gi requested, 14.4Gi available here")
    whole = stage({"memory": "16Gi"})
    assert missing_here(whole, Requirements(), here=machine(), in_container=True) == []


def test_cores_memory_and_disk_are_named_with_both_figures():
    """The requested and the available amount, in one sentence each."""
    got = local(stage({"cpu": 8, "memory": "32Gi"}, resources={"disk_size": "100Gi"}))

    assert got == [
        "cpu: 8 requested, 4 available here; request less under targets.local",
        "memory: 32Gi requested, 14.4Gi available here; request less under targets.local",
        "disk: 100Gi requested, 50.0Gi free below /var/tmp; free some, or request less",
    ]


@pytest.mark.parametrize(
    ("gpu", "gpus", "lacks"),
    [
        ({"count": 1}, (T4,), False),
        ({"count": 2}, (T4,), True),
        ({"count": 1, "type": "A100"}, (T4,), True),
        ({"count": 1, "memory": "24GB"}, (T4,), True),
        ({"count": 1}, (), True),
    ],
)
def test_gpus_count_by_type_and_memory(gpu, gpus, lacks):
    """One that is too small or of another type does not count."""
    got = local(stage({"gpu": gpu}), gpus=gpus)

    assert [text.startswith("gpu: ") for text in got] == [True] * lacks


def test_a_stage_that_may_fall_back_to_cpus_lacks_no_gpu():
    """Only the spec allows it, nothing else."""
    assert local(stage({"gpu": {"count": 1}}, resources={"cpu_fallback": True})) == []


def test_the_drivers_cuda_is_a_link_of_the_chain():
    """Wheels for CUDA 12 on a driver of 2021."""
    wanted = Requirements(Runtime(packages=("torch==2.4.0+cu121",)))

    got = missing_here(stage(), wanted, here=machine(gpus=(T4,), driver="470.82.01"))

    assert got == [
        "cuda: CUDA 12.1 needs driver 525 or newer, the machine has 470.82.01; upgrade it, or use CUDA 11.x"
    ]


def test_mounts_secrets_and_packages_that_are_not_here():
    """Each with the fix; present programs are not named."""
    spec = stage(
        volumes=[
            {"name": "here", "source": "hostPath:/srv/data", "mount_path": "/a"},
            {"name": "gone", "source": "hostPath:/srv/gone", "mount_path": "/b"},
            {"name": "nfs", "source": "nfs://filer/x", "mount_path": "/c"},
            {"name": "nfs2", "source": "nfs://filer/x", "mount_path": "/mnt/nfs"},
            {"name": "claim", "source": "pvc://claim", "mount_path": "/d"},
        ],
        env=[
            {"name": "A", "value_from": "env:SET"},
            {"name": "B", "value_from": "env:UNSET"},
            {"name": "C", "value_from": "secret:s/key"},
        ],
        system_packages=["git", "jq"],
    )

    got = local(spec, installed_versions=lambda names: {"git": "1"})

    assert [text.partition(";")[0] for text in got] == [
        "volumes: gone: /srv/gone does not exist here",
        "volumes: nfs: nfs://filer/x is not mounted at /c",
        "volumes: claim: pvc://claim is a claim of Kubernetes",
        "env: B: env:UNSET is not set",
        "env: C: secret:s/key cannot be resolved from a shell",
        "system_packages: jq not installed",
    ]
    assert "apt-get install --yes --no-install-recommends jq" in got[-1]


def test_a_package_of_another_version_is_absent():
    """The lock's version is required; a star matches any rest."""
    here = machine(installed_versions=lambda names: {"git": "1:2.39.5-0", "jq": "1.6"})

    assert here.absent_packages(["git", "git=1:2.39.5-0", "git=1:2.39*", "jq=1.6"]) == []
    assert here.absent_packages(["git=1:2.40", "jq=1.*", "curl=1"]) == ["git=1:2.40", "curl=1"]
    assert machine(installed_versions=lambda names: None).absent_packages(["git"]) is None


@pytest.mark.parametrize(
    ("program", "answer", "version"),
    [
        ("dpkg-query", "installed 1:2.39.5-0", "1:2.39.5-0"),
        ("dpkg-query", "config-files 1:2.39.5-0", None),
        ("rpm", "2.39-1.el9", "2.39-1.el9"),
        ("apk", "git-2.40-r0", "2.40-r0"),
        ("apk", "", None),
    ],
)
def test_versions_are_asked_of_the_program_that_knows(program, answer, version, tmp_path, monkeypatch):
    """A removed package with remaining settings does not count; an unknown one has no version."""
    stand_in = tmp_path / program
    stand_in.write_text(f"#!/bin/sh\nfor name; do :; done\n[ $name = git ] || exit 1\necho '{answer}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert installed_versions(["git", "curl"]) == ({} if version is None else {"git": version})


def test_docker_needs_its_daemon_and_no_system_packages():
    """Packages are in the image."""
    spec = stage(system_packages=["jq"])

    got = missing_here(
        spec,
        Requirements(),
        here=machine(has_docker=lambda: False, installed_versions=lambda names: {}),
        in_container=True,
    )

    assert got == ["docker: no daemon answers that can build; install and start docker.io"]


def test_a_machine_cannot_mount_a_claim():
    """The only fact that is known before a machine is chosen."""
    spec = stage(volumes=[{"name": "v", "source": "pvc://data", "mount_path": "/d"}])

    assert missing_on("vm", spec) == ["volumes: v: pvc://data is a claim of Kubernetes; write another for vm"]
    with pytest.raises(SpecError, match="write one of docker, kubernetes, local, vm"):
        missing_on("cloud", stage())


def test_this_machine_can_be_looked_at():
    """Any machine has cores, memory and disk."""
    here = look_here()

    assert here.cpus >= 1
    assert here.memory_bytes > GIB / 2
    assert here.disk_bytes > 0


def test_the_shell_ends_with_one_when_something_is_missing(tmp_path, monkeypatch):
    """Zero when nothing is missing; a list for tools (feature A4)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envscaler.yaml").write_text("version: v1\nname: s\nbase: {image: b}\nentrypoint: [sh]\n")
    (tmp_path / "big.yaml").write_text(
        "version: v1\nname: s\nbase: {image: b}\nresources: {requests: {cpu: 5000}}\n"
    )

    assert CliRunner().invoke(main, ["dry-run"]).exit_code == 0
    got = CliRunner().invoke(main, ["dry-run", "-f", "big.yaml", "--json"])
    assert got.exit_code == 1
    assert json.loads(got.stdout)["missing"][0].startswith("cpu: 5000 requested")


@pytest.mark.parametrize("target", ["local", "kubernetes"])
def test_a_plan_for_a_place_is_its_dry_run(target, tmp_path, monkeypatch):
    """Word for word, as text and for tools, with the same exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("""#!/bin/sh\necho '{"items": []}'\n""")
    kubectl.chmod(0o755)
    (tmp_path / "envscaler.yaml").write_text(
        "version: v1\nname: s\nbase: {image: b}\nresources: {requests: {cpu: 5000}}\n"
    )

    for words in ([], ["--json"]):
        dry, plan = (
            CliRunner().invoke(main, [command, "--target", target, *words]) for command in ("dry-run", "plan")
        )
        assert (plan.output, plan.exit_code) == (dry.output, dry.exit_code)
        assert dry.exit_code == 1
        assert "5000" in dry.output


def test_a_plan_for_rented_machines_says_first_what_they_cannot_have(tmp_path, monkeypatch):
    """Then the machines to rent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envscaler.yaml").write_text(
        "version: v1\nname: s\nbase: {image: b}\nresources: {requests: {cpu: 2}}\n"
        "volumes: [{name: v, source: 'pvc://data', mount_path: /d}]\n"
    )

    got = json.loads(CliRunner().invoke(main, ["plan", "--target", "vm", "--json"]).stdout)

    assert got["notes"][0].startswith("volumes: v: pvc://data is a claim of Kubernetes")
    assert got["chosen"] is not None
