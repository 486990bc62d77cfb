"""cloud-init's own schema accepts the rendered user-data."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and shutil.which("cloud-init") is None, reason="needs cloud-init; CI installs it"
)


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """cloud-init's messages about a document."""
    return subprocess.run(
        ["cloud-init", "schema", "--config-file", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["hostile", "wide"])
def test_user_data_is_valid(name):
    """A container's machine, and one that runs the stage itself."""
    done = check(GOLDEN / name / "vm" / "user-data")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid" in done.stdout + done.stderr


def test_the_schema_does_refuse_what_is_wrong(tmp_path):
    """So that a success of the test above means something."""
    path = tmp_path / "user-data"
    path.write_text("#cloud-config\nruncmd: 1\npackages: {a: b}\n")

    assert check(path).returncode != 0
