"""Refreshed prices are shared through the run store: every worker and shell plans with the same ones."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.catalog import sources
from envscaler_airflow.catalog.prices import Price, PriceCache, PriceList
from envscaler_airflow.catalog.shared_prices import FOLDER, KEPT, publish, pull
from envscaler_airflow.cli import main
from envscaler_airflow.store.run_store import open_store

HOUR_S = 3600.0


@pytest.fixture
def store(tmp_path):
    """An empty run store."""
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def cache(tmp_path):
    """The cache of another machine."""
    return PriceCache(tmp_path / "other")


def price_list(usd, *, at=HOUR_S, **more):
    """The price of one machine in one region."""
    prices = {"g5.xlarge|us-east-1||on-demand": Price(usd, at)}
    return PriceList("aws", "us-east-1", at=at, source="AWS", prices=more.pop("prices", prices), **more)


def test_prices_that_one_process_fetched_are_used_by_another(store, cache):
    """Once: a second pull copies nothing."""
    assert publish(store, price_list(1.0))

    assert pull(store, cache, now=2 * HOUR_S) == ()

    assert cache.price_list("aws", "us-east-1") == price_list(1.0)
    assert cache.ages() == {("aws", "us-east-1"): HOUR_S}
    before = (cache.folder / "catalog.bin").stat().st_mtime_ns
    assert pull(store, cache, now=2 * HOUR_S) == ()
    assert (cache.folder / "catalog.bin").stat().st_mtime_ns == before


def test_newer_prices_replace_older_ones_and_never_the_reverse(store, cache):
    """Here of hour 3; the store has those of hours 1 and 2."""
    publish(store, price_list(1.0))
    publish(store, price_list(2.0, at=2 * HOUR_S))
    pull(store, cache, now=4 * HOUR_S)
    assert cache.price_list("aws", "us-east-1").at == 2 * HOUR_S

    cache.keep(price_list(3.0, at=3 * HOUR_S))
    cache.compile()
    pull(store, cache, now=4 * HOUR_S)

    assert cache.price_list("aws", "us-east-1").at == 3 * HOUR_S
    assert not cache.keep(price_list(1.0))


def test_a_torn_list_is_named_and_the_one_before_is_used(store, cache):
    """So is one of another version."""
    publish(store, price_list(1.0))
    [name] = store.names(FOLDER)
    store.write(name.replace("000003600000", "000007200000"), b'{"schema": "2.0", "cloud"')

    faults = pull(store, cache, now=3 * HOUR_S)

    assert len(faults) == 1
    assert "000007200000.json: not JSON" in faults[0]
    assert cache.price_list("aws", "us-east-1").at == HOUR_S


def test_prices_from_the_future_are_not_believed(store, cache):
    """A clock a week ahead would keep out everything that is newer."""
    publish(store, price_list(1.0))
    publish(store, price_list(9.0, at=7 * 24 * HOUR_S))

    [fault] = pull(store, cache, now=2 * HOUR_S)

    assert "seen 166 h from now: a wrong clock" in fault
    assert cache.price_list("aws", "us-east-1").at == HOUR_S


def test_only_the_newest_lists_of_a_region_are_kept(store):
    """One to fall back to; a region that never answered adds nothing."""
    for hour in range(1, 6):
        publish(store, price_list(1.0, at=hour * HOUR_S))

    assert len(store.names(FOLDER)) == KEPT
    assert not publish(store, PriceList("aws", "eu-west-1", error="down", failed_at=1.0))


def test_a_list_in_the_folder_of_another_region_is_not_taken(store, cache):
    """A copied or poisoned file does not replace prices of a region that it does not name."""
    body = {"schema": "2.0", **price_list(0.01).to_dict()}
    store.write(f"{FOLDER}/gcp.us-central1/000003600000000.json", json.dumps(body).encode())

    pull(store, cache, now=2 * HOUR_S)

    assert cache.price_lists() == []


def test_the_catalog_of_a_process_is_read_again_after_a_refresh(store, tmp_path, monkeypatch):
    """Offers of a cluster's machines get the prices that the run store has (feature B2)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "mine"))
    before = sources.live_catalog()
    assert sources.live_catalog() is before, "loaded once"

    publish(store, price_list(1.0))
    pull(store, PriceCache(sources.cache_dir()), now=2 * HOUR_S)

    assert sources.live_catalog() is not before
    assert "aws us-east-1" in sources.live_catalog().label


def test_a_shell_that_plans_with_a_store_uses_its_prices(store, tmp_path, monkeypatch):
    """``envscaler plan --store`` copies them first."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path / "shell"))
    publish(store, price_list(1.0))
    spec = tmp_path / "s.yaml"
    spec.write_text("version: v1\nname: s\nentrypoint: [python, a.py]\n")

    found = CliRunner().invoke(main, ["plan", "-f", str(spec), "--store", store.url, "--json"])

    assert found.exit_code == 0, found.output
    assert any("aws us-east-1" in note for note in json.loads(found.stdout)["notes"])


def put(store, found, *, at=HOUR_S):
    """Write a price list as another version or a broken process might."""
    body = {"schema": "2.0", **price_list(1.0).to_dict(), **found}
    store.write(f"{FOLDER}/aws.us-east-1/{int(at * 1000):015d}.json", json.dumps(body).encode())


@pytest.mark.parametrize(
    "found",
    [
        {"at": 1e12},
        {"at": -1.0},
        {"at": 2 * HOUR_S},
        {"prices": {"g5.xlarge|us-east-1||on-demand": {"usd": 1.0, "at": 1e300}}},
        {"prices": {"g5.xlarge|us-east-1||on-demand": {"usd": -1.0, "at": 1.0}}},
        {"kinds": [["aws", "x9"]]},
        {"kinds": [["aws", "x9", "many", 1.0]]},
        {"kinds": [["aws", "x9", *range(20)]]},
        {"machines": {"g5.xlarge": list(range(60))}},
        {"risks": {"g5.xlarge": 999}},
    ],
)
def test_a_list_of_which_no_catalog_can_be_built_is_named_and_the_next_one_is_used(store, cache, found):
    """It neither fails the start that pulls it, nor keeps newer prices out."""
    put(store, found)

    [fault] = pull(store, cache, now=2 * HOUR_S)

    assert "000003600000.json" in fault
    publish(store, price_list(2.0, at=1.5 * HOUR_S))
    pull(store, cache, now=2 * HOUR_S)
    assert cache.price_list("aws", "us-east-1").at == 1.5 * HOUR_S


def test_lists_of_a_wrong_clock_displace_no_others(store, cache):
    """Two of the year 2286 and one file without a time fill the folder: the current refresh counts."""
    for more in range(KEPT):
        put(store, {"at": 1e10 + more}, at=1e10 + more)
    store.write(f"{FOLDER}/aws.us-east-1/²².json", b"{}")

    publish(store, price_list(1.0))

    pull(store, cache, now=2 * HOUR_S)
    assert cache.price_list("aws", "us-east-1") == price_list(1.0)
