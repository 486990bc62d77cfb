"""Build the packaged snapshot from tables of offers.

Run it with ``python -m envscaler_airflow.catalog FOLDER``.

It is for maintainers of the package; users refresh prices instead.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import click

from envscaler_airflow.catalog.packaged import SNAPSHOT, pack
from envscaler_airflow.catalog.sources import Published, read_tables
from envscaler_airflow.clouds.aws import read_machine
from envscaler_airflow.planning.table import InstanceDetails, OfferTable

LABEL = "published list prices, packaged (AWS 2026-07-20, Azure 2026-06-18, GCP 2026-08-03)"
"""Label shown with each plan that uses the snapshot."""

_LAMBDA = "Lambda price in skypilot-catalog v8 at 0f407038"
_NEBIUS = "Nebius price in skypilot-catalog v8 at 0082b043"
PUBLISHED = Published(
    {
        ("aws", "list"): "AWS list price of 2026-07-20",
        ("azure", "list"): "Azure retail price of 2026-06-18",
        ("gcp", "list"): "GCP list price of 2026-08-03",
        ("gcp", "list-attach"): "GCP list price of an attached GPU, zones unverified",
        ("lambda", "list"): _LAMBDA,
        ("nebius", "list"): _NEBIUS,
        (
            "alibaba",
            "list-2024-cny",
        ): "Alibaba Cloud list price of 2024-10-10, at 7.1 CNY a USD (CNY assumed)",
    }
)
"""Published kinds of price in the tables, with their dates; every other kind is treated as unknown."""


AWS_TYPES = "DescribeInstanceTypes, as recorded in moto 5.2.5"


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--aws-types",
    type=click.Path(exists=True, path_type=Path),
    help="moto's ec2/resources/instance_types.json.gz.",
)
@click.option("--out", type=click.Path(path_type=Path), help="By default the file in the package.")
def main(folder: Path, aws_types: Path | None, out: Path | None) -> None:
    """Write the snapshot of the tables in FOLDER."""
    table = read_tables(folder, published=PUBLISHED, label=LABEL)
    machines = {} if aws_types is None else read_machines(aws_types, table)
    out = out or Path(__file__).with_name(SNAPSHOT)
    out.write_bytes(pack(replace(table, faults=(), machines=machines)))
    click.echo(f"{out}: {len(table)} rows of {len(table.kinds)} types, {out.stat().st_size} bytes")
    for fault in table.faults:
        click.echo(fault, err=True)


def read_machines(path: Path, table: OfferTable) -> dict[tuple[str, str], InstanceDetails]:
    """Facts of the AWS types of *table*, from responses of DescribeInstanceTypes by type."""
    body = json.loads(gzip.decompress(path.read_bytes()))
    names = {kind.instance_type for kind in table.kinds if kind.cloud == "aws"}
    return {("aws", name): read_machine(body[name], source=AWS_TYPES) for name in sorted(names & body.keys())}


if __name__ == "__main__":
    main()
