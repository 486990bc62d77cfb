"""What the processes of a node inherit: little for the training, the store's credentials for the sidecar."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from envscaler_airflow.agent_files import copy_agent, package_root

SECRET_PREFIX = "ENVSCALER_SECRET_"  # noqa: S105  # a prefix of names
"""Secrets of the training reach only node main, under this prefix."""

_OURS = re.compile(
    r"_*AIRFLOW_|ENVSCALER_(SPOOL|RUN|GENERATION|ATTEMPT|NODES?|CPUS|RENDEZVOUS|RESTORE|CHECKPOINT_DIR)\Z"
    r"|ENVSCALER_(INPUT|OUTPUT|VOLUME|SECRET)_"
)
"""Airflow's settings and connections, and variables that identify another run's training."""
_KEYS = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|CREDENTIAL_EXPIRATION)\Z"
)
"""Variables that form one identity. Source: botocore, ``EnvProvider``."""
_TRAINING = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|LIBRARY_PATH"
    r"|CUDA_\w+|NVIDIA_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_PROXY|\w+_proxy"
    r"|ENVSCALER_SERVICES)\Z"  # a test harness finds its services' processes by this
)
"""What a training inherits from the machine. Chosen: what programs need to run, no credentials."""


def node_env(
    environ: Mapping[str, str],
    secrets: Mapping[str, str],
    spool: str,
    store_keys: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment of node main: all but Airflow's settings and connections, with the secrets prefixed.

    *store_keys* are variables of the store's connection; they replace all of the worker's, because its
    session token would belong to other keys.
    """
    env = {name: value for name, value in environ.items() if not _OURS.match(name)}
    if store_keys:
        env = {name: value for name, value in env.items() if not _KEYS.match(name)} | dict(store_keys)
    env |= {SECRET_PREFIX + name: value for name, value in secrets.items()}
    env["ENVSCALER_SPOOL"] = spool
    if not _is_installed():
        env["PYTHONPATH"] = _joined(
            dict.fromkeys([str(Path(__file__).parents[3]), str(package_root())]), env.get("PYTHONPATH")
        )
    return env


def sidecar_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the sidecar: node main's without the secrets of the training."""
    return {name: value for name, value in environ.items() if not name.startswith(SECRET_PREFIX)}


def training_env(environ: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str]:
    """Environment of wrapper and command: a short list from the machine, the spec's variables, the secrets.

    Programs of the command's own environment come first on its PATH, then the spec's PATH, else the
    machine's. Without such an environment only the spec's PATH is used.
    """
    env = {name: value for name, value in environ.items() if _TRAINING.match(name)}
    path = env.get("PATH", os.defpath)
    env["PATH"] = _joined([str(Path(sys.executable).parent)], path)
    gpus = request.get("gpus")
    if gpus is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that NVML uses
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    env |= {str(name): str(value) for name, value in request["env"].items()}
    env |= {name: environ[SECRET_PREFIX + name] for name in request["secret_names"]}
    if request.get("python") is not None:
        folder = Path(request["python"]).parent
        env["PATH"] = _joined([str(folder)], request["env"].get("PATH", path))
        env["VIRTUAL_ENV"] = str(folder.parent)
    if request.get("pythonpath"):
        env["PYTHONPATH"] = _joined([request["pythonpath"]], env.get("PYTHONPATH"))
    return env


def training_pythonpath(command: Sequence[str], python: str | None, root: Path) -> str | None:
    """The path that makes ``envscaler_agent`` importable in the command's interpreter; None: not needed.

    For this interpreter that is the package itself; for any other (or a shell script, which may start any) a
    folder below *root* with the agent, which runs on every Python.
    """
    if python in (None, sys.executable) and command and _is_this_interpreter(command[0]):
        return None if _is_installed() else str(package_root())
    return str(copy_agent(root))


def _is_this_interpreter(program: str) -> bool:
    if program in ("python", "python3"):
        return True  # its folder is first on PATH
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _is_installed() -> bool:
    """True when this interpreter finds the package without an added path."""
    try:
        metadata.distribution("envscaler-airflow")
    except metadata.PackageNotFoundError:
        return False
    return True


def _joined(first: Iterable[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])
