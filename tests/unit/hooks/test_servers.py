"""Airflow connections as addresses of HTTP servers, in every form that users write."""

import json

import httpx
import pytest
from airflow.sdk import BaseHook
from airflow.sdk._shared.secrets_masker import reset_secrets_masker

from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.connections import HttpServer, http_server, server_of_url, verify_of
from envscaler_airflow.hooks.prometheus import Prometheus
from envscaler_airflow.hooks.settings import store_place

WHAT = "a Prometheus server"
AUTH = ("reader", "pw-12345")
BEARER = {"Authorization": "Bearer pw-12345"}


@pytest.fixture
def server(monkeypatch):
    """Return the server of a connection, given as a URI or as JSON."""

    def read(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("AIRFLOW_CONN_PROM", text)
        return http_server(BaseHook.get_connection("prom"), WHAT)

    yield read
    reset_secrets_masker()


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("http://prom:9090", "http://prom:9090"),
        ("https://reader:pw-12345@prom.example.org:443", "https://prom.example.org:443"),
        (
            "https://reader:pw-12345@mimir.example.org:443/prometheus",
            "https://mimir.example.org:443/prometheus",
        ),
        ("https://mimir.example.org/a/b/", "https://mimir.example.org/a/b"),
        ("http://prom.example.org:443/https", "https://prom.example.org:443"),
        ("https://prom.example.org/http", "https://prom.example.org"),
        ("http://https%3A%2F%2Fprom.example.org%2Fx/", "https://prom.example.org/x"),
        ("http://https://prom.example.org:443/x", "https://prom.example.org:443/x"),
        ("prometheus://prom:9090", "http://prom:9090"),
        ("prometheus://prom:9090/prometheus", "http://prom:9090/prometheus"),
        ("http://[::1]:9090/x", "http://[::1]:9090/x"),
        ({"conn_type": "http", "host": "prom", "port": 9090}, "http://prom:9090"),
        ({"conn_type": "https", "host": "prom", "port": 9090}, "https://prom:9090"),
        ({"conn_type": "http", "host": "prom", "schema": "https"}, "https://prom"),
        ({"conn_type": "http", "host": "prom:9090"}, "http://prom:9090"),
        ({"conn_type": "http", "host": "prom/prometheus", "port": 8080}, "http://prom:8080/prometheus"),
        (
            {"conn_type": "http", "host": "http://m.org/prometheus", "port": 8080},
            "http://m.org:8080/prometheus",
        ),
        (
            {"conn_type": "http", "host": "https://m.org:443/a", "schema": "https", "port": 443},
            "https://m.org:443/a",
        ),
        ({"conn_type": "http", "host": "HTTPS://m.org/"}, "https://m.org"),
        ({"conn_type": "http", "host": "https://u:p@m.org/a"}, "https://m.org/a"),
        ({"conn_type": "generic", "host": " m.org ", "schema": "/api/prom/"}, "http://m.org/api/prom"),
        ({"conn_type": "http", "host": "2001:db8::1", "port": 9090}, "http://[2001:db8::1]:9090"),
    ],
)
def test_the_address_of_every_form(server, value, url):
    """URI, JSON and form fields; the port comes before the path; TLS where any part requests it (B6)."""
    assert server(value).url == url


@pytest.mark.parametrize(
    ("value", "auth", "headers"),
    [
        ("https://reader:pw-12345@prom", AUTH, {}),
        ("https://reader:p%40w%2F1@prom", ("reader", "p@w/1"), {}),
        ("https://:pw-12345@prom", None, BEARER),
        ({"conn_type": "http", "host": "https://reader:p%40w@prom"}, ("reader", "p@w"), {}),
        ({"conn_type": "http", "host": "prom", "login": "reader", "password": "pw-12345"}, AUTH, {}),
        ({"conn_type": "http", "host": "prom", "extra": {"token": "pw-12345"}}, None, BEARER),
        ("https://prom?tenant=team-a", None, {"X-Scope-OrgID": "team-a"}),
        ("https://prom?X-Scope-OrgID=team-a", None, {"X-Scope-OrgID": "team-a"}),
        ("https://prom?headers=%7B%22X-Scope-OrgID%22%3A%22a%22%7D", None, {"X-Scope-OrgID": "a"}),
        (
            {"conn_type": "http", "host": "p", "extra": {"headers": {"X-A": 1}, "timeout": 5}},
            None,
            {"X-A": "1"},
        ),
    ],
)
def test_credentials_and_headers_of_every_form(server, value, auth, headers):
    """Login and password, a token, a tenant (B6)."""
    found = server(value)

    assert (found.auth, found.headers) == (auth, headers)
    assert "pw-12345" not in repr(found)


@pytest.mark.parametrize(
    ("value", "verify"),
    [
        ("https://prom?verify=false", False),
        ("https://prom?verify=0", False),
        ("https://prom?verify=True", True),
        ("https://prom?verify=%2Fetc%2Fca.pem", "/etc/ca.pem"),
        ("https://prom", True),
        ({"conn_type": "http", "host": "prom", "extra": {"verify": False}}, False),
        ({"conn_type": "http", "host": "prom", "extra": '{"verify": "no"}'}, False),
    ],
)
def test_verify_is_a_switch_in_every_form(server, value, verify):
    """A URI contains only text (B6)."""
    assert server(value).verify == verify


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"conn_type": "http"}, "names no host of a Prometheus server"),
        ({"conn_type": "http", "host": "ftp://prom"}, "'ftp' is not http or https"),
        ({"conn_type": "http", "host": "http://prom:99999"}, "is not an address"),
        ({"conn_type": "http", "host": "http://prom:9090", "port": 80}, "its port 80 is not the 9090"),
        ({"conn_type": "http", "host": "prom", "extra": "[1]"}, "extra is not a JSON object"),
        ({"conn_type": "http", "host": "prom", "extra": {"headers": "a"}}, "headers: is not a map"),
    ],
)
def test_what_is_no_server_says_what_to_write(server, value, words):
    """The message never contains the password (B6)."""
    body = {**value, "login": "reader", "password": "pw-12345"}

    with pytest.raises(SpecError, match=words) as caught:
        server(body)

    assert "pw-12345" not in str(caught.value)


def test_the_setting_may_leave_the_scheme_out():
    """``prom:9090`` was parsed as a scheme named ``prom``, and the query never succeeded (B6)."""
    assert server_of_url("prom:9090/x/", "setting", WHAT).url == "http://prom:9090/x"
    assert server_of_url("https://u:p%40@prom", "setting", WHAT).auth == ("u", "p@")
    with pytest.raises(SpecError, match="setting: 'unix' is not http or https"):
        server_of_url("unix://prom", "setting", WHAT)


def test_headers_and_credentials_are_sent():
    """Everything in the connection reaches the server (B6)."""
    asked = []

    def answer(request):
        asked.append(request)
        return httpx.Response(200, json={"data": {"resultType": "scalar", "result": [0, "1"]}})

    server = HttpServer("https://prom/x", AUTH, {"X-Scope-OrgID": "a"}, verify=False)
    client = Prometheus(server, transport=httpx.MockTransport(answer))

    assert client.values("up") == (1.0,)
    assert str(asked[0].url) == "https://prom/x/api/v1/query?query=up"
    assert asked[0].headers["X-Scope-OrgID"] == "a"
    assert asked[0].headers["Authorization"].startswith("Basic ")


def test_certificates_that_are_not_there_are_named(tmp_path):
    """At the query, as an error of the connection (B6)."""
    client = Prometheus(HttpServer("https://prom", verify=str(tmp_path / "ca.pem")))

    with pytest.raises(SpecError, match=r"verify: .*ca\.pem cannot be read"):
        client.values("up")


def test_a_store_s_options_in_a_uri_are_read_like_json(monkeypatch):
    """``verify=false`` was treated as a file path, ``config_kwargs={...}`` as a text (B6)."""
    monkeypatch.setenv(
        "AIRFLOW_CONN_STORE",
        "envscaler-store://?store_url=s3%3A%2F%2Fb%2Fruns&verify=false"
        "&config_kwargs=%7B%22max_pool_connections%22%3A%205%7D",
    )

    assert store_place(None, "store").options == {"verify": False, "config": {"max_pool_connections": 5}}


@pytest.mark.parametrize("value", [True, None, "true", "TRUE", "", "1"])
def test_verify_is_on_unless_it_is_off(value):
    """An empty field of a form does not switch it off (B6)."""
    assert verify_of(value) is True
