"""CloudPricingHook: which connection, which identity, and what it reports when there is none."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from envscaler_airflow import CloudPricingHook
from envscaler_airflow.clouds import Fetched, Quote
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.store.run_store import open_store


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
    """A feed that returns one price, or fails."""

    cloud = "aws"

    def __init__(self, error=None):
        """Take the error to fail with."""
        self.error = error

    def fetch(self, region):
        """Return one price of the region."""
        if self.error is not None:
            raise self.error
        return Fetched("aws", region, (Quote("g5.xlarge", region, "", "on-demand", 1.006),), "AWS")


def hook_on(feed, **given):
    """Return a hook that queries *feed*."""
    hook = CloudPricingHook("aws", **given)
    hook.__dict__["_feed"] = feed
    return hook


def test_without_the_default_connection_the_machines_own_identity_asks(connections, monkeypatch):
    """As boto3 finds it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-machine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

    feed = CloudPricingHook("aws").get_conn()

    assert feed._access.session.get_credentials().access_key == "of-the-machine"
    assert CloudPricingHook("azure").get_conn().cloud == "azure"  # needs none


def test_a_connection_that_was_named_must_exist(connections):
    """Without this check, the request would use another identity."""
    with pytest.raises(AirflowNotFoundException, match="aws_prices"):
        CloudPricingHook("aws", "aws_prices").get_conn()


def test_a_cloud_that_needs_no_credentials_reads_no_connection(connections):
    """Azure's retail prices are public: a missing connection does not matter."""
    assert CloudPricingHook("azure", "absent").get_conn().cloud == "azure"


def test_keys_and_endpoint_of_the_connection_are_used(connections):
    """Login and password, or the extra."""
    extra = {"region_name": "eu-west-1", "endpoint_url": "http://localhost:1", "aws_session_token": "t"}
    extra["verify"] = "no"
    connections["aws_default"] = Connection(
        conn_id="aws_default", conn_type="aws", login="key", password="secret", extra=json.dumps(extra)
    )

    feed = CloudPricingHook("aws").get_conn()

    found = feed._access.session.get_credentials().get_frozen_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("key", "secret", "t")
    assert feed._access.session.region_name == "eu-west-1"
    assert feed._access.endpoint_url == "http://localhost:1"
    assert feed._access.verify is False
    assert feed._advisor_url == "http://localhost:1/spot-advisor-data.json"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"profile_name": "nope"}, "config profile .nope. could not be found"),
        ({"role_arn": 5}, "Invalid type for parameter RoleArn"),
        (["us-east-1"], "its extra is not a JSON object"),
    ],
)
def test_a_connection_that_lets_nobody_in_is_reported(connections, monkeypatch, extra, words):
    """By its id, also under *Test*."""
    connections["team"] = Connection(conn_id="team", conn_type="aws", extra=json.dumps(extra))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")

    is_good, said = CloudPricingHook("aws", "team").test_connection()

    assert not is_good
    assert re.search(f"connection 'team': .*{words}", said, re.DOTALL)


def test_gcp_without_any_key_says_what_to_give_it(connections, monkeypatch):
    """This package does not depend on Google's libraries."""

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("envscaler_airflow.hooks.pricing.import_module", missing)

    with pytest.raises(SpecError, match="put an api_key"):
        CloudPricingHook("gcp").get_conn()


class Google:
    """google-auth and, when *has_provider*, the Google provider's hook; counts the requests for a token."""

    def __init__(self, monkeypatch, *, has_provider):
        """Replace both."""
        self.asked = []
        self.token = None
        self.exceptions = SimpleNamespace(GoogleAuthError=RuntimeError)
        self._has_provider = has_provider
        monkeypatch.setattr("envscaler_airflow.hooks.pricing.import_module", self._module)
        monkeypatch.setattr("envscaler_airflow.hooks.pricing.find_spec", lambda _: has_provider or None)

    def _module(self, name):
        if name == "airflow.providers.google.common.hooks.base_google":
            assert self._has_provider
            return SimpleNamespace(GoogleBaseHook=self._hook)
        return self if name == "google.auth" else SimpleNamespace(Request=lambda: "by requests")

    def _hook(self, gcp_conn_id):
        self.asked.append(gcp_conn_id)
        return SimpleNamespace(get_credentials=lambda: self)

    def default(self, *, scopes):
        """Application default credentials."""
        self.asked.append(scopes)
        return self, "project"

    def refresh(self, request):
        """Get a token."""
        assert request == "by requests"
        self.token = "t0"


BILLING = ["https://www.googleapis.com/auth/cloud-billing.readonly"]


@pytest.mark.parametrize(
    ("extra", "has_provider", "asked"),
    [
        (None, False, BILLING),
        (None, True, BILLING),
        ({"project": "p", "key_path": ""}, False, BILLING),
        ({"keyfile_dict": "{}", "project": "p"}, True, "google_cloud_default"),
    ],
)
def test_google_credentials_are_the_providers_else_the_applications_default(
    connections, monkeypatch, extra, has_provider, asked
):
    """From a connection if there is one and the provider is installed (the provider reads key files)."""
    google = Google(monkeypatch, has_provider=has_provider)
    if extra is not None:
        connections["google_cloud_default"] = Connection(
            conn_id="google_cloud_default", conn_type="google_cloud_platform", extra=json.dumps(extra)
        )

    feed = CloudPricingHook("gcp").get_conn()

    assert google.asked == [asked]
    assert feed._caller.headers == {"Authorization": "Bearer t0"}


def test_a_google_key_that_only_the_provider_reads_is_refused_without_it(connections, monkeypatch):
    """Otherwise the request for prices would use another identity."""
    google = Google(monkeypatch, has_provider=False)
    extra = json.dumps({"keyfile_dict": '{"private_key": "canary"}'})
    connections["team"] = Connection(conn_id="team", conn_type="google_cloud_platform", extra=extra)

    with pytest.raises(
        SpecError, match="connection 'team': keyfile_dict: only the Google provider"
    ) as caught:
        CloudPricingHook("gcp", "team").get_conn()

    assert google.asked == []
    assert "canary" not in str(caught.value)


def test_an_api_key_of_the_connection_needs_nothing_installed(connections, monkeypatch):
    """The Cloud Billing Catalog accepts it directly."""
    monkeypatch.setattr("envscaler_airflow.hooks.pricing.import_module", None)
    connections["team"] = Connection(
        conn_id="team", conn_type="google_cloud_platform", extra=json.dumps({"api_key": "k"})
    )

    feed = CloudPricingHook("gcp", "team").get_conn()

    assert feed._caller.headers == {"X-Goog-Api-Key": "k"}


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
    """Its letters are not regions: price lists of them would fail silently and appear in every plan."""
    with pytest.raises(SpecError, match=r"write a list, such as \['us-east-1'\]"):
        hook_on(Feed(), cache=str(tmp_path)).refresh("us-east-1")

    assert list(tmp_path.iterdir()) == []


def test_the_test_of_a_connection_says_what_came():
    """True and the number of prices, or False and the reason."""
    refused = BackendError("AWS pricing in us-east-1: no", status=403)

    assert hook_on(Feed()).test_connection() == (True, "1 prices of aws us-east-1")
    assert hook_on(Feed(refused)).test_connection() == (False, "AWS pricing in us-east-1: no")


def test_refreshed_prices_are_shared_through_the_run_store(connections, tmp_path, monkeypatch):
    """Workers, triggerers and shells see the same ones; without a store they stay here."""
    hook = hook_on(Feed(), cache=str(tmp_path / "cache"))
    hook.refresh(["us-east-1"])
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", f"file://{tmp_path}/store")

    hook.refresh(["us-east-1"])

    store = open_store(f"file://{tmp_path}/store")
    assert len(store.names("prices.v1/aws.us-east-1")) == 1
