"""Unit tests of what the processes of a node inherit."""

import os
import subprocess
import sys

from envscaler_airflow.agent_files import copy_agent
from envscaler_airflow.backends.local.processes import (
    node_env,
    sidecar_env,
    training_env,
    training_pythonpath,
)

WORKER = {
    "PATH": "/usr/bin",
    "HOME": "/home/u",
    "AWS_ACCESS_KEY_ID": "store",
    "HF_HOME": "/cache",
    "AIRFLOW__CORE__FERNET_KEY": "canary",
    "AIRFLOW_CONN_X": "canary",
    "_AIRFLOW_PROCESS_CONTEXT": "server",
    "ENVSCALER_SPOOL": "/other",
    "ENVSCALER_OUTPUT_MODEL": "/other",
    "ENVSCALER_SERVICES": "/home/services",
}
REQUEST = {
    "python": "/venv/bin/python",
    "env": {"A": "1", "PYTHONPATH": "/mine"},
    "secret_names": ["API_KEY"],
    "gpus": [],
    "pythonpath": "/agent",
}


def test_node_main_gets_no_airflow_and_the_secrets_apart():
    """The store's credentials stay, since the sidecar needs them."""
    env = node_env(WORKER, {"API_KEY": "s"}, "/n0/spool")

    assert not any("AIRFLOW" in name for name in env)
    assert env["ENVSCALER_SECRET_API_KEY"] == "s"
    assert env["ENVSCALER_SPOOL"] == "/n0/spool"
    assert env["AWS_ACCESS_KEY_ID"] == "store"
    assert "ENVSCALER_OUTPUT_MODEL" not in env


def test_keys_of_the_store_s_connection_replace_the_worker_s_own_as_a_whole():
    """The worker's session token belongs to other keys; the connection's keys would be refused with it."""
    worker = {**WORKER, "AWS_SESSION_TOKEN": "theirs", "AWS_CREDENTIAL_EXPIRATION": "2026", "AWS_REGION": "x"}
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "of-the-connection"}

    env = node_env(worker, {}, "/n0/spool", keys)

    found = {name: value for name, value in sidecar_env(env).items() if name.startswith("AWS_")}
    assert found == {**keys, "AWS_REGION": "x"}
    assert not any(name.startswith("AWS_") for name in training_env(env, {**REQUEST, "secret_names": []}))


def test_the_sidecar_gets_the_store_s_credentials_and_no_secret_of_the_training():
    """Each side gets its own."""
    env = sidecar_env(node_env(WORKER, {"API_KEY": "s"}, "/n0/spool"))

    assert env["AWS_ACCESS_KEY_ID"] == "store"
    assert "s" not in env.values()


def test_the_training_gets_a_short_list_its_own_and_its_secrets():
    """It gets neither credentials nor settings of the worker."""
    env = training_env(node_env(WORKER, {"API_KEY": "s"}, "/n0/spool"), REQUEST)

    assert env == {
        "PATH": f"/venv/bin{os.pathsep}/usr/bin",
        "HOME": "/home/u",
        "VIRTUAL_ENV": "/venv",
        "ENVSCALER_SERVICES": "/home/services",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "A": "1",
        "API_KEY": "s",
        "PYTHONPATH": f"/agent{os.pathsep}/mine",
    }


def test_the_programs_of_the_command_s_own_environment_come_first():
    """The spec's PATH comes after them; without such an environment only the spec's PATH counts."""
    request = {**REQUEST, "env": {"PATH": "/spec"}}

    assert training_env({"PATH": "/usr/bin", "ENVSCALER_SECRET_API_KEY": "s"}, request)["PATH"] == (
        f"/venv/bin{os.pathsep}/spec"
    )
    ours = training_env({"ENVSCALER_SECRET_API_KEY": "s"}, {**request, "python": None})
    assert ours["PATH"] == "/spec"
    assert "VIRTUAL_ENV" not in ours
    plain = training_env({"PATH": "/usr/bin", "ENVSCALER_SECRET_API_KEY": "s"}, {**REQUEST, "python": None})
    assert plain["PATH"] == f"{os.path.dirname(sys.executable)}{os.pathsep}/usr/bin"  # noqa: PTH120 (as the product joins texts)


def test_this_interpreter_needs_no_copy_of_the_agent(tmp_path):
    """``python`` means this interpreter; any other command might be another one."""
    assert training_pythonpath(("python", "train.py"), None, tmp_path) in (None, str(_package_parent()))
    assert training_pythonpath((sys.executable, "train.py"), None, tmp_path) in (None, str(_package_parent()))
    assert training_pythonpath(("bash", "train.sh"), None, tmp_path) == str(copy_agent(tmp_path))
    assert training_pythonpath(("python",), "/opt/py38/bin/python", tmp_path) == str(copy_agent(tmp_path))


def _package_parent():
    import envscaler_agent

    return os.path.dirname(os.path.dirname(envscaler_agent.__file__))  # noqa: PTH120 (as the product joins texts)


def test_the_copy_is_made_once_and_imports_alone(tmp_path):
    """With the standard library alone, and only the parts that run everywhere."""
    folder = copy_agent(tmp_path)

    assert copy_agent(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    imports = "import envscaler_agent as agent, pynvml; print(agent.__file__)"
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); {imports}"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith(str(folder))
