"""The cluster that a command uses: options that every command on Kubernetes shares."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import yaml

from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.backends.kubernetes import security as rights
from envscaler_airflow.cli.common import NOT_NEGATIVE, output_option, store_option
from envscaler_airflow.errors import SpecError
from envscaler_airflow.owner.reap import reap as reap_jobs
from envscaler_airflow.store.base import Store

_F = TypeVar("_F", bound=Callable[..., Any])

_ENVIRONMENT = {
    "sidecar_image": "ENVSCALER_SIDECAR_IMAGE",
    "image": "ENVSCALER_IMAGE",
    "image_repository": "ENVSCALER_IMAGE_REPOSITORY",
    "namespace": "ENVSCALER_NAMESPACE",
}


def cluster_options(command: _F) -> _F:
    """Add ``--cluster``, ``--kubeconfig``, ``--namespace`` and ``--config``; the command gets ``backend``."""

    @click.option("--cluster", "context", metavar="CONTEXT", help="Context of the kubeconfig.")
    @click.option("--kubeconfig", type=click.Path(path_type=Path), help="Path of another kubeconfig.")
    @click.option("-n", "--namespace", help="Namespace for all created objects.")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="YAML with more settings, such as cluster_prices."
    )
    @click.option("--sidecar-image", help="The sidecar image, of `envscaler images build-sidecar`.")
    @click.option("--image", help="Image of the stage, instead of the spec's base image.")
    @functools.wraps(command)
    def connected(*args: Any, config: Path | None, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in ("namespace", "sidecar_image", "image")}
        where = {"context": kwargs.pop("context"), "kubeconfig": _text(kwargs.pop("kubeconfig"))}
        backend = KubernetesBackend(**where, **settings_of(config, given))
        return command(*args, backend=backend, **kwargs)

    return cast("_F", connected)


def settings_of(config: Path | None, given: dict[str, str | None]) -> dict[str, Any]:
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
    found |= {name: os.environ[key] for name, key in _ENVIRONMENT.items() if os.environ.get(key)}
    return found | {name: value for name, value in given.items() if value is not None}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


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
    for option, name in (("--namespace", namespace), ("--account", account)):
        if _LABEL.fullmatch(name) is None:
            raise SpecError(
                f"{option}: Kubernetes refuses the name {name!r:.80}; write at most 63 of a-z, 0-9 and -, "
                "with a letter or digit at both ends, such as ml-training"
            )
    documents = rights.rbac(namespace, account=account, nodes=nodes, all_pods=all_pods)
    if as_json:
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
        return
    click.echo(yaml.safe_dump_all(documents, sort_keys=False), nl=False)


@click.command()
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option(
    "--grace",
    "grace_s",
    type=NOT_NEGATIVE,
    default=30.0,
    show_default=True,
    help="Seconds that a pod may take to end.",
)
@cluster_options
@output_option
@store_option
def reap(*, store: Store, backend: KubernetesBackend, dry_run: bool, grace_s: float, as_json: bool) -> None:
    """End and remove orphaned Jobs of a namespace, which no live run of the store owns.

    The command does not touch Jobs in their first 15 minutes, or Jobs of another store.
    """
    found = []
    for orphan in reap_jobs(store, backend, grace_s=grace_s, dry_run=dry_run):
        found.append({"name": orphan.handle.name, "reason": orphan.reason})
        if not as_json:
            click.echo(f"{orphan.handle.name}: {orphan.reason}")
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, "orphans": found}))
        return
    click.echo(f"{len(found)} {'would go' if dry_run else 'gone'}")
