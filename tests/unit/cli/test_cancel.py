"""Where a shell that stops an orphaned run finds its machines."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fakes.run_events import SMALL, begun, intended, run, started

from envscaler_airflow.cli import cancel
from envscaler_airflow.cli.common import shell_key
from envscaler_airflow.run.event_bodies import NewGeneration, StopRequested
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.run import Run

ON_CLUSTER = replace(SMALL, offer=replace(SMALL.offer, cloud="kubernetes"))


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([begun(), intended(allocation=ON_CLUSTER)], "kubernetes"),
        ([begun(), intended(allocation=ON_CLUSTER), started()], "kubernetes"),
        ([begun(), intended()], "local"),
        ([begun()], "local"),
    ],
)
def test_the_machines_of_an_intent_are_looked_for_where_it_was_to_start(tmp_path, monkeypatch, events, name):
    """Its owner may have started it and died before it could record the start (A4)."""
    monkeypatch.setattr(cancel, "shell_backend", lambda kind, given: kind)
    found = Run(FileStore(tmp_path), "shell/shell/one/train/-1")

    assert cancel.backend_of(found, run(*events)) == name


def test_a_user_without_a_name_can_cancel(tmp_path, monkeypatch):
    """As in a container with a number for its user: the request names the number."""

    def fail():
        raise KeyError("getpwuid(): uid not found: 50000")

    monkeypatch.setattr("getpass.getuser", fail)
    store = FileStore(tmp_path)
    found = Run(store, shell_key(store, "one", "train").prefix)
    found.events.append(0, NewGeneration(generation=1, spec_hash="A"))

    cancel._Cancel(found, print)._beside_airflow(found.events.load())

    asked = [event.body for event in found.events.read() if isinstance(event.body, StopRequested)]
    assert [body.by for body in asked] == [f"uid {os.getuid()}"]
