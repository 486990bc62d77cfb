"""Read files that a user names, but only regular files, so that no pipe, device or size blocks us."""

from __future__ import annotations

import codecs
import errno
from pathlib import Path

from envscaler_airflow.backends.local.files import read_bytes

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; UTF-32's begins with that of UTF-16, so the longer ones come first."""


def real_path(path: Path) -> Path:
    """Resolve *path* with every link followed.

    Raises:
        OSError: Its links form a loop.
    """
    try:
        return path.resolve()
    except RuntimeError as err:  # as Python before 3.13 reports it
        raise OSError(errno.ELOOP, "its links lead round in a circle") from err


def read_plain(path: Path, most: int) -> str:
    """Read the text of *path*, at most *most* bytes, as UTF-8 or as its byte order mark declares.

    Editors on Windows write such a mark, and PowerShell writes UTF-16.

    Raises:
        OSError: The file cannot be read, is larger, or is not a regular file.
        UnicodeDecodeError: The text is in neither encoding.
    """
    data = read_bytes(real_path(path), most)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode("utf-8")
