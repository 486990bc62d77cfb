"""Starts the wrapper in the training's container, and exits only when everything is uploaded.

Copied into the pod and run by the image's own python3: standard library only, Python 3.8.

    python3 pod_main.py --grace S --drain S -- COMMAND...

Before the command, it puts the agent first on PYTHONPATH, and waits until the sidecar has prepared the node
and reported which node it is. After it, it waits until the sidecar reports "done" (when this container ends,
the kubelet stops the sidecar), and writes a termination message with the command's end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

EXIT_STOPPED = 87
"""Source: envscaler_agent.protocol, which cannot be imported yet."""
POLL_S = 0.5
NODE_S = 960.0
"""Longest wait for the sidecar, seconds. Chosen: a minute more than it waits for its store."""
TERMINATION_LOG = Path("/dev/termination-log")
"""Source: Kubernetes, terminationMessagePath."""
MAX_MESSAGE_BYTES = 4096
"""Source: Kubernetes truncates a termination message to this size."""


def main(argv: List[str], *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Run the command line *argv*; its exit code is the container's."""
    split = argv.index("--")
    options = dict(zip(argv[:split:2], argv[1:split:2]))
    spool = Path(os.environ["ENVSCALER_SPOOL"])
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = argv[split + 1 :]
    signal.signal(signal.SIGTERM, _stopped)  # PID 1 ignores it by default
    os.environ["ENVSCALER_NODE"] = str(await_node(spool / "node.json", sleep=sleep).get("node", ""))
    sys.path.insert(0, here)
    from envscaler_agent.__main__ import main as wrapper  # noqa: PLC0415  # found by the line above

    code = wrapper(["run", "--spool", str(spool), "--grace", options.get("--grace", "25"), "--", *command])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kubelet's SIGKILL ends a wait that is too long
    await_sidecar(spool, float(options.get("--drain", "3600")), sleep=sleep)
    say_end(spool)
    return code


def _stopped(_number: int, _frame: object) -> None:
    sys.exit(EXIT_STOPPED)


def await_node(path: Path, *, sleep: Callable[[float], None] = time.sleep) -> Dict[str, Any]:
    """The sidecar's report on this node, once it has prepared it; {} when that takes too long."""
    waited = 0.0
    while waited < NODE_S:
        body = _read(path)
        if body:
            return body
        sleep(POLL_S)
        waited += POLL_S
    return {}


def await_sidecar(spool: Path, drain_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until the sidecar has uploaded everything, for at most *drain_s* seconds."""
    waited = 0.0
    while _read(spool / "sidecar.json").get("phase") != "done" and waited < drain_s:
        sleep(POLL_S)
        waited += POLL_S


def say_end(spool: Path) -> None:
    """Write the reason of the end where the cluster shows it; without any output of the command."""
    ended = _read(spool / "wrapper.json").get("ended") or {}
    if not ended or not TERMINATION_LOG.exists():
        return
    body = {"reason": ended.get("reason"), "detail": str(ended.get("detail") or "")[:500]}
    try:
        TERMINATION_LOG.write_text(json.dumps(body)[:MAX_MESSAGE_BYTES], encoding="utf-8")
    except OSError as err:
        sys.stderr.write(f"envscaler: {TERMINATION_LOG}: {err.strerror}\n")


def _read(path: Path) -> Dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # nothing is left to clean up, and a thread of a driver must not block
