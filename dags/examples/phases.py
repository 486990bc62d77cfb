"""A stage that has four nodes while it loads, eight while it trains and two while it evaluates.

The training announces its phases. Once an earlier run has recorded how long each takes, the sensor requests
the eight nodes before training begins. It skips an evaluation that is too short to pay for a move. The stage
needs a place with eight nodes, such as a cluster: ``compute="kubernetes"``.
"""

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, ScalingSensor

with DAG("phases", schedule=None, doc_md=__doc__, tags=["example"]):
    EnvStageOperator(task_id="train", spec="envs/phases.yaml", compute="kubernetes", value_of_hour=1.0)
    ScalingSensor(task_id="autoscale", stage="train", check_interval=10)
