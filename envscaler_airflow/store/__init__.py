"""The run directory in a store: ``file://``, ``s3://`` and fsspec URLs."""

from envscaler_airflow.store.base import Store, check_store, deployment_of, open_store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.lease import Lease, LeaseFile, LeaseWatch
from envscaler_airflow.store.run import Run

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
