"""CloudPricingHook: which connection, which identity, and what is said when there is none."""

from __future__ import annotations

import json
import re

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from envscaler_airflow import CloudPricingHook
from envscaler_airflow.clouds.base import Fetched, Quote
from envscaler_airflow.errors import BackendError, SpecError


@pytest.fixture
def connections(monkeypatch):
    """Connections by id; the others do not exist."""
    known = {}

    def get(_, conn_id):
        if conn_id not in known:
            raise AirflowNotFoundException(conn_id)
        return known[conn_id]

    monkeypatch.setattr(CloudPricingHook, "get_connection", classmethod(get))
    return known


class Feed:
    """Gives one price, or fails."""

    cloud = "aws"

    def __init__(self, error=None):
        """Take what to fail with."""
        self.error = error

    def fetch(self, region):
        """One price of the region."""
        if self.error is not None:
            raise self.error
        return Fetched("aws", region, (Quote("g5.xlarge", region, "", "on-demand", 1.006),), "AWS")


def hook_on(feed, **given):
    """A hook that asks *feed*."""
    hook = CloudPricingHook("aws", **given)
    hook.__dict__["_feed"] = feed
    return hook


def test_without_the_default_connection_the_machines_own_identity_asks(connections):
    """As boto3 finds it."""
    feed = CloudPricingHook("aws").get_conn()

    assert feed._access.session is None
    assert CloudPricingHook("azure").get_conn().cloud == "azure"  # needs none


def test_a_connection_that_was_named_must_exist(connections):
    """It would ask as somebody else."""
    with pytest.raises(AirflowNotFoundException, match="aws_prices"):
        CloudPricingHook("aws", "aws_prices").get_conn()


def test_a_cloud_that_needs_no_credentials_reads_no_connection(connections):
    """Azure's retail prices are public: a connection that does not exist is not missed."""
    assert CloudPricingHook("azure", "absent").get_conn().cloud == "azure"


def test_keys_and_endpoint_of_the_connection_are_used(connections):
    """Login and password, or the extra."""
    extra = {"region_name": "eu-west-1", "endpoint_url": "http://localhost:1", "aws_session_token": "t"}
    connections["aws_default"] = Connection(
        conn_id="aws_default", conn_type="aws", login="key", password="secret", extra=json.dumps(extra)
    )

    feed = CloudPricingHook("aws").get_conn()

    found = feed._access.session.get_credentials().get_frozen_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("key", "secret", "t")
    assert feed._access.session.region_name == "eu-west-1"
    assert feed._access.endpoint_url == "http://localhost:1"
    assert feed._advisor_url == "http://localhost:1/spot-advisor-data.json"


def test_a_role_is_taken_on(connections, monkeypatch):
    """Prices are asked for with its keys and not with those of the connection."""
    role = "arn:aws:iam::123456789012:role/prices"
    connections["aws_default"] = Connection(
        conn_id="aws_default",
        conn_type="aws",
        login="key",
        password="secret",
        extra=json.dumps({"role_arn": role, "region_name": "us-east-1"}),
    )
    asked = []

    class Sts:
        def assume_role(self, **words):
            asked.append(words)
            keys = {"AccessKeyId": "of-the-role", "SecretAccessKey": "s", "SessionToken": "t"}
            return {"Credentials": keys}

    monkeypatch.setattr("boto3.Session.client", lambda *_, **__: Sts())

    found = CloudPricingHook("aws").get_conn()._access.session.get_credentials().get_frozen_credentials()

    assert (found.access_key, found.token) == ("of-the-role", "t")
    assert [words["RoleArn"] for words in asked] == [role]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"profile_name": "nope"}, "config profile .nope. could not be found"),
        ({"role_arn": 5}, "Invalid type for parameter RoleArn"),
        (["us-east-1"], "its extra is no JSON object"),
    ],
)
def test_a_connection_that_lets_nobody_in_is_told(connections, monkeypatch, extra, words):
    """By its id, under *Test* too."""
    connections["team"] = Connection(conn_id="team", conn_type="aws", extra=json.dumps(extra))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")

    is_good, said = CloudPricingHook("aws", "team").test_connection()

    assert not is_good
    assert re.search(f"connection 'team': .*{words}", said, re.DOTALL)


def test_gcp_without_any_key_says_what_to_give_it(connections, monkeypatch):
    """Google's libraries are not asked for by this package."""

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("envscaler_airflow.hooks.pricing.import_module", missing)

    with pytest.raises(SpecError, match="put an api_key"):
        CloudPricingHook("gcp").get_conn()


def test_a_refresh_keeps_prices_and_tells_failures(tmp_path, monkeypatch):
    """It raises nothing: yesterday's prices are better than none."""
    monkeypatch.setattr("envscaler_airflow.catalog.prices.PriceCache.compile", lambda _: None)
    refused = BackendError("AWS pricing in us-east-1: no", status=403)

    (good,) = hook_on(Feed(), cache=str(tmp_path)).refresh(["us-east-1"])
    (bad,) = hook_on(Feed(refused), cache=str(tmp_path)).refresh(["us-east-1"])

    assert good.error is None
    assert bad.error == "AWS pricing in us-east-1: no"
    assert bad.prices == good.prices
    assert len(good.prices) == 1


def test_one_region_without_a_list_is_refused(tmp_path):
    """Its letters are no regions: books of them would fail quietly, and every plan would name them."""
    with pytest.raises(SpecError, match=r"write a list, such as \['us-east-1'\]"):
        hook_on(Feed(), cache=str(tmp_path)).refresh("us-east-1")

    assert list(tmp_path.iterdir()) == []


def test_the_test_of_a_connection_says_what_came():
    """True and how many, or False and why."""
    refused = BackendError("AWS pricing in us-east-1: no", status=403)

    assert hook_on(Feed()).test_connection() == (True, "1 prices of aws us-east-1")
    assert hook_on(Feed(refused)).test_connection() == (False, "AWS pricing in us-east-1: no")
