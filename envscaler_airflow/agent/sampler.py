"""The sampler's process: one JSON line a second about GPUs and the command's processes."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Dict

from envscaler_airflow.agent.host import Host


def main(options_json: str) -> None:
    """Sample until the wrapper is gone."""
    options: Dict[str, Any] = json.loads(options_json)
    host = Host(int(options["root"]))
    interval, origin = float(options["interval_s"]), float(options["origin"])
    due = time.monotonic()
    while os.getppid() == options["parent"]:
        now = time.monotonic()
        values = {
            name: round(value, 3)
            for name, value in host.sample(now, own=os.getpid()).items()
            if value is not None
        }
        line = {"t": round(now - origin, 3), "at": round(time.time(), 3), **values}
        os.write(sys.stdout.fileno(), json.dumps(line, separators=(",", ":")).encode() + b"\n")
        due = max(due + interval, now)
        time.sleep(max(0.0, due - time.monotonic()))
