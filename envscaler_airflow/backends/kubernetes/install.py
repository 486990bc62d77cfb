"""Copy the agent into the folder that it shares with the training: ``python -m ....install /envscaler``.

Runs in the init container of the agent image, so that any image with python3 (3.8 or newer) works as it
is: the wrapper, ``Session`` and the launcher lie below ``FOLDER/agent``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from envscaler_airflow.agent.package import PARTS, package_folder

_LAUNCHER = "launch.py"


def install(folder: Path) -> Path:
    """Make ``folder/agent``, ``folder/exchange`` and ``folder/work``; may be repeated.

    The folders are open to every user: which one the stage's image has, nobody knows here.
    """
    package = package_folder()
    target = folder / "agent"
    for part in PARTS:
        source, copy = package / part, target / "envscaler_airflow" / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy)
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        shutil.copyfile(pynvml.origin, target / "pynvml.py")
    shutil.copyfile(Path(__file__).parent / _LAUNCHER, target / _LAUNCHER)
    for name in ("exchange", "work"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o777)
    return target


def main() -> int:
    """Install below the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m envscaler_airflow.backends.kubernetes.install FOLDER\n")
        return 2
    os.umask(0)
    install(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
