"""``python -m envscaler_airflow.sidecar``: one node's sidecar, until everything is uploaded."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envscaler_agent.ending import EXIT_ORPHANED
from envscaler_airflow.errors import EnvScalerError
from envscaler_airflow.sidecar.context import (
    InterruptibleStore,
    SidecarContext,
    UnheededError,
    load_store_keys,
)
from envscaler_airflow.sidecar.loop import Sidecar
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Spool
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store

log = logging.getLogger("envscaler_airflow.sidecar")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m envscaler_airflow.sidecar", description=__doc__)
    parser.add_argument("--spool", type=Path, required=True, help="folder shared with the wrapper")
    parser.add_argument("--store", required=True, help="URL of the run store")
    parser.add_argument("--prefix", required=True, help="the run's folder in the store")
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--layout", type=Path, required=True, help="layout.json of this node")
    parser.add_argument("--uid", default="", help="of the pod or node process, by which it claims the node")
    parser.add_argument("--address", help="host:port at which the other nodes reach this one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one node; 0 when done or stopped (the next sidecar continues), 1 after an error.

    EXIT_ORPHANED: the attempt is orphaned and the wrapper does not stop; the process that started both stops
    it.
    """
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s sidecar %(levelname)s %(message)s")
    try:
        context = _context(options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: context.ending.set())
        is_done = Sidecar(context).run()
    except UnheededError as err:
        log.error("the machine must end this attempt: %s", err)  # noqa: TRY400 - the message says it all
        return EXIT_ORPHANED
    except EnvScalerError as err:
        log.error("%s: %s", type(err).__name__, err)  # noqa: TRY400 - the message says it all
        return 1
    log.info("done" if is_done else "ends before it is done; the next one goes on")
    return 0


def _context(options: argparse.Namespace) -> SidecarContext:
    load_store_keys()
    layout = Layout.read(options.layout)
    spool = Spool(options.spool)
    store: Any = InterruptibleStore(open_store(options.store, layout.store_options, must_exist=True))
    signal.signal(signal.SIGUSR1, lambda *_: store.go_away())
    run = Run(store, options.prefix)
    who = AttemptNode(options.generation, options.attempt, options.node, options.nodes, claim=0)
    return SidecarContext(
        spool=spool,
        run=run,
        who=who,
        layout=layout,
        memory=Memory(spool, own=layout.private_path),
        uid=options.uid,
        address=options.address,
    )


if __name__ == "__main__":
    status = main()
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # when Python exits, it restores the default handler, which would kill it
    sys.exit(status)
