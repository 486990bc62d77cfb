"""Requests the page from Airflow's complete API server, in this process, as different users.

``python page_access.py REQUESTS``: a JSON list of ``[who, path]`` in; ``[status, type, policy, text]`` of
each answer out. Ann may read the DAG ``mine``, Bob is known and may read none, ``nobody`` has no login.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

READABLE = {"ann": {"mine"}, "bob": set()}


class ByDag(SimpleAuthManager):
    """Decides per DAG who may read it, as auth managers of companies do."""

    def is_authorized_dag(self, *, user: Any, details: Any = None, **_: Any) -> bool:
        """Allows only the listed DAGs; a question about all DAGs is refused."""
        return details is not None and details.id in READABLE.get(user.username, set())


def keep_elsewhere(url: str) -> None:
    """A task of ``mine`` whose run is in the store of a connection that only the database knows."""
    from airflow.models.connection import Connection
    from airflow.models.renderedtifields import RenderedTaskInstanceFields as Rendered
    from airflow.utils.session import create_session
    from sqlalchemy import insert, text

    extra = json.dumps({"store_url": url})
    key = {"dag_id": "mine", "run_id": "elsewhere", "task_id": "train", "map_index": -1}
    with create_session() as session:
        session.execute(text("PRAGMA foreign_keys = OFF"))  # does not need a whole DAG run for its arguments
        session.add(Connection(conn_id="elsewhere", conn_type="envscaler_store", extra=extra))
        session.execute(insert(Rendered).values(rendered_fields={"store_conn_id": "elsewhere"}, **key))


def main(requests: list[list[str]]) -> list[list[Any]]:
    """Answers of the app."""
    from airflow.api_fastapi.app import create_app, get_auth_manager
    from starlette.testclient import TestClient

    keep_elsewhere(os.environ["PAGE_ELSEWHERE"])
    with TestClient(create_app(apps="core"), raise_server_exceptions=False) as client:
        answers = []
        for who, path in requests:
            user = SimpleAuthManagerUser(username=who, role="viewer")
            token = get_auth_manager().generate_jwt(user)
            client.cookies.clear()
            if who.endswith("?"):
                client.cookies.set("_token", "forged")
            elif who != "nobody":
                client.cookies.set("_token", token)
            answer = client.get(path, follow_redirects=False)
            headers = answer.headers
            policy = headers.get("content-security-policy", "")
            answers.append([answer.status_code, headers.get("content-type", ""), policy, answer.text])
    return answers


if __name__ == "__main__":
    answered = main(json.loads(sys.argv[1]))
    sys.stdout.write("\nANSWERS " + json.dumps(answered) + "\n")
