"""``schema``: what editors and readers need to write a spec."""

from __future__ import annotations

import json

import click

from envscaler_airflow.build.reference import reference_text, schema_text
from envscaler_airflow.cli.common import output_option


@click.command()
@click.option("--markdown", is_flag=True, help="The reference of fields instead.")
@output_option
def schema(*, markdown: bool, as_json: bool) -> None:
    """Print the JSON Schema of specs, by which editors complete and check envscaler.yaml."""
    if markdown and as_json:
        click.echo(json.dumps({"markdown": reference_text()}))
        return
    click.echo(reference_text() if markdown else schema_text(), nl=False)
