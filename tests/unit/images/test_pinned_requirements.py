"""What the project's own images install is pinned by version and by the hash of each file."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
LOCKS = ("docker/requirements.txt", "envscaler_airflow/images/sidecar-requirements.txt")
DOCKERFILES = ("docker/airflow.Dockerfile", "envscaler_airflow/images/sidecar.Dockerfile")


def pins(path):
    """Return name, version and hashes of each requirement of a lock."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        head, *hashes = line.split("--hash=")
        requirement = Requirement(head.strip())
        yield requirement, [one.strip() for one in hashes]


@pytest.mark.parametrize("path", LOCKS)
def test_every_requirement_has_one_version_and_hashes(path):
    """Pip then refuses a file that differs, from any index (D16)."""
    found = list(pins(path))

    assert len(found) > 10
    for requirement, hashes in found:
        assert [one.operator for one in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


@pytest.mark.parametrize("path", LOCKS)
def test_the_versions_are_those_that_are_tested(path):
    """``make locks`` writes them again after a change of constraints.txt (D16)."""
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    tested = {name.lower(): version for name, version in tested.items()}

    for requirement, _ in pins(path):
        version = str(requirement.specifier).removeprefix("==")
        assert tested.get(requirement.name.lower(), version) == version


@pytest.mark.parametrize("path", DOCKERFILES)
def test_an_image_installs_the_pinned_files_and_no_root_runs_in_it(path):
    """Only what a user adds by a build argument is not pinned by hash (D16)."""
    text = (ROOT / path).read_text()

    assert "--require-hashes --only-binary :all:" in text
    assert re.search(r"^USER [1-9]\d*:\d+$", text, re.MULTILINE)


def test_the_compose_file_gives_no_container_more_than_it_needs():
    """No privileges, and nothing of the machine but the example DAGs (D16)."""
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]

    assert not any(
        one.keys() & {"privileged", "cap_add", "network_mode", "devices"} for one in services.values()
    )
    mounts = {mount for one in services.values() for mount in one["volumes"] if mount.startswith((".", "/"))}
    assert mounts == {"../dags/examples:/opt/airflow/dags:ro"}
