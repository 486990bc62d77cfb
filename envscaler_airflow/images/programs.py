"""External programs: started without a shell, with a time limit, and with captured output."""

from __future__ import annotations

import codecs
import io
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envscaler_airflow.errors import BackendError, SpecError

KILL_AFTER_S = 10.0
"""Grace period of a program after its time limit, seconds. Chosen."""
_LOOK_S = 0.5
"""Silence after which to check whether a program ended, seconds: others may keep its output open. Chosen."""
_CHUNK_BYTES = 1 << 16
"""Bytes per read. Source: pipe(7), the capacity of a pipe."""


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a program.

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
) -> Output:
    """Run *words* to completion; *env* is added to this process's environment.

    Raises:
        BackendError: The program cannot be started, or did not end within *timeout_s*.
    """
    try:
        done = subprocess.run(
            list(words), cwd=cwd, env={**os.environ, **(env or {})}, text=True, errors="replace",
            capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise BackendError(f"{words[0]}: not ready after {timeout_s:g} s", transient=True) from err
    except OSError as err:
        raise BackendError(f"{words[0]}: cannot be started ({err})") from err
    return Output(done.returncode, done.stdout, done.stderr)


def stream_program(
    words: Sequence[str], on_line: Callable[[str], None], *,
    env: Mapping[str, str] | None = None, fifo: Path | None = None,
) -> int:  # fmt: skip
    """Run *words*, pass each line of the merged outputs to *on_line*, and return the exit code.

    Args:
        words: The program and its arguments.
        on_line: Called with each line.
        env: Added to this process's environment.
        fifo: Created here and used instead of an anonymous pipe, so that other processes can write to it too.

    Raises:
        BackendError: The program cannot be started.
    """
    read, write = os.pipe() if fifo is None else _open_fifo(fifo)
    try:
        process = subprocess.Popen(
            list(words), env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=write, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as err:
        os.close(read)
        raise BackendError(f"{words[0]}: cannot be started ({err})") from err
    finally:
        os.close(write)
    try:
        for line in _lines(read, process):
            on_line(line)
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
        os.close(read)


def _lines(read: int, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield lines without line ends until all writers close, or *process* ended and no one writes."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    rest = ""
    while True:
        if not select.select([read], [], [], _LOOK_S)[0]:
            if process.poll() is not None:
                break
            continue
        chunk = os.read(read, _CHUNK_BYTES)
        *lines, rest = (rest + decoder.decode(chunk, final=not chunk)).split("\n")
        yield from lines
        if not chunk:
            break
    if rest:
        yield rest


def _open_fifo(path: Path) -> tuple[int, int]:
    """Create the FIFO and open both ends; every local user who can see it may write to it."""
    os.mkfifo(path)
    path.chmod(0o666)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # blocking would wait for a writer
    os.set_blocking(read, True)
    return read, os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def find_program(*names: str) -> str | None:
    """Path of the first installed program of *names*; None without one."""
    return next((path for name in names if (path := shutil.which(name))), None)


def uv_program() -> str:
    """Path of uv, which comes with this package's extra ``build``.

    Raises:
        SpecError: uv is not installed.
    """
    try:
        from uv import find_uv_bin  # noqa: PLC0415 (only what resolves or installs needs it)

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = find_program("uv")
    if found is None:
        raise SpecError("uv is not installed; run `pip install 'envscaler-airflow[build]'`, or install uv")
    return found
