"""Clean up every hour after stages whose owner no longer exists.

Stages normally end without a reaper. This DAG removes what remains on the cluster when neither the kill of a
task nor the lease of its stage worked. It reads the state of the tasks from Airflow. Unpause it once the
connection points to your cluster.
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
