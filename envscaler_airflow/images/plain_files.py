"""Files that a person names: read when they are plain ones, so that no pipe, device or size holds us up."""

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
"""Byte order marks; that of UTF-16 begins that of UTF-32, so the longer ones come first."""


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
    """Text of *path*, at most *most* bytes of UTF-8, or of what a byte order mark says.

    Editors on Windows begin files with a mark, and PowerShell writes UTF-16.

    Raises:
        OSError: It cannot be read, is larger, or is no plain file.
        UnicodeDecodeError: It is neither.
    """
    data = read_bytes(real_path(path), most)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode("utf-8")
