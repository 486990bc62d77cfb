"""External programs: started without a shell and with a time limit; credentials that they get as files."""

from __future__ import annotations

import codecs
import io
import os
import select
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.local_files import read_plain

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


MAX_CA_BYTES = 1 << 24
"""Largest certificate file, bytes. Chosen: all roots that Debian ships are 0.2 MB."""


@contextmanager
def index_access(
    requirements: Requirements,
    *,
    ca_file: Path | None = None,
    resolve_secret: Callable[[str], str] | None = None,
) -> Iterator[dict[str, str]]:
    """Environment variables with which an installer on this machine reaches the runtime's indexes.

    Raises:
        SpecError: Credentials cannot be resolved, or *ca_file* contains no certificate.
    """
    with tempfile.TemporaryDirectory() as name:
        env: dict[str, str] = {}
        runtime = requirements.runtime
        if runtime is not None and runtime.credentials is not None:
            value = resolved(runtime.credentials, resolve_secret)
            env["NETRC"] = str(private_file(Path(name, "netrc"), netrc(requirements, value)))
        yield env | certificates(ca_file, Path(name))


def certificates(ca_file: Path | None, folder: Path) -> dict[str, str]:
    """The variable with which a program trusts *ca_file* too, by a new file in *folder*; {} without one.

    Raises:
        SpecError: *ca_file* contains no certificate.
    """
    if ca_file is None:
        return {}
    return {"SSL_CERT_FILE": str(private_file(folder / "ca.pem", ca_bundle(ca_file)))}


def netrc(requirements: Requirements, value: str) -> str:
    """A netrc file for the hosts of the runtime's indexes. *value* is ``user:password``, or only a token."""
    runtime = requirements.runtime
    urls = [runtime.index_url, *runtime.extra_index_urls] if runtime is not None else []
    hosts = dict.fromkeys(host for url in urls if url and (host := urlsplit(url).hostname))
    user, colon, password = value.partition(":")
    if not colon:
        user, password = "__token__", value
    if not hosts:
        raise SpecError("runtimes: credentials: there is no index_url or extra_index_urls that they are for")
    return "".join(f"machine {host} login {user} password {password}\n" for host in hosts)


def ca_bundle(path: Path) -> str:
    """The system's certificates plus those of *path*.

    Raises:
        SpecError: *path* contains no certificate.
    """
    try:
        own = read_plain(path, MAX_CA_BYTES)
        ssl.create_default_context(cadata=own)
    except (OSError, ValueError, ssl.SSLError) as err:
        raise SpecError(f"--ca-file {path}: no certificates can be read ({err}); give a PEM file") from err
    known = ssl.get_default_verify_paths()
    system = next(
        (Path(name) for name in (known.cafile, known.openssl_cafile) if name and Path(name).is_file()), None
    )
    return (system.read_text(encoding="utf-8") if system is not None else "") + "\n" + own


def resolved(reference: str, resolve_secret: Callable[[str], str] | None) -> str:
    """Value of *reference*, ``user:password`` or a token.

    Raises:
        SpecError: The reference cannot be resolved here, or its value is not a single word.
    """
    if resolve_secret is None:
        raise SpecError(f"{reference}: credentials cannot be resolved here; build where they can")
    value = resolve_secret(reference)
    if not value or not value.isprintable() or " " in value:
        raise SpecError(
            f"{reference}: is empty, or has a space or line break; store user:password or a token"
        )
    return value


def private_file(path: Path, text: str) -> Path:
    """Write *text* to the new file *path*, which only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path
