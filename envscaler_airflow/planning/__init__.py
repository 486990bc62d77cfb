"""Pure planning: offers, sizing, performance and the planner."""

from envscaler_airflow.planning.knowledge import Knowledge
from envscaler_airflow.planning.objective import (
    STRATEGIES,
    Estimate,
    Overheads,
    Strategy,
    estimate,
    value_of_hour,
)
from envscaler_airflow.planning.offers import Allocation, CapacityType, Offer
from envscaler_airflow.planning.performance import Speed, Speedup, known_speeds, matched, measure, merged
from envscaler_airflow.planning.planner import Candidate, Goal, Plan, Rejected, feasible, plan
from envscaler_airflow.planning.requirements import Misfit, Requirements, is_ordered, misfits, requirements_of

__all__ = [
    "STRATEGIES",
    "Allocation",
    "Candidate",
    "CapacityType",
    "Estimate",
    "Goal",
    "Knowledge",
    "Misfit",
    "Offer",
    "Overheads",
    "Plan",
    "Rejected",
    "Requirements",
    "Speed",
    "Speedup",
    "Strategy",
    "estimate",
    "feasible",
    "is_ordered",
    "known_speeds",
    "matched",
    "measure",
    "merged",
    "misfits",
    "plan",
    "requirements_of",
    "value_of_hour",
]
