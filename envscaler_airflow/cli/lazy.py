"""Commands that are imported when they are called: one command does not wait for the others' imports."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class Commands(dict[str, click.Command]):
    """``{"run": "run:run"}``: by name, the module below ``cli`` and the command in it."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """Remember where each command is; import none."""
        super().__init__()
        self._places = dict(places)
        for name in self._places:
            super().__setitem__(name, click.Command(name))  # stands in for it in lists of names

    def __getitem__(self, name: str) -> click.Command:
        """Import the command.

        Raises:
            KeyError: There is no such command.
        """
        place = self._places.pop(name, None)
        if place is not None:
            module, _, attribute = place.partition(":")
            self[name] = getattr(import_module(f"envscaler_airflow.cli.{module}"), attribute)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The command, or *default*."""
        try:
            return self[name]
        except KeyError:
            return default

    def __setitem__(self, name: str, command: click.Command) -> None:
        """Add a command that is imported already."""
        self._places.pop(name, None)
        super().__setitem__(name, command)
