"""``kubernetes``: what the owner of a cluster needs."""

from __future__ import annotations

import json
import re

import click
import yaml

from envscaler_airflow.backends.kubernetes import rbac as rights
from envscaler_airflow.cli.common import output_option
from envscaler_airflow.errors import SpecError

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""An RFC 1123 label, as names of namespaces are. Source: Kubernetes, *Object Names and IDs*."""


@click.group()
def kubernetes() -> None:
    """Prepare a cluster for stages."""


@kubernetes.command("rbac")
@click.option("-n", "--namespace", default="default", show_default=True, help="Where stages run.")
@click.option("--account", default="envscaler", show_default=True, help="Name of the service account.")
@click.option("--nodes/--no-nodes", default=True, show_default=True, help="With the right to read nodes.")
@click.option(
    "--all-pods",
    is_flag=True,
    help="With the right to list all pods of the cluster: for wait_for_node_s: 0 alone.",
)
@output_option
def rbac(*, as_json: bool, namespace: str, account: str, nodes: bool, all_pods: bool) -> None:
    """Print the smallest rights that work, for kubectl apply -f -."""
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
