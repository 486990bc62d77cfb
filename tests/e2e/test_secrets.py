"""A secret by reference reaches the training and no other place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path


def holding(home: Path, canaries: dict[str, str]) -> Iterator[Path]:
    """Files below *home* that contain one of the canaries."""
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if any(canary.encode() in data for canary in canaries.values()):
                yield path.relative_to(home)


def test_secrets_by_reference_are_found_nowhere(begin: Callable, canaries: dict[str, str]):
    """The training printed them; store, logs, database, XCom and rendered fields lack them (feature A10)."""
    run = begin("secret")

    state = run.wait_end()

    shown = "\n".join(run.airflow.logs(run.dag_id, run.run_id, "train"))
    task = run.airflow.task(run.dag_id, run.run_id, "train")
    assert state == "success"
    assert "FROM_CONNECTION has 15 characters" in shown
    assert not any(canary in shown + json.dumps(task) for canary in canaries.values())
    assert list(holding(run.airflow.home, {"printed": "FROM_CONNECTION has"})), "the search sees the logs"
    assert list(holding(run.airflow.home, canaries)) == []


def test_a_secret_in_a_parameter_is_refused_and_not_repeated(begin: Callable, canaries: dict[str, str]):
    """Airflow would mask it in its own log; the store and the machine would not."""
    run = begin("careless")

    state = run.wait_end()

    shown = "\n".join(run.airflow.logs(run.dag_id, run.run_id, "train"))
    assert state == "failed"
    assert "parameters.note: contains a secret" in shown
    assert run.steps() == []
    assert list(holding(run.airflow.home, canaries)) == []
