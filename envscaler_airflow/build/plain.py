"""Files that a person names: read when they are plain ones, so that no pipe, device or size holds us up."""

from __future__ import annotations

import errno
from pathlib import Path

from envscaler_airflow.backends.local.files import read_bytes


def real_path(path: Path) -> Path:
    """Where *path* leads, every link of it followed.

    Raises:
        OSError: Its links lead round in a circle.
    """
    try:
        return path.resolve()
    except RuntimeError as err:  # as Python before 3.13 says it
        raise OSError(errno.ELOOP, "its links lead round in a circle") from err


def read_plain(path: Path, most: int) -> str:
    """Text of *path*, at most *most* bytes of UTF-8.

    Raises:
        OSError: It cannot be read, is larger, or is no plain file.
        UnicodeDecodeError: It is no UTF-8.
    """
    data = read_bytes(real_path(path), most)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    return data.decode("utf-8")
