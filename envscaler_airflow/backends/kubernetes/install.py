"""Copy the agent into the folder that it shares with the training: ``python -m ....install /envscaler``.

Runs in the init container of the sidecar image, so that any image with python3 (3.8 or newer) works
unchanged: the wrapper, ``Session`` and the launcher are below ``FOLDER/agent``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from envscaler_airflow.agent_files import install_agent

_LAUNCHER = "pod_main.py"


def install(folder: Path) -> Path:
    """Create ``folder/agent``, ``folder/spool`` and ``folder/work``; may be repeated.

    The folders are open to every user: the user of the stage's image is unknown here.
    """
    target = folder / "agent"
    install_agent(target)
    shutil.copyfile(Path(__file__).parent / _LAUNCHER, target / _LAUNCHER)
    for name in ("spool", "work"):
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
