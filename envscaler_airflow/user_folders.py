"""Where this machine's user keeps what we make: one rule for all rooms.

Source: XDG Base Directory Specification 0.8 (freedesktop.org): a variable that is unset, empty or no
absolute path does not count.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``envscaler`` below XDG_CACHE_HOME, else ``~/.cache``: what can be made again.

    Raises:
        RuntimeError: Neither the variable nor a home is there.
    """
    return _below("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """``envscaler`` below XDG_DATA_HOME, else ``~/.local/share``: what is to stay.

    Raises:
        RuntimeError: Neither the variable nor a home is there.
    """
    return _below("XDG_DATA_HOME", ".local/share")


def _below(variable: str, default: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    return (base if base.is_absolute() else Path.home() / default) / "envscaler"
