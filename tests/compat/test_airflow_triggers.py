"""Triggers that any release has put into a metadata database still come to life after an upgrade."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from airflow.sdk.module_loading import import_string

from envscaler_airflow.controller.stage import Watching

RELEASES = sorted((Path(__file__).parent / "triggers").glob("*.json"))


def triggers_of(release):
    """Class path and arguments of each trigger of a release."""
    return [
        pytest.param(*item, id=f"{release.stem}-{item[0].rpartition('.')[2]}")
        for item in json.loads(release.read_text())
    ]


@pytest.mark.parametrize(
    ("path", "arguments"), [item for release in RELEASES for item in triggers_of(release)]
)
def test_a_trigger_of_a_release_is_still_understood(path, arguments):
    """It takes its old arguments, and writes them down again unchanged beside newer ones."""
    trigger = import_string(path)(**arguments)

    again, written = trigger.serialize()

    assert again == path
    assert {name: written[name] for name in arguments} == arguments
    if "watching" in arguments:
        assert Watching.from_dict(arguments["watching"]).attempt == arguments["watching"]["attempt"]


def test_this_release_has_its_triggers_written_down():
    """A release that adds an argument adds its own file here."""
    from envscaler_airflow import __version__

    assert f"{__version__}.json" in {release.name for release in RELEASES}
