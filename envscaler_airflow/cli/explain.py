"""``explain``: why a run was or was not moved, in words."""

from __future__ import annotations

import json
from itertools import groupby

import click

from envscaler_airflow.cli.common import find_run, output_option, store_option
from envscaler_airflow.scaling import explain as in_words
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.decisions import read_decisions


@click.command()
@click.argument("run")
@click.option("--all", "is_all", is_flag=True, help="Every check, not only where the decision changed.")
@output_option
@store_option
def explain(run: str, *, is_all: bool, as_json: bool, store: Store) -> None:
    """Say why the policy of RUN kept or moved it, with the numbers."""
    found = list(read_decisions(store, find_run(store, run)))
    if not found:
        why = "no scaling check is recorded: the stage has no ScalingSensor, or it has not looked yet"
        click.echo(why, err=as_json)
        return
    if as_json:
        for check, times in found:
            click.echo(json.dumps({"times": times, **check.to_dict()}))
        return
    if is_all:
        for check, times in found:
            click.echo(in_words(check) + (f"\n  seen {times} times in a row" if times > 1 else ""))
        return
    for _, group in groupby(found, key=lambda item: (item[0].decision.action, item[0].decision.target.name)):
        items = list(group)
        times = sum(count for _, count in items)
        click.echo(in_words(items[-1][0]) + (f"\n  decided {times} times in a row" if times > 1 else ""))
