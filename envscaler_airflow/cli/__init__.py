"""The whole product from a shell: ``envscaler``."""

from __future__ import annotations

import logging
import signal
import threading
from functools import partial

import click

from envscaler_airflow.cli.common import LazyGroup

_PLACES = {
    "validate": "specs:validate",
    "render": "run_commands:render",
    "registry": "specs:registry",
    "init": "specs:init",
    "build": "images:build",
    "images": "images:images",
    "agent-wheel": "images:agent_wheel_command",
    "dry-run": "specs:dry_run",
    "schema": "specs:schema",
    "plan": "plan:plan_command",
    "offers": "catalog:offers_command",
    "catalog": "catalog:catalog",
    "run": "run_commands:run",
    "submit": "run_commands:submit",
    "reap": "backends:reap",
    "kubernetes": "backends:kubernetes",
    "status": "inspect:status",
    "logs": "inspect:logs",
    "report": "inspect:report",
    "cancel": "cancel:cancel",
    "prune": "cancel:prune",
    "explain": "inspect:explain",
    "profile": "profile_commands:profile",
    "advise": "profile_commands:advise",
    "drill": "drill:drill",
    "simulate": "simulate:simulate",
    "demo": "demo:demo",
}


@click.group(cls=LazyGroup, places=_PLACES)
@click.version_option(package_name="envscaler-airflow")
@click.option("-v", "--verbose", is_flag=True, help="Log what the owner does, event by event.")
@click.pass_context
def main(context: click.Context, *, verbose: bool) -> None:
    """Run stages from environment specs, and inspect the runs in a store."""
    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGTERM, signal.SIGHUP):
            if (before := signal.getsignal(kind)) is not signal.SIG_IGN:  # nohup's stays ignored
                signal.signal(kind, _end)
                context.call_on_close(partial(signal.signal, kind, before))
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )


def _end(number: int, _frame: object) -> None:
    """Leave by way of every ``finally``: containers end, and files with credentials go."""
    raise SystemExit(128 + number)
