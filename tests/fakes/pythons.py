"""The interpreters of this machine that the agent has to run on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def find_python(version):
    """A Python of *version*, such as ``3.8``, on PATH or in pyenv; None without one that starts."""
    name = f"python{version}"
    roots = [Path(os.environ.get("PYENV_ROOT", "")), Path.home() / ".pyenv"]
    found = [shutil.which(name)]
    found += [
        str(path)
        for root in roots
        if root.is_absolute()
        for path in root.glob(f"versions/{version}*/bin/{name}")
    ]
    return next((program for program in found if program and _is_of(program, version)), None)


def oldest_python():
    """The oldest one from 3.8 on that can be found; at the latest this one."""
    here = sys.version_info[1]
    found = (find_python(f"3.{minor}") for minor in range(8, here))
    return next(filter(None, found), sys.executable)


def _is_of(program, version):
    try:
        done = subprocess.run(
            [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except OSError:
        return False
    return done.stdout.strip() == version
