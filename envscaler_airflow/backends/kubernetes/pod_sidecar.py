"""The native sidecar of a pod: prepares the node, keeps the sidecar process running, and lets it finish.

    python -m envscaler_airflow.backends.kubernetes.pod_sidecar --spool E --store URL --prefix P
        --generation G --attempt A --nodes M --layout layout.json [--first-node N] [--max-nodes N]

The sidecar claims the node by the pod's uid: what a lost pod still writes does not count once another pod
replaces it. Node 0 publishes its address in its status, with its choice of the checkpoint. The others read
both there; no DNS is needed.

The kubelet sends SIGTERM when the training's container has ended, for any reason. Then this process reports
the end to the sidecar if the wrapper could not, and the sidecar uploads the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from envscaler_agent.messages import SCHEMA
from envscaler_agent.protocol import Ended
from envscaler_agent.spool import Spool
from envscaler_airflow.local_files import write_atomic
from envscaler_airflow.sidecar.keeper import Keeper, report_end

TURN_S = 0.5
RENDEZVOUS_PORT = 29400
"""Source: torchrun's default for c10d."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one pod; 0 when everything is uploaded."""
    options = _parse(arguments)
    node = options.first_node + int(os.environ.get("JOB_COMPLETION_INDEX", "0"))
    os.umask(0)  # the training may run as another user
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    spool = Spool(options.spool)
    prepare(spool, node)
    command = [sys.executable, "-m", "envscaler_airflow.sidecar", *_sidecar_options(options, node)]
    keeper = Keeper(
        spool,
        lambda: subprocess.Popen(command, start_new_session=True),
        monotonic=time.monotonic,
        output="the log of this container",
    )
    code = run(spool, keeper, ending=ending)
    for number in (signal.SIGTERM, signal.SIGINT):  # Python restores the defaults as it ends
        signal.signal(number, signal.SIG_IGN)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sidecar", description=__doc__)
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--layout", type=Path, required=True)
    parser.add_argument("--first-node", type=int, default=0)
    parser.add_argument("--max-nodes", type=int, default=1)
    return parser.parse_args(arguments)


def _sidecar_options(options: argparse.Namespace, node: int) -> list[str]:
    values = {**vars(options), "node": node}
    del values["first_node"], values["max_nodes"]
    most = max(options.nodes, options.max_nodes)
    address = address_of(node, most=most, pod_ip=os.environ.get("POD_IP"))
    known = {"uid": os.environ.get("POD_UID"), "address": address}
    values |= {name: value for name, value in known.items() if value}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def prepare(spool: Spool, node: int) -> None:
    """Let the training, which may run as another user, write chunks; ``node.json`` lets it start."""
    for folder in (spool.logs, spool.metrics):
        with suppress(OSError):  # created by the training's side, which may write there, or put a link there
            folder.mkdir(parents=True, exist_ok=True)
            _let_all_write(folder)
    body = json.dumps({"schema": SCHEMA, "node": node}).encode()
    write_atomic(spool.root / "node.json", body, follow=False)


def _let_all_write(folder: Path) -> None:
    """Change the mode of the folder itself: this container may restart while the training runs."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o777)  # nosec B103  # the training has a user of its own, in this pod only
    finally:
        os.close(descriptor)


def address_of(node: int, *, most: int, pod_ip: str | None) -> str | None:
    """Address of node 0 for the processes of all nodes; None where *most*, the largest number, is one."""
    if most == 1 or node != 0 or not pod_ip:
        return None
    return f"{f'[{pod_ip}]' if ':' in pod_ip else pod_ip}:{RENDEZVOUS_PORT}"


def run(
    spool: Spool,
    keeper: Keeper,
    *,
    ending: threading.Event,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Keep the sidecar running until it reports that everything is uploaded.

    *ending* is set when the training's container has ended; then its end is reported, if the wrapper could
    not.
    """
    is_reported = False
    while keeper.process is not None or not keeper.is_done:
        keeper.keep()
        if ending.is_set() and not is_reported:
            is_reported = True
            detail = "the training's container ended without a word; its pod says why"
            with suppress(OSError):
                report_end(spool, Ended(signal=int(signal.SIGKILL), reason="killed", detail=detail))
        sleep(TURN_S)
        if keeper.process is not None and keeper.process.poll() is not None:
            keeper.died()
    return 0


if __name__ == "__main__":
    sys.exit(main())
