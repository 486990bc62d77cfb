"""Shared by the tests of images: a base of Debian's packages, a registry, an index of wheels."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
from wheel_index import Index, write_wheel

FREE_FROM = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(scope="session")
def base_tar(tmp_path_factory):
    """Debian's essential packages, apt and Python as an archive, built once for all workers of a session."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    archive = root / "base.tar"
    with (root / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            options = ["--variant=apt", "--include=python3", "--dpkgopt=force-unsafe-io"]
            options += [f"--dpkgopt=path-exclude={pattern}" for pattern in FREE_FROM]
            options += ['--aptopt=Acquire::Languages "none"']
            draft = root / "draft.tar"
            words = ["mmdebstrap", "--quiet", *options, "bookworm", str(draft)]
            subprocess.run(words, check=True, timeout=240)
            draft.rename(archive)
    return archive


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Debian's docker-registry, over HTTP."""
    root, port = tmp_path_factory.mktemp("registry"), free_port()
    config = root / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {root}/data}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\nlog: {{level: error}}\n"
    )
    with (root / "log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """An index with one package."""
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "greeting", "1.0", "hello")
    index = Index(folder)
    yield SimpleNamespace(folder=folder, index=index)
    index.close()
