"""The stand-in for NVIDIA's driver library: built once, scripted by a file (see standins/nvml.c)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

SOURCE = Path(__file__).parents[1] / "standins" / "nvml.c"
NAME = "libnvidia-ml.so.1"


def build(folder: Path) -> Path:
    """The library below *folder*, under the name that pynvml loads."""
    library = folder / NAME
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


class Driver:
    """A library and its script.

    Attributes:
        environ: Variables with which a process finds both.
    """

    def __init__(self, library: Path, script: Path) -> None:
        """Start with one ordinary GPU."""
        self._library = library
        self._script = script
        self.environ = {"LD_LIBRARY_PATH": str(library.parent), "NVML_STUB": str(script)}
        self.say()

    def say(self, *lines: str) -> None:
        """Replace the script; calls in progress see it too."""
        new = self._script.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self._script)

    def load(self, patch: pytest.MonkeyPatch) -> Any:
        """The real ``pynvml``, initialised, on this library in this process, until *patch* is undone."""
        patch.setenv("NVML_STUB", str(self._script))
        patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(self._library)))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        pynvml.nvmlInit()
        return pynvml
