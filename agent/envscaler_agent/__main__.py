"""``envscaler-agent run [--spool FOLDER] -- COMMAND``: run any command as a stage's command runs."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import List, Optional

from envscaler_agent.spool import Spool
from envscaler_agent.wrapper import SIGTERM_GRACE_S, Options, Wrapper


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line *argv* and return the exit code."""
    arguments = _parser().parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        _parser().error("no command; write: envscaler-agent run -- COMMAND ...")
    spool = Spool(arguments.spool) if arguments.spool else Spool.from_env()
    options = Options(
        wait_start_s=arguments.wait_start,
        grace_s=arguments.grace,
        sampler=not arguments.no_sampler,
        warning=_two_packages(),
        exits=True,
    )
    return Wrapper(command, spool=spool, options=options).run()


def _two_packages() -> str:
    """A warning where two installed distributions hold this package, which upgrades mix; else empty."""
    found = []
    for name in ("envscaler-airflow", "envscaler-agent"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if len(found) < 2:
        return ""
    return (
        f"{found[0]} and {found[1]} are both installed here and both provide envscaler_agent; run: "
        "pip uninstall envscaler-agent, then install envscaler-airflow again"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="envscaler-agent", description="The agent of envscaler-airflow.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run a command, record what it does, stop it gracefully")
    run.add_argument("--spool", metavar="FOLDER", help="spool folder; default: $ENVSCALER_SPOOL, else none")
    run.add_argument(
        "--wait-start",
        type=float,
        metavar="S",
        help="longest wait for the sidecar's start.json, seconds; 0 goes on without one; default: for ever",
    )
    run.add_argument(
        "--grace",
        type=float,
        default=SIGTERM_GRACE_S,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL (%(default)g)",
    )
    run.add_argument(
        "--no-sampler", action="store_true", help="do not sample GPUs, CPU, memory, disk and network"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    return parser


def _exit() -> None:
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing is left to clean up, and a sampler that waits for the driver must not keep us


if __name__ == "__main__":
    _exit()
