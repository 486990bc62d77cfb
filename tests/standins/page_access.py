"""Asks the whole API server of Airflow, in this process, for the page as different people would.

``python page_access.py REQUESTS``: a JSON list of ``[who, path]`` in; ``[status, type, policy, text]`` of
each answer out. Ann may read the DAG ``mine``, Bob is known and may read none, nobody is not logged in.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

READABLE = {"ann": {"mine"}, "bob": set()}


class ByDag(SimpleAuthManager):
    """Says for each DAG who may read it, as auth managers of companies do."""

    def is_authorized_dag(self, *, user: Any, details: Any = None, **_: Any) -> bool:
        """Only what is listed; a question about all DAGs is refused."""
        return details is not None and details.id in READABLE.get(user.username, set())


def main(requests: list[list[str]]) -> list[list[Any]]:
    """Answers of the app."""
    from airflow.api_fastapi.app import create_app, get_auth_manager
    from starlette.testclient import TestClient

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
