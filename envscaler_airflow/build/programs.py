"""External programs: started without a shell, bounded in time, their output kept for people and for locks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envscaler_airflow.errors import BackendError, SpecError

KILL_AFTER_S = 10.0
"""Grace of a program that is past its time, seconds. Chosen."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a program left.

    Attributes:
        code: Its exit code.
        out: Standard output.
        err: Standard error.
    """

    code: int
    out: str
    err: str


def run_program(
    words: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    stdin: str | None = None,
) -> Output:
    """Run *words* to their end; *env* is added to this process's own.

    Raises:
        BackendError: It cannot be started, or was not ready after *timeout_s*.
    """
    try:
        done = subprocess.run(
            list(words), cwd=cwd, env={**os.environ, **(env or {})}, input=stdin, text=True, errors="replace",
            capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise BackendError(f"{words[0]}: not ready after {timeout_s:g} s", transient=True) from err
    except OSError as err:
        raise BackendError(f"{words[0]}: cannot be started ({err})") from err
    return Output(done.returncode, done.stdout, done.stderr)


def stream_program(
    words: Sequence[str], on_line: Callable[[str], None], *, cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Run *words*, both outputs as one, and hand over each line as it comes; the exit code.

    Raises:
        BackendError: It cannot be started.
    """
    try:
        process = subprocess.Popen(
            list(words), cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except OSError as err:
        raise BackendError(f"{words[0]}: cannot be started ({err})") from err
    assert process.stdout is not None
    try:
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        process.stdout.close()


def find_program(*names: str) -> str | None:
    """Path of the first of *names* that is installed; None without one."""
    return next((path for name in names if (path := shutil.which(name))), None)


def uv_program() -> str:
    """Path of uv, which comes with this package's extra ``build``.

    Raises:
        SpecError: It is not installed.
    """
    try:
        from uv import find_uv_bin  # noqa: PLC0415 (only what resolves or installs needs it)

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = find_program("uv")
    if found is None:
        raise SpecError("uv is not installed; run `pip install 'envscaler-airflow[build]'`, or install uv")
    return found
