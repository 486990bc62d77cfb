"""Runs inside the Airflow image: starts all of Airflow, and prints its parts as JSON once it is healthy."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S = 300.0
"""Chosen: six times the duration on two idle cores."""
OUT = Path("/tmp/standalone.log")


def ask(url: str) -> Any:
    """JSON of one answer."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def title(url: str) -> str:
    """Title of a page, with any HTTP status."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read()
    except urllib.error.HTTPError as err:
        text = err.read()
    return str(text.decode().partition("<title>")[2].partition("</title>")[0])


def wait_healthy(url: str, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """State of each part, once all are healthy."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            sys.exit(f"airflow standalone ended with {process.returncode}:\n{OUT.read_text()[-4000:]}")
        try:
            found = {name: part["status"] for name, part in ask(f"{url}/api/v2/monitor/health").items()}
        except OSError:
            found = {}
        if found and set(found.values()) == {"healthy"}:
            return found
        time.sleep(1)
    sys.exit(f"not healthy within {START_S:.0f} s: {found}\n{OUT.read_text()[-4000:]}")


def main() -> None:
    """Start, check, stop."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = {
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    }
    with OUT.open("wb") as out:
        command = ["airflow", "standalone"]
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        found = {
            "health": wait_healthy(url, process),
            "providers": [
                item["package_name"] for item in ask(f"{url}/api/v2/providers?limit=100")["providers"]
            ],
            "plugins": [item["name"] for item in ask(f"{url}/api/v2/plugins?limit=100")["plugins"]],
            "broken": ask(f"{url}/api/v2/plugins/importErrors")["import_errors"],
            "page": title(f"{url}/envscaler/dags/any/training?run_id=r&task_id=t"),
            "version": ask(f"{url}/api/v2/version")["version"],
            "user": os.getuid(),
        }
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
