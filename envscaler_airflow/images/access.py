"""Credentials for package indexes and trusted certificates, as files that exist for one call."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.local_files import read_plain

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
