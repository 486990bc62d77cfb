"""``schema``: what editors and readers need to write a spec."""

from __future__ import annotations

import click

from envscaler_airflow.build.reference import reference_text, schema_text


@click.command()
@click.option("--markdown", is_flag=True, help="The reference of fields instead.")
def schema(*, markdown: bool) -> None:
    """Print the JSON Schema of specs, by which editors complete and check envscaler.yaml."""
    click.echo(reference_text() if markdown else schema_text(), nl=False)
