"""For golden tests: nothing that they write must survive a power cut."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """A store waits for the disk after each write, which is most of the time that these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)
