"""The run directory in a store: ``file://``, ``s3://`` and fsspec URLs."""

from envscaler_airflow.store.base import Store, check_store, deployment_of, for_run, open_store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.lease import Lease, LeaseWatch, read_lease, renew_lease

__all__ = [
    "EventLog",
    "Lease",
    "LeaseWatch",
    "RunKey",
    "Store",
    "check_store",
    "deployment_of",
    "for_run",
    "open_store",
    "read_lease",
    "renew_lease",
]
