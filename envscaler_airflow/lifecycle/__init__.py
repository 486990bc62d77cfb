"""The state machine of a run: events, their fold, and what comes next. Pure."""

from envscaler_airflow.lifecycle.events import EVENT_TYPES, MAX_EVENT_BYTES, Actor, Event
from envscaler_airflow.lifecycle.state import (
    OUTCOMES,
    AttemptState,
    Request,
    RunState,
    fold,
)

__all__ = [
    "EVENT_TYPES",
    "MAX_EVENT_BYTES",
    "OUTCOMES",
    "Actor",
    "AttemptState",
    "Event",
    "Request",
    "RunState",
    "fold",
]
