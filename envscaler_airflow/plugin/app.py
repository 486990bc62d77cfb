"""Serves the page: Airflow decides who may see it, the run store provides its content."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import requires_access_dag
from airflow.models.dag import DagModel
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, Query
from fastapi.responses import HTMLResponse
from sqlalchemy import select

from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.hooks.settings import StorePlace, setting, store_place
from envscaler_airflow.plugin.page import POLICY, message_page, run_page
from envscaler_airflow.plugin.page_facts import RunFacts, read_facts
from envscaler_airflow.store import Run, RunKey, Store, deployment_of
from envscaler_airflow.store.run_store import DEPLOYMENT

_log = logging.getLogger(__name__)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_SCHEMES = frozenset({"", "file", "s3", "gs", "gcs", "abfs", "abfss", "az", "oss"})
"""Store URLs that a DAG may name. Chosen: folders and buckets; others could send the API server anywhere."""

Name = Annotated[str, Query(min_length=1, max_length=1000)]


def make_app() -> FastAPI:
    """Return the application below ``/envscaler``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    may_read = Depends(requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE))
    app.get("/dags/{dag_id}/training", response_class=HTMLResponse, dependencies=[may_read])(training)
    return app


def training(
    dag_id: str, run_id: Name, task_id: Name, map_index: Annotated[str, Query(max_length=20)] = "-1"
) -> HTMLResponse:
    """Return the page of one task instance, with an HTTP status for clients other than browsers."""
    index = _index(map_index)
    try:
        page, status = _page(dag_id, run_id, task_id, index)
    except Exception as err:  # noqa: BLE001 - outermost edge: a bad record still gets a page
        _log.exception("page of dag_id=%s run_id=%s task_id=%s map_index=%s", dag_id, run_id, task_id, index)
        name = type(err).__name__
        page = message_page("This page cannot be made", f"{name}; the API server's log has the details.")
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    return HTMLResponse(page, status_code=status, headers=_HEADERS)


def _page(dag_id: str, run_id: str, task_id: str, map_index: int) -> tuple[str, HTTPStatus]:
    try:
        found = _find(dag_id, run_id, task_id, map_index)
    except StoreError as err:
        return message_page("The run store cannot be read now", str(err), again=True), _UNAVAILABLE
    except ProtocolError as err:
        return message_page("The record of this run is broken", str(err)), HTTPStatus.BAD_GATEWAY
    except SpecError as err:
        return message_page("There is no run store to read", str(err)), _UNAVAILABLE
    if isinstance(found, str):
        return message_page("No training has begun here", found, again=True), HTTPStatus.NOT_FOUND
    facts, now = found
    return run_page(facts, now=now), HTTPStatus.OK


def _find(dag_id: str, run_id: str, task_id: str, map_index: int) -> tuple[RunFacts, float] | str:
    """Return the run of a task instance and its store's time, or a text that says where none was found."""
    place = _place(dag_id, run_id, task_id, map_index)
    store = place.open()
    where = f"{store.url} has neither events nor checkpoints of it. Only stages (EnvStageOperator) train."
    deployment = _deployment(store)
    if deployment is None:
        return where
    # A DAG may have a team that its runs lack: they had none before, or teams are switched off.
    for team in dict.fromkeys((DagModel.get_team_name(dag_id), None)):
        key = RunKey(deployment, dag_id, run_id, task_id, map_index, team)
        facts = read_facts(Run(store, key))
        if facts is not None:
            return facts, store.now()
    return where


def _place(dag_id: str, run_id: str, task_id: str, map_index: int) -> StorePlace:
    """Return the store that the task itself uses: its own arguments, as rendered, come first.

    Raises:
        SpecError: No store is set, its URL is not of a supported kind, or the connection does not exist.
    """
    fields = RenderedTaskInstanceFields
    wanted = (fields.dag_id == dag_id, fields.run_id == run_id, fields.task_id == task_id)
    with create_session() as session:
        query = select(fields.rendered_fields).where(*wanted, fields.map_index == map_index)
        rendered: Any = session.scalar(query) or {}
    url, conn_id = (_text(rendered.get(name)) for name in ("store_url", "store_conn_id"))
    scheme, mark, _ = (url or "").partition("://")
    if mark and scheme not in _SCHEMES:
        raise SpecError(f"the task's store_url begins with {scheme!r:.40}, which is not a kind of run store")
    try:
        return store_place(url, conn_id)
    except AirflowNotFoundException as err:
        raise SpecError(str(err)) from err


def _deployment(store: Store) -> str | None:
    """Like :func:`deployment_of`, but write nothing: None if a folder has no name yet.

    Raises:
        SpecError: The store may be shared and the setting is empty.
        StoreError: The store cannot be read.
    """
    configured = setting("deployment")
    if not configured and store.url.startswith("file://") and store.read(DEPLOYMENT) is None:
        return None
    return deployment_of(store, configured)


def _index(text: str) -> int:
    """Parse a map index; Airflow's UI leaves ``{MAP_INDEX}`` in the address for an unmapped task."""
    return int(text) if text.isdecimal() else -1


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value not in ("", "None") else None
