"""What a user of one backend does not load."""

import subprocess
import sys

import pytest

PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(sorted({"psutil", "numpy", "matplotlib"} & set(sys.modules)))
"""


def test_the_process_of_a_node_loads_no_pydantic():
    """Half of its start: a node is given what it runs, and reads no spec."""
    probe = "import sys, envscaler_airflow.backends.local.node_main; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "module",
    [
        "envscaler_airflow.cli.run_commands",
        "envscaler_airflow.cli.inspect",
        "envscaler_airflow.images.build",
        "envscaler_airflow.backends.kubernetes.pod_sidecar",
        "envscaler_airflow.scaling",
    ],
)
def test_who_runs_on_kubernetes_alone_loads_no_psutil_and_no_numpy(module):
    """Here psutil is for processes of this machine, numpy for the table of the deadline policy."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
