"""The run directory in a store: ``file://``, ``s3://`` and fsspec URLs."""

from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.lease import Lease, LeaseFile, LeaseWatch
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store, check_store, deployment_of, open_store

__all__ = [
    "EventLog",
    "Lease",
    "LeaseFile",
    "LeaseWatch",
    "Run",
    "RunKey",
    "Store",
    "check_store",
    "deployment_of",
    "open_store",
]
