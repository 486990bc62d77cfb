"""What the processes of a node inherit: little for the training, the store's credentials for the courier."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import envscaler_airflow
from envscaler_airflow.errors import BackendError

SECRET_PREFIX = "ENVSCALER_SECRET_"  # noqa: S105  # a prefix of names
"""Secrets of the training reach node main under this prefix, and nobody else."""

_OURS = re.compile(
    r"_*AIRFLOW_|ENVSCALER_(EXCHANGE|RUN|GENERATION|ATTEMPT|NODES?|CPUS|RENDEZVOUS|RESTORE|CHECKPOINT_DIR)\Z"
    r"|ENVSCALER_(INPUT|OUTPUT|VOLUME|SECRET)_"
)
"""Airflow's settings and connections, and what tells another run's training who it is."""
_TRAINING = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|LIBRARY_PATH"
    r"|CUDA_\w+|NVIDIA_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_PROXY|\w+_proxy"
    r"|ENVSCALER_SERVICES)\Z"  # by which a test harness finds what its services started
)
"""What a training inherits from the machine. Chosen: what programs need to run, no credentials."""

_AGENT_FILES = ("__init__.py", "errors.py", "protocol.py", "agent")
_MERGE = '\n__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'
"""Appended to the copy: where the interpreter has the whole package, the rest is found there."""


def node_env(environ: Mapping[str, str], secrets: Mapping[str, str], exchange: str) -> dict[str, str]:
    """Environment of node main: all but Airflow's own settings and connections, and the secrets apart."""
    env = {name: value for name, value in environ.items() if not _OURS.match(name)}
    env |= {SECRET_PREFIX + name: value for name, value in secrets.items()}
    env["ENVSCALER_EXCHANGE"] = exchange
    if not _is_installed():
        env["PYTHONPATH"] = _joined([str(_package().parent)], env.get("PYTHONPATH"))
    return env


def courier_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the courier: node main's without the secrets of the training."""
    return {name: value for name, value in environ.items() if not name.startswith(SECRET_PREFIX)}


def training_env(environ: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str]:
    """Environment of wrapper and command: a short list from the machine, the spec's own, the secrets."""
    env = {name: value for name, value in environ.items() if _TRAINING.match(name)}
    env["PATH"] = _joined([str(Path(request["python"]).parent)], env.get("PATH", os.defpath))
    gpus = request.get("gpus")
    if gpus is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML counts so
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    env |= {str(name): str(value) for name, value in request["env"].items()}
    env |= {name: environ[SECRET_PREFIX + name] for name in request["secret_names"]}
    if request.get("pythonpath"):
        env["PYTHONPATH"] = _joined([request["pythonpath"]], env.get("PYTHONPATH"))
    return env


def training_pythonpath(command: Sequence[str], python: str | None, root: Path) -> str | None:
    """What makes ``envscaler_airflow.agent`` importable in the command's interpreter; None: it is already.

    For this interpreter that is the package itself; for any other (or a shell script, which may start
    any) a folder below *root* that holds the parts which run on every Python, and merges with a whole
    package where there is one.
    """
    if python in (None, sys.executable) and command and _is_this_interpreter(command[0]):
        return None if _is_installed() else str(_package().parent)
    return str(copy_agent(root))


def _is_this_interpreter(program: str) -> bool:
    if program in ("python", "python3"):
        return True  # its folder is first on PATH
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sys.executable).parent


def copy_agent(root: Path) -> Path:
    """A folder with the parts that run in any training, made once for each content."""
    package = _package()
    sources = {path: path.relative_to(package.parent) for path in sorted(_agent_files(package))}
    sources[Path(_pynvml_path())] = Path("pynvml.py")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    folder = root / f"agent-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    draft = root / f".{folder.name}.{os.getpid()}"
    for path, name in sources.items():
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    with (draft / "envscaler_airflow" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(_MERGE)
    try:
        draft.rename(folder)
    except OSError:  # another one was first
        shutil.rmtree(draft)
    return folder


def _pynvml_path() -> str:
    """The one file of nvidia-ml-py, which samplers need where there is a driver."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise BackendError("nvidia-ml-py is not installed: its module pynvml goes with the agent")
    return spec.origin


def _agent_files(package: Path) -> Iterable[Path]:
    for name in _AGENT_FILES:
        path = package / name
        yield from path.rglob("*.py") if path.is_dir() else [path]


def _package() -> Path:
    return Path(envscaler_airflow.__file__).parent


def _is_installed() -> bool:
    """True when this interpreter finds the package without our help."""
    try:
        metadata.distribution("envscaler-airflow")
    except metadata.PackageNotFoundError:
        return False
    return True


def _joined(first: Iterable[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])
