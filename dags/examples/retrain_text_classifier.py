"""Retrain a text classifier on what is installed here: prepare, train, score.

Each stage runs from its own spec in ``envs/`` and hands over by outputs and
inputs. The training begins on the smallest offer; the sensor moves it when
another one finishes the work for less cost plus time.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params

ENVS = Path(__file__).parent / "envs"

with DAG(
    "retrain_text_classifier",
    schedule=None,
    params=spec_params(ENVS / "train.yaml"),
    doc_md=__doc__,
    tags=["example"],
):
    prepare = EnvStageOperator(task_id="prepare", spec=str(ENVS / "prepare.yaml"))
    train = EnvStageOperator(
        task_id="train",
        spec=str(ENVS / "train.yaml"),
        inputs={"data": prepare.output["data"]},
        value_of_hour=1.0,  # USD that an hour of waiting is worth
    )
    autoscale = ScalingSensor(task_id="autoscale", stage="train", check_interval=2, deferrable=True)
    score = EnvStageOperator(
        task_id="score",
        spec=str(ENVS / "score.yaml"),
        inputs={"model": train.output["model"], "data": prepare.output["data"]},
    )
    prepare >> [train, autoscale]
    train >> score
