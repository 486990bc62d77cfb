"""The registry of clouds: a cloud is one module and one entry point, for both CLI and hook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from fakes.toy_cloud import CLOUD

from envscaler_airflow import CloudPricingHook, clouds
from envscaler_airflow import installed as registry
from envscaler_airflow.clouds import Access
from envscaler_airflow.clouds.aws import AwsPrices
from envscaler_airflow.errors import BackendError, SpecError

TESTS = Path(__file__).parents[2]
SPEC = '{version: v1, name: x, resources: {accelerators: "A10G:1", use_spot: false}, entrypoint: [a]}'


@pytest.fixture
def installed(monkeypatch):
    """Add these entry points to our own, as if packages had installed them."""
    own = registry.entry_points(group=clouds.GROUP)

    def install(**points):
        found = [EntryPoint(name, value, clouds.GROUP) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: [*own, *found])
        clouds.all_clouds.cache_clear()

    yield install
    clouds.all_clouds.cache_clear()


@pytest.fixture
def shell(tmp_path):
    """Run ``envscaler`` where a package with the toy cloud is installed."""
    meta = tmp_path / "site" / "toy_cloud-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-cloud\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{clouds.GROUP}]\ntoy = fakes.toy_cloud:CLOUD\n")
    paths = os.pathsep.join([str(tmp_path / "site"), str(TESTS)])
    env = {**os.environ, "PYTHONPATH": paths, "ENVSCALER_CACHE": str(tmp_path), "ENVSCALER_TOY_API_KEY": "k"}

    def run(*words):
        call = [sys.executable, "-m", "envscaler_airflow.cli", *words]
        return subprocess.run(call, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_a_cloud_of_another_package_is_refreshed_and_planned_with(shell, tmp_path):
    """Its entry point alone adds its prices to ``catalog refresh`` and ``plan``."""
    (tmp_path / "s.yaml").write_text(SPEC)

    refreshed = shell("catalog", "refresh", "--cloud", "toy", "--json")
    planned = shell("plan", "-f", "s.yaml", "--clouds", "toy", "--json")

    assert refreshed.returncode == 0, refreshed.stderr
    (found,) = json.loads(refreshed.stdout)["price_lists"]
    assert (found["region"], found["source"], len(found["prices"])) == ("toyland-1", "Toy price list", 2)
    assert planned.returncode == 0, planned.stderr
    (first,) = json.loads(planned.stdout)["candidates"]
    assert (first["name"], first["usd_per_hour"]) == ("toy/toyland-1/toyland-1-a/toy.large/on-demand", 0.05)


def test_a_cloud_of_another_package_is_offered_with_its_own_units_of_time(shell):
    """Whole minutes, as its module defines."""
    shell("catalog", "refresh", "--cloud", "toy", "--region", "toyland-2")

    got = shell("offers", "--clouds", "toy", "--gpu", "A10G", "--json")

    assert got.returncode == 0, got.stderr
    first, *_ = json.loads(got.stdout)["offers"]
    assert (first["region"], first["billing_unit_s"]) == ("toyland-2", 60.0)


def test_a_cloud_of_another_package_is_asked_by_the_hook(installed, tmp_path, monkeypatch):
    """The hook passes the login, key and endpoint of a connection of its own type."""
    installed(toy="fakes.toy_cloud:CLOUD")
    extra = json.dumps({"endpoint_url": "http://localhost:1", "verify": "false"})
    found = Connection(conn_id="toy_default", conn_type="toy", login="me", password="key", extra=extra)
    monkeypatch.setattr(
        CloudPricingHook, "get_connection", classmethod(lambda _, name: {"toy_default": found}[name])
    )

    hook = CloudPricingHook("toy", cache=str(tmp_path))
    (price_list,) = hook.refresh(["toyland-2"])

    asked_with = Access(login="me", secret="key", endpoint_url="http://localhost:1", verify=False)
    assert hook.get_conn().access == asked_with
    assert {price.usd for price in price_list.prices.values()} == {0.05, 0.01}
    assert hook.test_connection() == (True, "2 prices of toy toyland-1")


def test_a_cloud_of_another_package_says_what_it_lacks(installed, monkeypatch):
    """Without its usual connection it is called without credentials, and reports its own error."""
    installed(toy="fakes.toy_cloud:CLOUD")

    def absent(_, conn_id):
        raise AirflowNotFoundException(conn_id)

    monkeypatch.setattr(CloudPricingHook, "get_connection", classmethod(absent))

    assert CloudPricingHook("toy").test_connection() == (False, "toy: set ENVSCALER_TOY_API_KEY")


def test_our_own_clouds_win_over_others_of_the_same_name(installed):
    """A package cannot change the prices of a built-in cloud."""
    installed(aws="fakes.toy_cloud:USURPER", toy="fakes.toy_cloud:CLOUD")

    assert clouds.all_clouds()["aws"].prices is not None
    assert clouds.all_clouds()["toy"] is CLOUD


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("fakes.no_such_module:CLOUD", "'bad' .* cannot be loaded: ModuleNotFoundError"),
        ("fakes.toy_cloud:NAME", "'bad' .* is not a Cloud"),
    ],
)
def test_a_broken_cloud_is_left_out_with_a_warning(value, words, installed, caplog):
    """The others work: a run does not end because of another package."""
    known = list(clouds.all_clouds())
    installed(bad=value)

    assert list(clouds.all_clouds()) == known
    assert re.search(words, caplog.text)


def test_the_facts_of_clouds_need_no_sdk():
    """Reading them imports neither boto3 nor an HTTP client, pydantic or Airflow."""
    code = (
        "import sys; from envscaler_airflow.clouds import all_clouds; assert all_clouds();"
        "print([name for name in ('boto3', 'httpx', 'pydantic', 'airflow') if name in sys.modules])"
    )

    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert got.stdout.strip() == "[]"


def test_gcp_without_a_key_says_where_to_put_it():
    """A fake of the cloud needs none."""
    gcp = clouds.price_sources()["gcp"]

    with pytest.raises(SpecError, match="ENVSCALER_GCP_API_KEY"):
        gcp.open(Access())
    assert gcp.open(Access(endpoint_url="http://localhost:1")).cloud == "gcp"


@pytest.mark.parametrize(("verify", "given"), [(True, None), (False, False), ("/etc/ca.pem", "/etc/ca.pem")])
def test_aws_is_asked_where_and_how_the_access_says(verify, given):
    """Its certificates too; boto3's own default applies where nothing else is set."""
    asked = []

    class Session:
        def client(self, service, **how):
            asked.append((service, how["endpoint_url"], how["verify"]))
            raise ValueError(service)

    feed = AwsPrices(Access(session=Session(), endpoint_url="http://localhost:1", verify=verify))

    with pytest.raises(BackendError, match="AWS pricing in us-east-1"):
        feed.fetch("eu-west-1")
    assert asked == [("pricing", "http://localhost:1", given)]
