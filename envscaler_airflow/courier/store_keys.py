"""Keys of the run store that come as files, so that no environment in ``/proc`` shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path

VARIABLE = "ENVSCALER_STORE_KEYS"
"""Names the folder: a file for each variable that the store's client reads, as a mounted Secret has them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def load_store_keys() -> None:
    """Set what lies in the folder as variables of this process alone, if one is named.

    A process started later inherits them only if it is given ``os.environ``.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    for path in Path(folder).iterdir():
        if _NAME.match(path.name) and path.is_file():
            os.environ[path.name] = path.read_text(encoding="utf-8")
