"""Public fakes for tests: a scripted backend, a clock by hand, a store with faults."""

from envscaler_airflow.testing.backend import ScriptedBackend, cpu_offer
from envscaler_airflow.testing.clock import ManualClock
from envscaler_airflow.testing.elastic import ElasticBackend
from envscaler_airflow.testing.store import FaultyStore

__all__ = ["ElasticBackend", "FaultyStore", "ManualClock", "ScriptedBackend", "cpu_offer"]
