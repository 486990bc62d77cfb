"""Clear up after stages whose owner is gone for good, every hour.

What ends by itself needs no reaper. This removes what is left on the cluster when neither the kill of a task
nor the lease of its stage worked; it asks Airflow for the state of the tasks. Unpause it once the connection
is that of your cluster.
"""

from airflow.sdk import DAG

from envscaler_airflow import ReapOperator

with DAG(
    "reap_cluster",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    doc_md=__doc__,
    tags=["example"],
):
    ReapOperator(task_id="reap", conn_id="kubernetes_default", retries=2)
