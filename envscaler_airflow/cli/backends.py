"""The backend that a command uses: its options and settings, and the commands for backends alone."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import yaml

from envscaler_airflow.backends import BackendType, ShellOption, all_backends, backend_type
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.cli.common import NOT_NEGATIVE, echo_result, output_option, store_option
from envscaler_airflow.errors import SpecError
from envscaler_airflow.owner.reap import reap as reap_attempts
from envscaler_airflow.store.run_store import Store

_F = TypeVar("_F", bound=Callable[..., Any])


def backend_options(command: _F) -> _F:
    """Add ``--backend``, ``--config`` and the options of all backends; the command gets ``backend``."""
    options = _options()  # once: another package may come while this process runs

    @click.option(
        "--config", type=click.Path(path_type=Path), help="YAML with more settings, such as cluster_prices."
    )
    @functools.wraps(command)
    def connected(*args: Any, backend_name: str, config: Path | None, **kwargs: Any) -> Any:
        given = {option: kwargs.pop(_dest(option)) for option in options}
        own = _own(backend_type(backend_name), given)
        return command(*args, backend=shell_backend(backend_name, config, own), **kwargs)

    for option in reversed(options):
        names = (*option.flags, _dest(option))
        connected = click.option(*names, metavar=option.metavar, help=option.help)(connected)
    backend = click.option(
        "--backend", "backend_name", default="kubernetes", show_default=True, help="Where stages run."
    )
    return cast("_F", backend(connected))


def _options() -> list[ShellOption]:
    """Options of all backends; the first backend that has a flag names its setting."""
    found: dict[str, ShellOption] = {}
    for kind in all_backends().values():
        for option in kind.shell_options:
            if option.flags:
                found.setdefault(option.flags[-1], option)
    return [*found.values()]


def _dest(option: ShellOption) -> str:
    return "backend" + option.flags[-1].replace("-", "_")


def _own(kind: BackendType, given: Mapping[ShellOption, str | None]) -> dict[str, str]:
    """Settings that the user gave by option.

    Raises:
        SpecError: An option belongs to another backend.
    """
    own = {option.flags: option.setting for option in kind.shell_options}
    found = {}
    for option, value in given.items():
        if value is None:
            continue
        if option.flags not in own:
            raise SpecError(f"{option.flags[-1]}: backend {kind.name} has no such setting; leave it out")
        found[own[option.flags]] = value
    return found


def shell_backend(name: str, config: Path | None = None, given: Mapping[str, Any] | None = None) -> Backend:
    """The backend of that name, with the settings of :func:`settings_of`.

    Raises:
        SpecError: There is none of that name, or a setting cannot be used.
    """
    kind = backend_type(name)
    return kind.create(settings_of(kind, config, given or {}), None)


def settings_of(kind: BackendType, config: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file, then of the environment, then as *given*: the later counts.

    Raises:
        SpecError: The file cannot be read.
    """
    found: dict[str, Any] = {}
    if config is not None:
        try:
            body = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
            raise SpecError(f"{config}: cannot be read: {err}") from err
        if not isinstance(body, dict):
            raise SpecError(
                f"{config}: expected a mapping, got {type(body).__name__}; write namespace: training"
            )
        found |= body
    for setting, option in kind.options.items():
        name = f"ENVSCALER_{option.upper()}"
        if value := os.environ.get(name) or os.environ.get(f"AIRFLOW__ENVSCALER__{option.upper()}"):
            found[setting] = value
    for item in kind.shell_options:
        if item.variable is not None and (value := os.environ.get(item.variable)):
            found[item.setting] = value
    return found | dict(given)


@click.command()
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option(
    "--grace",
    "grace_s",
    type=NOT_NEGATIVE,
    default=30.0,
    show_default=True,
    help="Seconds that a node may take to end.",
)
@backend_options
@output_option
@store_option
def reap(*, store: Store, backend: Backend, dry_run: bool, grace_s: float, as_json: bool) -> None:
    """End and remove orphaned attempts on a backend, which no live run of the store owns.

    The command does not touch attempts in their first 15 minutes, or those of another store.
    """
    found = []
    for orphan in reap_attempts(store, backend, grace_s=grace_s, dry_run=dry_run):
        found.append({"name": orphan.handle.name, "reason": orphan.reason})
        if not as_json:
            click.echo(f"{orphan.handle.name}: {orphan.reason}")
    total = f"{len(found)} {'would go' if dry_run else 'gone'}"
    echo_result({"dry_run": dry_run, "orphans": found}, total, as_json=as_json)


_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""An RFC 1123 label, as names of namespaces are. Source: Kubernetes, *Object Names and IDs*."""


@click.group()
def kubernetes() -> None:
    """Prepare a cluster for stages."""


@kubernetes.command("rbac")
@click.option("-n", "--namespace", default="default", show_default=True, help="Where stages run.")
@click.option("--account", default="envscaler", show_default=True, help="Name of the service account.")
@click.option("--nodes/--no-nodes", default=True, show_default=True, help="Include the right to read nodes.")
@click.option(
    "--all-pods",
    is_flag=True,
    help="Include the right to list all pods of the cluster; only needed with wait_for_node_s: 0.",
)
@output_option
def rbac(*, as_json: bool, namespace: str, account: str, nodes: bool, all_pods: bool) -> None:
    """Print the minimal Role for kubectl apply -f -."""
    from envscaler_airflow.backends.kubernetes import security  # noqa: PLC0415  (this command alone is of it)

    for option, name in (("--namespace", namespace), ("--account", account)):
        if _LABEL.fullmatch(name) is None:
            raise SpecError(
                f"{option}: Kubernetes refuses the name {name!r:.80}; write at most 63 of a-z, 0-9 and -, "
                "with a letter or digit at both ends, such as ml-training"
            )
    documents = security.rbac(namespace, account=account, nodes=nodes, all_pods=all_pods)
    text = yaml.safe_dump_all(documents, sort_keys=False)
    echo_result({"apiVersion": "v1", "kind": "List", "items": documents}, text, as_json=as_json)
