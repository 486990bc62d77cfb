"""The whole product from a shell: ``envscaler``."""

from __future__ import annotations

import logging

import click

from envscaler_airflow.cli.common import Group
from envscaler_airflow.cli.demo import demo
from envscaler_airflow.cli.inspect import cancel, logs, report, status
from envscaler_airflow.cli.offers import offers_command
from envscaler_airflow.cli.plan import plan_command
from envscaler_airflow.cli.registry import init, registry
from envscaler_airflow.cli.render import render
from envscaler_airflow.cli.run import run
from envscaler_airflow.cli.validate import validate


@click.group(cls=Group)
@click.version_option(package_name="envscaler-airflow")
@click.option("-v", "--verbose", is_flag=True, help="Log what the owner does, event by event.")
def main(*, verbose: bool) -> None:
    """Run stages from environment specs, and look at runs in a store."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )


for command in (validate, render, registry, init):
    main.add_command(command)
main.add_command(plan_command)
main.add_command(offers_command)
for command in (run, status, logs, report, cancel, demo):
    main.add_command(command)
