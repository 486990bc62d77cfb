"""A rule with a query reads from a real Prometheus server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace

import pytest

from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.hooks.connections import HttpServer
from envscaler_airflow.hooks.prometheus import Prometheus, asks
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.scaling import Observation, Policy, ThresholdRule, ask_metrics, decide

SERVER = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    SERVER is None and not os.environ.get("CI"), reason="prometheus is not installed"
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that monitors itself, on a free port."""
    folder, port = tmp_path_factory.mktemp("prometheus"), _free_port()
    address = f"127.0.0.1:{port}"
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: itself, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )
    server = subprocess.Popen(
        [
            SERVER or "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_scraped(f"http://{address}")
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(10)


def _wait_until_scraped(url: str) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if Prometheus(HttpServer(url)).values("up") == (1.0,):
                return
        except BackendError:
            pass
        time.sleep(0.2)
    raise AssertionError("Prometheus has not scraped itself within 30 s")


@pytest.mark.timeout(60)
def test_a_vector_a_scalar_and_nothing(url):
    """Values of every series; NaN is not a value."""
    server = Prometheus(HttpServer(url))

    assert server.values("up") == (1.0,)
    assert server.values("scalar(up) * 40") == (40.0,)
    assert sorted(server.values("vector(1) or label_replace(vector(3), 'a', 'b', '', '')")) == [1.0, 3.0]
    assert server.values("no_such_metric") == ()
    assert server.values("vector(NaN)") == ()


@pytest.mark.timeout(60)
def test_a_query_that_is_none_is_the_specs_fault(url):
    """The server's own message, and no retry."""
    with pytest.raises(SpecError, match="parse error"):
        Prometheus(HttpServer(url)).values("up +")
    with pytest.raises(SpecError, match="answers a matrix"):
        Prometheus(HttpServer(url)).values("up[1m]")


def test_a_server_that_is_away_can_be_asked_again():
    """Connection refused is transient."""
    with pytest.raises(BackendError, match="does not answer") as caught:
        Prometheus(HttpServer(f"http://127.0.0.1:{_free_port()}")).values("up")

    assert caught.value.transient


@pytest.mark.timeout(60)
def test_a_rule_decides_by_what_its_query_answers(url, monkeypatch):
    """Three checks above the bound: a node more. A query without an answer: unchanged, with the reason."""
    rule = ThresholdRule("load", above=80, below=None, query="scalar(up) * 90")
    here = Allocation(Offer("aws", "r", "m5", "on-demand", vcpus=4, memory_gib=16, usd_per_hour=1.0), 2)
    policy = Policy("threshold", max_nodes=4, stabilization_s=0.0, rules=(rule,))
    nothing = replace(policy, rules=(replace(rule, query="no_such_metric"),))
    monkeypatch.setenv("AIRFLOW__ENVSCALER__PROMETHEUS_URL", url)

    answers = [ask_metrics([rule.needed], asks(), at_s=10.0 * at) for at in range(3)]
    none = ask_metrics([nothing.rules[0].needed], asks(), at_s=20.0)

    samples = tuple(sample for answer in answers for sample in answer.samples)
    assert decide(Observation(current=here, elapsed_s=20.0, samples=samples), policy).target.nodes == 3
    kept = decide(Observation(current=here, elapsed_s=20.0, unknown=none.unknown), nothing)
    why = f"load is unknown: query 'no_such_metric': {url}: Prometheus has no number for it now"
    assert (kept.action, kept.reason) == ("keep", why)
