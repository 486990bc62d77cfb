"""Data-parallel training that goes from one worker to two and back while it runs.

The stage's entrypoint runs below ``torchrun``. Each worker is a node of the stage; with another
number of them the global batch stays what it is, since one worker accumulates the gradients of what two
would use. The sensor asks for more workers or fewer when that finishes the work for less cost plus time.
"""

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params

with DAG(
    "elastic_torch",
    schedule=None,
    params=spec_params("envs/elastic_torch.yaml"),
    doc_md=__doc__,
    tags=["example"],
):
    EnvStageOperator(
        task_id="train",
        spec="envs/elastic_torch.yaml",
        value_of_hour=1.0,  # USD that an hour of waiting is worth
        poll_interval=1,
    )
    ScalingSensor(task_id="autoscale", stage="train", check_interval=2)
