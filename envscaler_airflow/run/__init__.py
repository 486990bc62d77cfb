"""The state machine of a run: events, their fold, and the next action. Pure."""

from envscaler_airflow.run.actions import Action, Facts
from envscaler_airflow.run.event_bodies import MAX_EVENT_BYTES, Actor, ChangeKind, Event, Handle
from envscaler_airflow.run.outcomes import (
    OUTCOMES,
    End,
    NodeState,
    NodeStatus,
    Observed,
    Outcome,
    end_of,
    outcome_of,
)
from envscaler_airflow.run.state import (
    AttemptState,
    Before,
    Change,
    Request,
    RunState,
    fold,
    is_cleared,
)
from envscaler_airflow.run.steps import Entry, enter, next_action

__all__ = [
    "MAX_EVENT_BYTES",
    "OUTCOMES",
    "Action",
    "Actor",
    "AttemptState",
    "Before",
    "Change",
    "ChangeKind",
    "End",
    "Entry",
    "Event",
    "Facts",
    "Handle",
    "NodeState",
    "NodeStatus",
    "Observed",
    "Outcome",
    "Request",
    "RunState",
    "end_of",
    "enter",
    "fold",
    "is_cleared",
    "next_action",
    "outcome_of",
]
