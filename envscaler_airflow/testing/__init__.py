"""Public fakes for tests: a scripted backend, a manual clock, a store with faults."""

from envscaler_airflow.testing.faulty_store import FaultyStore
from envscaler_airflow.testing.scripted_backend import (
    ElasticBackend,
    ManualClock,
    ScriptedBackend,
    cpu_offer,
)

__all__ = ["ElasticBackend", "FaultyStore", "ManualClock", "ScriptedBackend", "cpu_offer"]
