"""PostgreSQL of Debian's package, in a folder and on a port of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "postgres"
"""The package's user: the server refuses to run as root."""
START_S = 30.0
"""Longest start of the server, seconds. Chosen: ten times what two busy cores need."""


@contextmanager
def postgres() -> Iterator[str]:
    """A server with an empty database; its SQLAlchemy URL.

    Raises:
        RuntimeError: It is not installed, or does not start.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
    programs = found[-1]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    as_user = {"user": USER, "group": USER, "extra_groups": ()} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="envscaler-postgres-"))
    try:
        if as_user:
            shutil.chown(folder, USER, USER)
        data = folder / "data"
        init = [programs / "initdb", "--auth=trust", "--username=airflow", "--no-sync", "--pgdata", data]
        subprocess.run(init, check=True, cwd=folder, stdout=subprocess.DEVNULL, **as_user)
        serve = [programs / "postgres", "-D", data, "-p", str(port), "-k", folder]
        serve += ["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=200", "-c", "fsync=off"]
        with (folder / "postgres.log").open("wb") as log:
            server = subprocess.Popen(serve, cwd=folder, stdout=log, stderr=log, **as_user)
        try:
            create = [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "airflow", "airflow"]
            give_up = time.monotonic() + START_S
            while subprocess.run(create, stderr=subprocess.DEVNULL, check=False).returncode != 0:
                if server.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"PostgreSQL: {(folder / 'postgres.log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield f"postgresql+psycopg2://airflow@127.0.0.1:{port}/airflow"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=START_S)
    finally:
        shutil.rmtree(folder)
