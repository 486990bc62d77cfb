"""Links that a stage shows in Airflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


def store_page(url: str) -> str:
    """Return a page that shows a run's folder: the AWS console for ``s3://``, else the URL itself.

    >>> store_page("s3://ml-runs/prod/retrain/r1/train/-1")
    'https://s3.console.aws.amazon.com/s3/buckets/ml-runs?prefix=prod/retrain/r1/train/-1/'
    """
    if not url.startswith("s3://"):
        return url
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return f"https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={quote(prefix)}/"


class RunStoreLink(BaseOperatorLink):
    """Links to the run's folder in the store: events, decisions, logs, checkpoints, outputs."""

    name = "Run store"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Return the page of the folder that the last execution used; empty before it knew one."""
        del ti_key
        url = getattr(operator, "run_url", None)
        return store_page(url) if url else ""
