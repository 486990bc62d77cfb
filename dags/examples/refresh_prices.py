"""Fetch the clouds' current prices every hour, and share them through the run store.

Plans of operators and shells then use them: each worker copies newer prices from the run store before it
plans a start. Unpause this DAG once the connections exist; a cloud that fails keeps its last good prices, and
the others are refreshed.
"""

from airflow.sdk import DAG, task

from envscaler_airflow import CloudPricingHook

REGIONS = {"aws": ["us-east-1", "eu-west-1"], "azure": ["eastus"]}

with DAG(
    "refresh_prices",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    doc_md=__doc__,
    tags=["example"],
):

    @task(retries=2)
    def refresh(cloud: str) -> list[str]:
        """Return one line for each region: the age of its prices, and what failed."""
        lists = CloudPricingHook(cloud).refresh(REGIONS[cloud])
        return [f"{one.cloud} {one.region}: {len(one.prices)} prices, {one.error or 'ok'}" for one in lists]

    refresh.expand(cloud=list(REGIONS))
