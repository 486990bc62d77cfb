"""Finish by a deadline on spot, over one or several zones, at the lowest expected cost."""

from __future__ import annotations

from envscaler_airflow.scaling.deadline.cost_table import Others, Table, build_table
from envscaler_airflow.scaling.deadline.risk import Hazard, Risk, Zone
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    slack_s,
)
from envscaler_airflow.scaling.deadline.spot_market import (
    Market,
    MarketDecision,
    MarketView,
    decide_market,
)

__all__ = [
    "ON_DEMAND",
    "Hazard",
    "Market",
    "MarketDecision",
    "MarketView",
    "Others",
    "Risk",
    "SpotJob",
    "SpotView",
    "Table",
    "Zone",
    "build_table",
    "decide_market",
    "is_safe",
    "slack_s",
]
