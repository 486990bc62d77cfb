"""Stands in for the wrapper: ``run --spool E -- COMMAND``; SIGTERM ends the command, exit code 87."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path


def main():
    """Wait for start.json, run the command, report its end."""
    spool = Path(sys.argv[sys.argv.index("--spool") + 1])
    command = sys.argv[sys.argv.index("--") + 1 :]
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    while not (spool / "start.json").exists() and not asked:
        time.sleep(0.01)
    failed = not asked and json.loads((spool / "start.json").read_text()).get("failed")
    if failed:
        return _end(spool, 88, "setup-failed", failed)
    process = subprocess.Popen(command)
    while process.poll() is None:
        if asked:
            process.terminate()
        time.sleep(0.01)
    if asked:
        return _end(spool, 87, "stopped", "")
    code = process.returncode
    if code < 0:
        return _end(spool, None, "killed", "", number=-code)
    return _end(spool, code, "failed" if code else "succeeded", "")


def _end(spool, code, reason, detail, *, number=None):
    ended = {"exit_code": code, "signal": number, "reason": reason, "detail": detail}
    draft = spool / ".wrapper"
    draft.write_text(json.dumps({"schema": "2.0", "phase": "ended", "ended": ended}))
    draft.replace(spool / "wrapper.json")
    return 128 + number if number else code


sys.exit(main())
