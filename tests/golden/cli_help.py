"""The help of every command, as a terminal of 100 columns shows it."""

from __future__ import annotations

import click

from envscaler_airflow.cli import main

WIDTH = 100


def golden_files():
    """One page with the help of ``envscaler`` and of each verb below it."""
    return {"cli-help.txt": "\n".join(_pages(main, None, "envscaler"))}


def _pages(command, parent, name):
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            yield from _pages(command.get_command(context, verb), context, verb)
