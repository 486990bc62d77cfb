"""Finish by a deadline on spot, over one or several zones, at the lowest expected cost."""

from __future__ import annotations

from envscaler_airflow.scaling.deadline.cost_table import Others, Table, build_table
from envscaler_airflow.scaling.deadline.policy import DeadlinePolicy
from envscaler_airflow.scaling.deadline.risk import Hazard, Risk
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    slack_s,
)

__all__ = [
    "ON_DEMAND",
    "DeadlinePolicy",
    "Hazard",
    "Others",
    "Risk",
    "SpotJob",
    "SpotView",
    "Table",
    "build_table",
    "is_safe",
    "slack_s",
]
