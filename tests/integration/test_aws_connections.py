"""AWS connections as the Amazon provider documents them, on moto's STS and S3 over HTTP."""

from __future__ import annotations

import json
import time

import attempts
import boto3
import pytest
from airflow.sdk import Connection
from botocore import UNSIGNED
from fakes.operator_world import Ti, operator_world
from moto.server import ThreadedMotoServer

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow import CloudPricingHook
from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.hooks.settings import store_place
from envscaler_airflow.operators import arguments
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store import check_store
from envscaler_airflow.store.run import Run

KEY, SECRET = "AKIAEXAMPLE", "secret-of-the-connection"
ROLE = "arn:aws:iam::123456789012:role/runs"
ASSUMED = "arn:aws:sts::123456789012:assumed-role/runs"
BUCKET = "runs"
DEAD = "http://127.0.0.1:9"
"""Nothing listens on the port of ``discard``."""


@pytest.fixture(scope="module")
def aws():
    """The URL of STS and S3 on a free port of the loopback interface, with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield url
    server.stop()


@pytest.fixture(autouse=True)
def nothing_inherited(monkeypatch, tmp_path):
    """Remove keys, profile and metadata service of this machine."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def connect(monkeypatch, aws):
    """Makes connection ``store``; its services are those of moto unless *extra* names others."""

    def make(extra=None, *, conn_type="envscaler_store", login=KEY, password=SECRET, places=True):
        services = {"service_config": {name: {"endpoint_url": aws} for name in ("s3", "sts")}}
        host = f"s3://{BUCKET}/of/ours" if conn_type == "envscaler_store" else None
        body = {"conn_type": conn_type, "host": host, "login": login, "password": password}
        body["extra"] = {"region_name": "us-east-1", **(services if places else {}), **(extra or {})}
        monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(body))

    return make


def opened():
    """The store of the connection."""
    return store_place(f"s3://{BUCKET}/of/ours", "store").open()


def credentials_of(store):
    """The key that the store's client signs its next request with."""
    return store._client._request_signer._credentials.get_frozen_credentials()


def who_asks(store, aws):
    """The identity that AWS sees."""
    found = credentials_of(store)
    client = boto3.client(
        "sts",
        endpoint_url=aws,
        region_name="us-east-1",
        aws_access_key_id=found.access_key,
        aws_secret_access_key=found.secret_key,
        aws_session_token=found.token,
    )
    return client.get_caller_identity()["Arn"]


@pytest.mark.parametrize("conn_type", ["envscaler_store", "aws"])
def test_login_and_password_are_key_and_secret(connect, conn_type):
    """In a connection of the store's own type, and in one for the Amazon provider's operators."""
    connect(conn_type=conn_type)

    store = opened()

    check_store(store)
    assert credentials_of(store)[:3] == (KEY, SECRET, None)


def test_a_session_token_of_the_connection_is_sent(connect):
    """Keys without their token are refused by AWS."""
    connect({"aws_session_token": "token-of-keys"})

    assert credentials_of(opened()).token == "token-of-keys"


def test_a_role_of_the_connection_is_assumed(connect, aws):
    """The role reads and writes the store, with the provider's name for the session."""
    connect({"role_arn": ROLE})

    store = opened()

    check_store(store)
    assert who_asks(store, aws) == f"{ASSUMED}/airflow_store"


def test_a_role_is_assumed_again_before_its_keys_end(connect):
    """A watcher keeps its store for days; botocore renews keys with less than 15 minutes left."""
    connect({"role_arn": ROLE, "assume_role_kwargs": {"DurationSeconds": 900}})
    store = opened()
    first = credentials_of(store)

    check_store(store)

    assert credentials_of(store).access_key != first.access_key


def test_a_role_is_assumed_by_web_identity(connect, aws, tmp_path):
    """As on a cluster that gives its pods a token; the connection has no key."""
    token = tmp_path / "token"
    token.write_text("a-token-of-the-cluster")
    extra = {
        "role_arn": ROLE,
        "assume_role_method": "assume_role_with_web_identity",
        "assume_role_with_web_identity_federation": "file",
        "assume_role_with_web_identity_token_file": str(token),
    }
    connect(extra, login=None, password=None)

    store = opened()

    check_store(store)
    assert who_asks(store, aws).startswith(ASSUMED)


def test_a_web_identity_without_its_token_is_named(connect, tmp_path):
    """The error has the path: the kubelet may write the file a moment later."""
    extra = {
        "role_arn": ROLE,
        "assume_role_method": "assume_role_with_web_identity",
        "assume_role_with_web_identity_federation": "file",
        "assume_role_with_web_identity_token_file": str(tmp_path / "missing"),
    }
    connect(extra, login=None, password=None)

    with pytest.raises(StoreError, match=r"connection 'store': .*missing"):
        opened()


def test_a_profile_of_the_connection_is_used(connect, tmp_path):
    """That of the files of this process's user."""
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = of-the-profile\n"
    )
    connect({"profile_name": "team"}, login=None, password=None)

    store = opened()

    check_store(store)
    assert credentials_of(store)[:2] == ("AKIAPROFILE", "of-the-profile")


@pytest.mark.parametrize(
    ("extra", "port"),
    [
        ({"endpoint_url": "http://localhost:1"}, 1),
        ({"service_config": {"s3": {"endpoint_url": "http://localhost:2"}}}, 2),
        ({"endpoint_url": DEAD, "service_config": {"s3": {"endpoint_url": "http://localhost:2"}}}, 2),
    ],
)
def test_the_endpoint_is_that_of_s3_else_that_of_all_services(connect, extra, port):
    """As the provider documents; machines get the same endpoint."""
    connect(extra, places=False)

    assert opened()._client.meta.endpoint_url == f"http://localhost:{port}"
    assert store_place(None, "store").options["endpoint_url"] == f"http://localhost:{port}"


def test_a_role_is_assumed_at_sts_and_not_at_the_endpoint_of_a_store(connect, aws):
    """An S3-compatible store does not know roles; only ``service_config`` names another STS."""
    connect(
        {"role_arn": ROLE, "endpoint_url": DEAD, "service_config": {"sts": {"endpoint_url": aws}}},
        places=False,
    )

    store = opened()

    assert store._client.meta.endpoint_url == DEAD
    assert who_asks(store, aws).startswith(ASSUMED)


def test_the_region_of_the_connection_is_that_of_the_client(connect):
    """Also for a role, which has its own session."""
    connect({"region_name": "eu-west-1"})
    assert opened()._client.meta.region_name == "eu-west-1"

    connect({"region_name": "eu-west-1", "role_arn": ROLE})
    assert opened()._client.meta.region_name == "eu-west-1"


@pytest.mark.parametrize(
    ("verify", "used"), [(False, False), ("false", False), ("/etc/own-ca.pem", "/etc/own-ca.pem")]
)
def test_certificates_are_trusted_as_the_connection_says(connect, verify, used):
    """Disabled, or with a file of the user's own; ``false`` is text where the connection is a URI."""
    connect({"verify": verify})

    assert opened()._client._endpoint.http_session._verify == used


def test_options_of_botocore_reach_the_client(connect):
    """``config_kwargs`` of the connection; other settings stay as this package sets them."""
    connect({"config_kwargs": {"read_timeout": 7}})

    config = opened()._client.meta.config

    assert (config.read_timeout, config.connect_timeout) == (7, 10)


def test_a_connection_may_ask_for_unsigned_requests(connect):
    """With the provider's name for it; here also on machines."""
    connect({"config_kwargs": {"signature_version": "unsigned"}}, login=None, password=None)

    assert opened()._client.meta.config.signature_version is UNSIGNED
    assert store_place(None, "store").options["config"] == {"signature_version": "unsigned"}


def test_nobody_s_credentials_are_said_to_be_missing(connect):
    """A connection without keys means this process's own identity, which has none here."""
    connect(login=None, password=None)

    with pytest.raises(StoreError, match="Unable to locate credentials: give the connection or the machine"):
        check_store(opened())


def test_a_role_that_nobody_may_assume_is_said_to_lack_credentials(connect):
    """The error has the name of the connection, before any request to the store."""
    connect({"role_arn": ROLE}, login=None, password=None)

    with pytest.raises(StoreError, match="connection 'store': Unable to locate credentials"):
        opened()


def test_no_answer_of_sts_may_pass(connect):
    """A triggerer keeps asking, and does not use up a task's retry."""
    config = {"retries": {"total_max_attempts": 1}, "connect_timeout": 1}
    connect(
        {"role_arn": ROLE, "config_kwargs": config, "service_config": {"sts": {"endpoint_url": DEAD}}},
        places=False,
    )

    with pytest.raises(StoreError, match="connection 'store': Could not connect") as caught:
        opened()

    assert caught.value.transient


@pytest.mark.parametrize(
    ("extra", "fields", "words"),
    [
        ({}, {"password": None}, "has an access key id without its secret, or the reverse"),
        ({}, {"login": ""}, "has an access key id without its secret, or the reverse"),
        ({"role_arn": ROLE, "region_name": ""}, {}, "You must specify a region"),
        ({"profile_name": "no-such"}, {}, r"The config profile \(no-such\) could not be found"),
        ({"role_arn": ROLE, "assume_role_method": "guess"}, {}, "assume_role_method='guess'"),
        ({"config_kwargs": {"no_such": 1}}, {}, "no_such"),
        (
            {"role_arn": ROLE, "assume_role_method": "assume_role_with_web_identity"},
            {},
            "Unsupported federation",
        ),
    ],
)
def test_a_connection_that_cannot_be_used_is_named(connect, extra, fields, words):
    """Before a machine costs money; no other identity replaces it."""
    connect(extra, **fields)

    with pytest.raises(SpecError, match=f"connection 'store'.*{words}"):
        opened()


def test_prices_are_asked_for_by_the_role(monkeypatch, aws):
    """Through the hook for DAG code, from a connection of the provider's own type."""
    extra = {
        "role_arn": ROLE,
        "region_name": "us-east-1",
        "service_config": {"sts": {"endpoint_url": aws}},
    }
    team = Connection(conn_id="team", conn_type="aws", login=KEY, password=SECRET, extra=json.dumps(extra))
    monkeypatch.setenv("AIRFLOW_CONN_TEAM", team.get_uri())

    session = CloudPricingHook("aws", "team").get_conn()._access.session

    sts = session.client("sts", endpoint_url=aws)
    assert sts.get_caller_identity()["Arn"] == f"{ASSUMED}/airflow_team"


SPEC = {
    "version": "v1",
    "name": "one",
    "base": {"image": "python:3.11"},
    "entrypoint": ["python"],
    "outputs": {"model": "/output/model"},
}
SCRIPT = """
import os, pathlib
found = sorted(name for name in os.environ if name.startswith("AWS_"))
path = pathlib.Path(os.environ["ENVSCALER_OUTPUT_MODEL"])
path.mkdir(parents=True, exist_ok=True)
(path / "environment").write_text(repr(found))
"""


def looked(look, claim):
    """The first value of *look* for which *claim* is true, within 1,200 checks: a busy machine is slow."""
    for _ in range(1200):
        if claim(found := look()):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


@pytest.mark.timeout(180)
def test_keys_of_a_connection_open_the_store_on_a_machine(connect, tmp_path):
    """The sidecar has no identity here; the training gets none, and no file contains the secret."""
    connect()
    place = store_place(None, "store")
    store = Run(place.open(), "dep/dag/run/train/-1")
    store.write(control_name(1, 1), Control(sequence=1).to_json())
    backend = LocalBackend(tmp_path / "root")
    request = attempts.request(
        store_url=place.url,
        run_prefix="dep/dag/run/train/-1",
        run_label="dag.train",
        generation=1,
        attempt=1,
        allocation=Allocation(backend.offers()[0]),
        command=("python", "-c", SCRIPT),
        spec=SPEC,
        store_options=place.options,
        store_login=place.login,
    )

    handle = backend.submit(request)
    try:
        node = looked(lambda: backend.observe(handle), lambda seen: seen.is_over).nodes[0]
    finally:
        backend.stop(handle, grace_s=0)

    assert node.exit_code == 0, node.detail
    assert store.read("outputs/g1-a1-c1/model/environment") == b"[]"
    held = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and not path.is_symlink()]
    assert held
    assert not [path for path in held if SECRET.encode() in path.read_bytes()]


def test_an_operator_hands_the_login_of_its_connection_to_its_stage(connect, tmp_path, monkeypatch):
    """As with the options; each start of the stage gets them."""
    connect()
    with operator_world(tmp_path, monkeypatch) as world:
        operator = world.operator(store_url=f"s3://{BUCKET}/of/ours", store_conn_id="store")

        stage = arguments.stage_of(operator, world.context(operator, Ti()), begun=None)

    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    assert stage.store_login == StoreLogin(keys)
    assert stage.store_options["endpoint_url"].startswith("http://127.0.0.1:")
