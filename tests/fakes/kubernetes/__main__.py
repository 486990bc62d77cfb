"""A fake cluster to try things in.

Use: ``PYTHONPATH=tests python -m fakes.kubernetes --kubeconfig FILE [--execute]``.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from fakes.kubernetes import Cluster
from fakes.kubernetes.processes import Processes


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="fakes.kubernetes", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="where to write the way in")
    parser.add_argument("--execute", action="store_true", help="run containers' commands as processes")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of 8 CPUs and 32 GiB")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of one more node")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    options = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_args: ended.set())
    executor = Processes() if options.execute else None
    with Cluster(nodes=options.nodes, executor=executor, port=options.port, tls=True) as cluster:
        if options.gpus:
            cluster.add_node("gpu-0", gpus=options.gpus, labels={"nvidia.com/gpu.present": "true"})
        cluster.kubeconfig(options.kubeconfig)
        print(f"{cluster.url}  KUBECONFIG={options.kubeconfig}", flush=True)  # noqa: T201 - a program's answer
        ended.wait()


if __name__ == "__main__":
    main()
