"""The native sidecar of a pod: prepares the node, keeps the sidecar process running, and lets it finish.

    python -m envscaler_airflow.backends.kubernetes.pod_sidecar --spool E --store URL --prefix P
        --generation G --attempt A --nodes M --layout layout.json [--first-node N] [--most-nodes N]

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envscaler_agent.protocol import SCHEMA, Ended, Status
from envscaler_airflow.errors import ProtocolError

BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before the sidecar is restarted, seconds. Chosen: quick once, quiet in a crash loop."""
SETUP_TRIES = 5
"""How often the sidecar may die before the training has started. Chosen: about 30 s of crashes."""
TURN_S = 0.5
RENDEZVOUS_PORT = 29400
"""Source: torchrun's default for c10d."""


@dataclass(frozen=True, slots=True)
class Node:
    """Which node this is, and the paths of the sidecar process. ``most``: the largest number of nodes."""

    spool: Path
    generation: int
    attempt: int
    node: int
    nodes: int
    most: int = 1

    @property
    def is_alone(self) -> bool:
        """True when there will never be another node."""
        return max(self.nodes, self.most) == 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one pod; 0 when everything is uploaded."""
    options = _parse(arguments)
    node = Node(
        options.spool,
        options.generation,
        options.attempt,
        options.first_node + int(os.environ.get("JOB_COMPLETION_INDEX", "0")),
        options.nodes,
        options.most_nodes or options.nodes,
    )
    os.umask(0)  # the training may run as another user
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    node.spool.mkdir(parents=True, exist_ok=True)
    prepare(node)
    command = [sys.executable, "-m", "envscaler_airflow.sidecar", *_sidecar_options(options, node)]
    return Keeper(node, lambda: subprocess.Popen(command, start_new_session=True), ending=ending).run()


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
    parser.add_argument("--most-nodes", type=int)
    return parser.parse_args(arguments)


def _sidecar_options(options: argparse.Namespace, node: Node) -> list[str]:
    values = {**vars(options), "node": node.node}
    del values["first_node"], values["most_nodes"]
    known = {"uid": os.environ.get("POD_UID"), "address": address_of(node, os.environ.get("POD_IP"))}
    values |= {name: value for name, value in known.items() if value}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


# -- before the sidecar


def prepare(node: Node) -> None:
    """Let the training, which may run as another user, write chunks; ``node.json`` lets it start."""
    for folder in ("logs", "metrics"):
        here = node.spool / folder
        here.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # created by the training's side, which may then write there
            here.chmod(0o777)
    _write(node.spool / "node.json", {"node": node.node})


def address_of(node: Node, pod_ip: str | None) -> str | None:
    """Address of node 0 for the processes of all nodes; None where there is never another node."""
    if node.is_alone or node.node != 0 or not pod_ip:
        return None
    return f"{f'[{pod_ip}]' if ':' in pod_ip else pod_ip}:{RENDEZVOUS_PORT}"


# -- the sidecar


class Keeper:
    """Keeps one sidecar running until it is done."""

    def __init__(
        self,
        node: Node,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        ending: threading.Event,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start it with *start*; *ending* is set when the training's container has ended."""
        self._node = node
        self._start = start
        self._ending = ending
        self._sleep = sleep
        self._monotonic = monotonic
        self._deaths = 0
        self._told = False

    def run(self) -> int:
        """Run until the sidecar reports that everything is uploaded."""
        while not self.is_done:
            born = self._monotonic()
            process = self._start()
            while process.poll() is None:
                self._look_at_end()
                self._sleep(TURN_S)
            if not self.is_done:
                self._died(born)
        return 0

    @property
    def is_done(self) -> bool:
        """True when ``sidecar.json`` shows it."""
        try:
            body = json.loads((self._node.spool / "sidecar.json").read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(body, dict) and body.get("phase") == "done"

    def _died(self, born: float) -> None:
        if self._monotonic() - born > 2 * BACK_OFF_S[-1]:
            self._deaths = 0
        start = self._node.spool / "start.json"
        if self._deaths + 1 >= SETUP_TRIES and not start.exists():
            reason = (
                f"the sidecar died {self._deaths + 1} times before the start; see the log of this container"
            )
            _write(start, {"failed": reason})
        self._look_at_end()
        self._sleep(BACK_OFF_S[min(self._deaths, len(BACK_OFF_S) - 1)])
        self._deaths += 1

    def _look_at_end(self) -> None:
        """Once the training's container has ended, report its end if the wrapper could not."""
        if self._ending.is_set() and not self._told:
            self._told = True
            tell_end(self._node.spool / "wrapper.json")


def tell_end(path: Path) -> None:
    """Complete the last status of a wrapper that was killed before it could report its end."""
    try:
        last = Status.from_json(path.read_bytes(), where=path.name)
    except (OSError, ProtocolError):
        last = Status()
    if last.ended is not None:
        return
    detail = "the training's container ended without a word; its pod says why"
    ended = Ended(signal=int(signal.SIGKILL), reason="killed", detail=detail)
    body = replace(last, sequence=last.sequence + 1, phase="ended", ended=ended).to_json()
    with suppress(OSError):
        _replace(path, body)


def _write(path: Path, body: dict[str, Any]) -> None:
    _replace(path, json.dumps({"schema": SCHEMA, **body}).encode())


def _replace(path: Path, body: bytes) -> None:
    part = path.with_name(f".{path.name}.sidecar")
    part.write_bytes(body)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
