"""Data-parallel training that goes from one worker to two and back while it runs.

The stage's entrypoint runs below ``torchrun``. Each worker is a node of the stage. The global batch is the
same for any number of workers, since a single worker accumulates the gradients that two would compute. The
sensor requests more or fewer workers when that finishes the work at a lower cost plus time.
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
