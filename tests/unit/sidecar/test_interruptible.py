"""A store that a drill keeps from the sidecar for a minute."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import StoreError
from envscaler_airflow.sidecar.context import AWAY_S, InterruptibleStore
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing import ManualClock


def test_a_store_that_goes_away_refuses_every_call_and_comes_back_by_itself(tmp_path):
    """Reads, writes and listings raise as if the store did not answer; its URL stays known."""
    clock = ManualClock()
    store = InterruptibleStore(open_store(f"file://{tmp_path}"), monotonic=clock.monotonic)
    run = Run(store, "d/shell/one/train/-1")
    run.write("status/a", b"1")

    store.go_away()

    for call in (
        lambda: run.read("status/a"),
        lambda: run.write("status/a", b"2"),
        lambda: run.create("status/b", b"2"),
        lambda: run.names("status"),
        run.now,
    ):
        with pytest.raises(StoreError, match="away, for a drill") as caught:
            call()
        assert caught.value.transient
    assert run.uri("status/a").endswith("/status/a")
    clock.advance(AWAY_S - 1)
    with pytest.raises(StoreError):
        run.read("status/a")
    clock.advance(1)
    assert run.read("status/a") == b"1"
