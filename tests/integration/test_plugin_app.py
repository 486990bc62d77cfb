"""How the page finds a run: which store, which deployment, which index."""

import shutil
import warnings
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace

import pytest

from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.plugin import PREFIX, EnvScalerPlugin
from envscaler_airflow.store import RunKey, open_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # Airflow imports starlette's deprecated test client
    from envscaler_airflow.plugin import app


RECORDED = Path(__file__).parents[1] / "compat/schema-2/run"


@pytest.fixture
def rendered(monkeypatch):
    """Airflow's rendered arguments of the task; none until a test sets them."""
    fields = {}

    @contextmanager
    def session():
        yield SimpleNamespace(scalar=lambda query: fields)

    monkeypatch.setattr(app, "create_session", session)
    monkeypatch.setattr(app.DagModel, "get_team_name", lambda dag_id: None)
    return fields


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """The store of the settings."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


def ask(**changes):
    """The answer for a task that never trained."""
    return app.training("dag", "run", "train", **changes)


@pytest.mark.parametrize(
    ("text", "index"), [("-1", -1), ("3", 3), ("{MAP_INDEX}", -1), ("", -1), ("x", -1), ("--3", -1)]
)
def test_the_ui_names_no_index_for_a_plain_task(text, index):
    """Then it leaves the braces in the address."""
    assert app._index(text) == index


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({}, "configured"),
        ({"store_url": None, "store_conn_id": None}, "configured"),
        ({"store_url": "None"}, "configured"),
        ({"store_url": "/srv/other"}, "/srv/other"),
        ({"store_url": "s3://bucket/x"}, "s3://bucket/x"),
        ({"store_url": 7}, "configured"),
    ],
)
def test_the_tasks_own_store_comes_first(rendered, configured, fields, url):
    """As its arguments were rendered; a value that is not text counts as absent."""
    rendered.update(fields)

    expected = configured.url.removeprefix("file://") if url == "configured" else url
    assert app._place("dag", "run", "train", -1).url == expected


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "ftp://x/y", "memory://x", "ssh://a@b/c"])
def test_a_dag_cannot_send_the_api_server_anywhere(rendered, configured, url):
    """Folders and buckets are stores."""
    rendered["store_url"] = url

    with pytest.raises(SpecError, match="not a kind of run store"):
        app._place("dag", "run", "train", -1)
    assert ask().status_code == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_connection_that_is_gone_is_named(rendered, configured):
    """It was deleted, or never made."""
    rendered["store_conn_id"] = "gone"

    answer = ask()

    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"gone" in answer.body


def test_an_unnamed_store_is_not_named_by_a_reader(rendered, configured, tmp_path):
    """The first stage names it; here nothing exists yet."""
    (tmp_path / "store").mkdir()

    answer = ask()

    assert answer.status_code == HTTPStatus.NOT_FOUND
    assert list((tmp_path / "store").iterdir()) == []


def test_no_store_says_what_to_set(rendered, monkeypatch):
    """The message of the operator."""
    monkeypatch.delenv("AIRFLOW__ENVSCALER__STORE_URL", raising=False)

    answer = ask()

    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"set [envscaler] store_url" in answer.body


@pytest.mark.parametrize("team", [None, "red"])
def test_a_team_is_part_of_where_a_run_lies(rendered, configured, monkeypatch, tmp_path, team):
    """Runs from before the DAG had its team are still found."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "local")
    monkeypatch.setattr(app.DagModel, "get_team_name", lambda dag_id: "red")
    prefix = RunKey("local", "dag", "run", "train", team=team).prefix
    shutil.copytree(RECORDED, tmp_path / "store" / prefix)

    answer = ask()

    assert answer.status_code == HTTPStatus.OK
    assert f"/{prefix}<".encode() in answer.body


def test_a_store_that_does_not_answer_is_asked_again(rendered, configured, monkeypatch):
    """Not "no run": the answer is unknown."""

    def fail(*_):
        raise StoreError("timed out", transient=True)

    monkeypatch.setattr(app, "read_facts", fail)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "local")

    answer = ask()

    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"The run store cannot be read now" in answer.body
    assert b'http-equiv="refresh"' in answer.body


def test_a_surprise_is_a_page_too(rendered, configured, monkeypatch, caplog):
    """The kind of error for the reader, the rest for the log."""

    def fail(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(app, "read_facts", fail)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "local")

    answer = ask()

    assert answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert b"ZeroDivisionError" in answer.body
    assert b"secret detail" not in answer.body
    assert "secret detail" in caplog.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_tab_leads_to_the_page():
    """The application has the address that the UI fills in, below its prefix."""
    [view] = EnvScalerPlugin.external_views
    [mounted] = EnvScalerPlugin.fastapi_apps
    path = view["href"].partition("?")[0].replace("{DAG_ID}", "{dag_id}")

    assert mounted["url_prefix"] == PREFIX
    assert f"/{path}" in [PREFIX + route.path for route in app.make_app().routes]
    assert view["destination"] == "task_instance"
