"""Stands in for the sidecar: restores nothing, and reports done once the wrapper has ended.

With ``--die N`` it exits with code 3 at its first N starts, counted in the spool folder. With ``--give-up``
it exits at its first start with code 86 once ``stopped`` is in the spool folder, like the sidecar of an
orphaned attempt that does not stop.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main():
    """Write start.json, wait for the wrapper's end, report done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--die", type=int, default=0)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--give-up", action="store_true")
    options, _ = parser.parse_known_args()
    births = options.spool / "births"
    with births.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(births.read_text().split()) <= options.die:
        sys.exit("sidecar stand-in: dies as it was told")
    _write(options.spool / "start.json", {"schema": "2.0"})
    _write(options.spool / "env.json", dict(os.environ))
    wrapper = options.spool / "wrapper.json"
    if options.give_up and len(births.read_text().split()) == 1:
        while not (options.spool / "stopped").exists():
            time.sleep(0.02)
        sys.exit(86)
    while not wrapper.exists() or options.hang:
        time.sleep(0.02)
    _write(options.spool / "sidecar.json", {"schema": "2.0", "phase": "done"})


def _write(path, body):
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(body))
    draft.replace(path)


main()
