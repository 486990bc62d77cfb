"""Runs scripts to their end without waiting: each in a fork of one interpreter with their libraries.

``python undisturbed.py FOLDER SCRIPT ...``: ``FOLDER/NAME.txt`` has the output of SCRIPT once it has ended.
An import of torch and of packages that use it takes seconds, so one interpreter serves all.
"""

import importlib
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

LIBRARIES = ("torch", "accelerate")


def run(script: Path, folder: Path) -> None:
    """Print to a file that gets its name when it is complete."""
    out = folder / f"{script.stem}.part"
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.argv = [str(script), str(folder / script.stem)]
        time.sleep = lambda _seconds: None
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:  # noqa: BLE001 the test shows it
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    out.rename(out.with_suffix(".txt"))
    os._exit(0)


texts = [Path(argument).read_text() for argument in sys.argv[2:]]
for name in LIBRARIES:
    if any(f"import {name}" in text or f"from {name} " in text for text in texts):
        importlib.import_module(name)
for argument in sys.argv[2:]:
    child = os.fork()
    if not child:
        run(Path(argument), Path(sys.argv[1]))
    os.waitpid(child, 0)
