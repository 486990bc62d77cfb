"""Options and look-ups that every command of the shell shares."""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, cast

import click

from envscaler_airflow.envspec.quantities import duration_s
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.local_files import data_folder, user_name
from envscaler_airflow.planning.amounts import rounded_money
from envscaler_airflow.store.keys import SHELL_DAG, RunKey, encode_part
from envscaler_airflow.store.run import Run, run_prefixes
from envscaler_airflow.store.run_store import Store, deployment_of, open_store

_F = TypeVar("_F", bound=Callable[..., Any])

SPEC_ENDINGS = (".yaml", ".yml")
"""How a file's name ends that is given where no file is taken: it is meant as the spec."""


class Amount(click.FloatRange):
    """A finite number in a range; click itself accepts NaN in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it."""
        try:
            float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r:.40} is not a number; write one without a unit, such as 25", param, ctx)
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            name = param.name if param is not None else "the number"
            self.fail(f"{name} must be finite, got {value}", param, ctx)
        return found


POSITIVE = Amount(min=0, min_open=True, max=1e18)
NOT_NEGATIVE = Amount(min=0, max=1e12)
"""Dollars, and what else may be nothing."""


def not_empty(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text, which a variable that is not set leaves: it would say nothing, unseen."""
    if value is not None and not value.strip():
        raise click.BadParameter("is empty; write one, or leave the option out")
    return value


def duration_option(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Seconds of a duration such as ``90m`` or ``7d``."""
    if value is None:
        return None
    try:
        return duration_s(value)
    except ValueError as err:
        raise click.BadParameter(str(err)) from err


def without_deadline(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """Report the strategy that is used instead, because a shell run has no deadline."""
    if value == "deadline":
        click.echo("-- a run from a shell has no deadline: --strategy deadline is cost here", err=True)
    return value


def output_option(command: _F) -> _F:
    """Add ``--output text|json`` and its short form ``--json``; the command gets ``as_json``."""

    @click.option(
        "--output",
        "output_form",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="json: machine-readable, on standard output.",
    )
    @click.option("--json", "is_json", is_flag=True, help="The same as --output json.")
    @functools.wraps(command)
    def with_output(*args: Any, output_form: str, is_json: bool, **kwargs: Any) -> Any:
        return command(*args, as_json=is_json or output_form == "json", **kwargs)

    return cast("_F", with_output)


def echo_json(body: Any, *, indent: int | None = None) -> None:
    """Print *body* for tools on standard output, its money rounded."""
    click.echo(json.dumps(rounded_money(body), indent=indent))


def echo_result(body: Any, text: str, *, as_json: bool) -> None:
    """Print *body* for tools, or *text* for readers."""
    if as_json:
        echo_json(body)
    else:
        click.echo(text, nl=not text.endswith("\n"))


def default_store_url() -> str:
    """``ENVSCALER_STORE_URL``, else Airflow's own setting by its variable, else a folder of the user's."""
    configured = os.environ.get("ENVSCALER_STORE_URL") or os.environ.get("AIRFLOW__ENVSCALER__STORE_URL")
    return configured or f"file://{data_folder()}/store"


def store_option(command: _F) -> _F:
    """Add ``--store URL`` and hand the command an open store as ``store``."""

    @click.option(
        "--store",
        "store_url",
        default=default_store_url,
        show_default="ENVSCALER_STORE_URL, or a folder of the user",
        help="Run store.",
    )
    @functools.wraps(command)
    def opened(*args: Any, store_url: str, **kwargs: Any) -> Any:
        return command(*args, store=open_store(store_url), **kwargs)

    return cast("_F", opened)


def shell_key(store: Store, name: str, task: str) -> RunKey:
    """Key of a run started from a shell."""
    configured = os.environ.get("AIRFLOW__ENVSCALER__DEPLOYMENT") or None
    if configured is None and not store.url.startswith("file:"):
        configured = f"shell-{user_name()}"
    return RunKey(deployment_of(store, configured), SHELL_DAG, name, task)


def find_run(store: Store, text: str) -> Run:
    """The run that *text* names: its whole prefix, or a part of one that is unique.

    Names match as given, and in the form that the folder has, where ``v1.2`` is ``v1%2E2``.

    Raises:
        SpecError: None or several runs end so; the message lists them.
    """
    parts = text.strip("/").split("/")
    spellings = [parts]
    if all(parts):
        spellings += [[encode_part(part) for part in parts], [encode_part(text)]]
    found = [prefix for prefix in run_prefixes(store) if any(_ends(prefix, one) for one in spellings)]
    if len(found) == 1:
        return Run(store, found[0])
    if not found:
        raise SpecError(f"no run in {store.url} is named {text!r}; `envscaler status` lists them")
    listed = "\n  ".join(found[:20])
    raise SpecError(
        f"{len(found)} runs in {store.url} are named {text!r}; write more of the name:\n  {listed}"
    )


def _ends(prefix: str, wanted: list[str]) -> bool:
    parts = prefix.split("/")
    return any(parts[start : start + len(wanted)] == wanted for start in range(len(parts)))


class Output(io.FileIO):
    """Standard output or error whose reader may go away: what no process reads any longer is discarded.

    So neither ``| head`` nor a terminal that is closed changes what a command does, or its exit code.

    Attributes:
        is_unread: True once the reader has gone.
    """

    is_unread = False

    def write(self, data: Any) -> int:
        """Write *data*, or discard it; returns its size in bytes."""
        try:
            return super().write(data) or 0
        except OSError as err:
            if err.errno not in (errno.EPIPE, errno.EIO):
                raise
        self.is_unread = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return memoryview(data).nbytes


def is_unread() -> bool:
    """Return True once no process reads standard output: what only prints for ever can end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, Output) and raw.is_unread


@contextmanager
def outlive_readers() -> Iterator[None]:
    """Make standard output and error such :class:`Output`; streams that a test replaced stay."""
    before = sys.stdout, sys.stderr
    for name, own in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if own is not None and getattr(sys, name) is own:
            raw = Output(own.fileno(), "wb", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=own.encoding,
                errors=own.errors,
                line_buffering=own.line_buffering,
                write_through=name == "stderr",
            )
            setattr(sys, name, text)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


class Group(click.Group):
    """Errors of ours end a command with one readable message and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; a reader of its output that goes away changes nothing."""
        with outlive_readers():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as err:
            where = [] if err.ctx is None else [item.opts for item in err.ctx.command.params]
            if ["-f", "--file"] in where and err.message.rstrip(")").endswith(SPEC_ENDINGS):
                raise click.UsageError(f"{err.message}; a spec is -f FILE", err.ctx) from err
            raise
        except EnvScalerError as err:
            click.echo(f"Error: {err}", err=True)
            ctx.exit(2)
        except OSError as err:
            if err.errno != errno.ENOSPC and err.filename is None:
                raise
            told = f"{err.filename}: {err.strerror}; name another path, or see to this one"
            if err.errno == errno.ENOSPC:
                told = f"the disk is full: {err}"
            click.echo(f"Error: {told}", err=True)
            ctx.exit(2)
        except RuntimeError as err:
            if os.path.expanduser("~") != "~":  # noqa: PTH111  (pathlib's raises where there is none)
                raise
            click.echo(f"Error: {err} Set HOME, or XDG_CACHE_HOME and XDG_DATA_HOME", err=True)
            ctx.exit(2)


class LazyGroup(Group):
    """Imports a command when it is used; until then ``commands`` has one of that name without options."""

    def __init__(self, name: str | None = None, *, places: Mapping[str, str], **kwargs: Any) -> None:
        """Remember where each command is: ``module:name`` below ``cli``, by the command's name."""
        super().__init__(name, {place: click.Command(place) for place in places}, **kwargs)
        self._places = dict(places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported; None if there is none of that name."""
        place = self._places.pop(cmd_name, None)
        if place is not None:
            module, _, attribute = place.partition(":")
            self.add_command(getattr(import_module(f"envscaler_airflow.cli.{module}"), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)
