"""One real Airflow for all e2e tests of the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from envscaler_airflow.testing.airflow_services import AirflowServices

DAGS = Path(__file__).parent / "dags"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is e2e, with a longer limit than unit tests have."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowServices]:
    """A running Airflow with the DAGs of ``tests/e2e/dags``, shared by all tests."""
    home = tmp_path_factory.mktemp("airflow")
    with AirflowServices(home, DAGS) as services:
        yield services
