"""A running Airflow lists the provider, its connection form, its plugin, and its link."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from envscaler_airflow.testing.airflow_services import AirflowServices

if TYPE_CHECKING:
    from e2e.conftest import StageRun


def test_airflow_lists_provider_and_plugin(airflow: AirflowServices):
    """No import fails, DAG files included (feature E8)."""
    providers = airflow.call("GET", "/providers", limit=100)["providers"]
    plugins = airflow.call("GET", "/plugins", limit=100)["plugins"]

    assert "envscaler-airflow" in {item["package_name"] for item in providers}
    assert "envscaler" in {item["name"] for item in plugins}
    assert airflow.call("GET", "/plugins/importErrors")["import_errors"] == []
    assert airflow.import_errors() == []


def test_a_store_connection_can_be_tested_from_the_ui(airflow: AirflowServices):
    """The button reports what it tried, and any error (feature E3)."""

    def tried(url: str) -> dict:
        body = {
            "connection_id": "store",
            "conn_type": "envscaler_store",
            "extra": json.dumps({"store_url": url}),
        }
        return airflow.call("POST", "/connections/test", body=body)

    good, bad = tried(str(airflow.home / "store")), tried("relative/path")

    assert good["status"] is True
    assert "can be written, read and deleted" in good["message"]
    assert bad["status"] is False
    assert "not an absolute path" in bad["message"]


def test_a_stage_links_to_its_folder_in_the_store(finished: StageRun):
    """The link exists once the first execution has opened the store."""
    path = f"/dags/{finished.dag_id}/dagRuns/{finished.run_id}/taskInstances/train/links"

    links = finished.airflow.call("GET", path)["extra_links"]

    assert links["Run store"] == finished.store.uri(finished.key.prefix)
