"""Retrain a text classifier on what is installed here: prepare, train, score.

Each stage runs from its own spec in ``envs/``, and stages pass data by outputs and inputs. The training
starts on the smallest offer. The sensor moves it when another offer finishes the work at a lower cost plus
time.
"""

from airflow.sdk import DAG, Param

from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params

COMPUTE = Param("local", type="string", enum=["local", "kubernetes"], description="Where the stages run.")

with DAG(
    "retrain_text_classifier",
    schedule=None,
    params={**spec_params("envs/train.yaml"), "compute": COMPUTE},
    default_args={"compute": "{{ params.compute }}"},
    doc_md=__doc__,
    tags=["example"],
):
    prepare = EnvStageOperator(task_id="prepare", spec="envs/prepare.yaml", poll_interval=2)
    train = EnvStageOperator(
        task_id="train",
        spec="envs/train.yaml",
        inputs={"data": prepare.output["data"]},
        value_of_hour=1.0,  # USD that an hour of waiting is worth
        poll_interval=1,
    )
    autoscale = ScalingSensor(task_id="autoscale", stage="train", check_interval=2)
    score = EnvStageOperator(
        task_id="score",
        spec="envs/score.yaml",
        inputs={"data": prepare.output["data"], "model": train.output["model"]},
        poll_interval=2,
    )
    prepare >> [train, autoscale]
    train >> score
