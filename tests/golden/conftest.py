"""For golden tests: their files need not survive a power cut."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """A store waits for the disk after each write, which would take most of these tests' time."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)
