"""The suite for real clusters works without the code of the fake one."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
BLOCK = """
import sys
sys.modules["fakes"] = None
"""


def test_the_suite_for_real_clusters_needs_nothing_of_the_fake(tmp_path):
    """It is collected, and skipped without a cluster, where `fakes` cannot be imported."""
    (tmp_path / "no_fakes.py").write_text(BLOCK)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    for name in ("KUBECONFIG", "ENVSCALER_IMAGE", "ENVSCALER_STORE_URL"):
        environ.pop(name, None)
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(TESTS)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no_fakes", "-p", "no:cacheprovider", "-n", "0"]

    ran = subprocess.run(
        [*command, "-rs", str(TESTS / "e2e" / "kubernetes")],
        check=False,
        cwd=TESTS.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "KUBECONFIG, ENVSCALER_IMAGE, ENVSCALER_STORE_URL not set" in ran.stdout
    assert "passed" not in ran.stdout
