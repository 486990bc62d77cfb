"""Queries of scaling rules: the answers of a server, and what a check makes of them. No network."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import httpx
import pytest
from airflow.sdk._shared.secrets_masker import reset_secrets_masker

from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.hooks import prometheus
from envscaler_airflow.hooks.connections import HttpServer
from envscaler_airflow.hooks.prometheus import MOST_BYTES, Prometheus, asks, shown
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.scaling import (
    Check,
    Observation,
    Policy,
    Sample,
    ThresholdRule,
    ask_metrics,
    decide,
    explain,
    replay,
)

URL = "http://ann:pw-12345@prometheus:9090/prom?x=pw-12345"
SHOWN = "http://prometheus:9090/prom"
HERE = Allocation(Offer("aws", "r", "m5", "on-demand", vcpus=4, memory_gib=16, usd_per_hour=1.0), 2)
RULE = ThresholdRule("gpu_utilization", above=80, below=None, samples=1, query="avg(DCGM_FI_DEV_GPU_UTIL)")
POLICY = Policy("threshold", max_nodes=4, stabilization_s=0.0, rules=(RULE,))
METRICS = (RULE.needed,)


def answering(answer, url=URL, **more):
    """A server that gives *answer* to every query, or calls it."""
    handle = answer if callable(answer) else lambda _request: answer
    return Prometheus(HttpServer(url), transport=httpx.MockTransport(handle), **more)


def vector(*values):
    """Return an answer of this many series."""
    result = [{"metric": {}, "value": [0, value]} for value in values]
    return httpx.Response(200, json={"data": {"resultType": "vector", "result": result}})


def away(request):
    """Fail as when no server listens."""
    raise httpx.ConnectError("[Errno 111] Connection refused", request=request)


def hanging(request):
    """Return an answer that never arrives."""
    raise httpx.ReadTimeout("timed out", request=request)


class Drip(httpx.SyncByteStream):
    """One byte per second, by the clock that the test reads."""

    def __init__(self):
        """Begin at 0."""
        self.now = 0.0

    def __iter__(self):
        """Never ends."""
        while True:
            self.now += 1.0
            yield b" "


BAD = {
    "away": (away, "does not answer: .* refused"),
    "hangs": (hanging, "does not answer: timed out"),
    "fails": (httpx.Response(500, text="boom"), "answers 500: boom"),
    "wants a token": (httpx.Response(401, json={"error": "who are you"}), "answers 401: who are you"),
    "leads elsewhere": (httpx.Response(302, headers={"location": "http://x"}), "answers 302"),
    "refuses": (httpx.Response(400, json={"error": "parse error"}), "parse error"),
    "is a page": (httpx.Response(200, text="<html>"), "this is not an answer of Prometheus"),
    "is a list": (httpx.Response(200, json=[1]), "this is not an answer of Prometheus"),
    "is nested": (httpx.Response(200, text="[" * 100_000), "this is not an answer of Prometheus"),
    "is long": (httpx.Response(200, content=b" " * (10 << 20)), "answers more than 4 MiB"),
    "is a matrix": (
        httpx.Response(200, json={"data": {"resultType": "matrix", "result": []}}),
        "answers a matrix",
    ),
    "is too much": (vector(10**400), "this is not an answer of Prometheus"),
    "has no series": (vector(), "no number"),
    "has no number": (vector("NaN", "+Inf", "-Inf"), "no number"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_answer_keeps_the_stage_and_says_whose_it_was(case):
    """Query and server are named without the password, and the recorded check repeats the reason."""
    answer, why = BAD[case]
    answers = ask_metrics(METRICS, answering(answer).known, at_s=10.0)

    seen = Observation(current=HERE, elapsed_s=10.0, samples=answers.samples, unknown=answers.unknown)
    decision = decide(seen, POLICY)
    check = Check.from_dict(json.loads(json.dumps(Check(seen, POLICY, decision).to_dict())))

    assert decision.action == "keep"
    assert decision.reason.startswith(f"gpu_utilization is unknown: query '{RULE.query}': {SHOWN}: ")
    assert re.search(why, decision.reason)
    assert "pw-12345" not in json.dumps(check.to_dict())
    assert replay(check) == check.decision
    assert decision.reason in explain(check)


def test_an_answer_that_drips_is_given_up():
    """Each byte arrives in time; the complete answer does not."""
    drip = Drip()

    with pytest.raises(BackendError, match="no whole answer within 5 s") as caught:
        answering(httpx.Response(200, stream=drip), monotonic=lambda: drip.now).values("up")

    assert caught.value.transient
    assert drip.now < 8


def test_a_long_answer_is_not_read_to_its_end():
    """Reading stops soon after the size limit."""
    read = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self):
            while True:
                read.append(1)
                yield b" " * (1 << 20)

    with pytest.raises(BackendError, match="more than 4 MiB"):
        answering(httpx.Response(200, stream=Endless())).values("up")

    assert len(read) == (MOST_BYTES >> 20) + 1


def test_numbers_are_read_and_the_user_is_told_to_the_server_alone():
    """User and password of the URL become a header."""
    seen = []

    def answer(request):
        seen.append(request)
        return vector("90", "NaN", "70")

    assert answering(answer, "http://ann:pw-12345@prometheus:9090/prom/").values("up") == (90.0, 70.0)
    assert seen[0].url.path == "/prom/api/v1/query"
    assert seen[0].url.params["query"] == "up"
    assert seen[0].headers["authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://u:p@h:1/x?token=t#f", "https://h:1/x"),
        ("http://[::1", "prometheus"),
        ("http://u:p@h:pw-12345", "prometheus"),
    ],
)
def test_a_url_is_shown_without_what_is_secret(url, text):
    """An invalid URL is not shown at all."""
    assert shown(url) == text


def test_a_url_that_is_none_is_told_without_it():
    """The text after the colon might be a password."""
    with pytest.raises(SpecError, match=r"\Aprometheus: this is not the URL"):
        Prometheus(HttpServer("http://h:pw-12345")).values("up")


@pytest.mark.parametrize(
    ("url", "token"), [("http://p:9090", "pässwörd"), (f"http://{300 * 'a'}.x", "t")], ids=["token", "host"]
)
def test_what_cannot_be_sent_fails_the_query_and_shows_no_token(url, token):
    """A header is ASCII, and a label of a host has no more than 63 letters."""
    server = Prometheus(HttpServer(url, headers={"Authorization": f"Bearer {token}"}))

    with pytest.raises(SpecError, match="has letters that cannot be sent") as told:
        server.values("up")

    assert told.value.__suppress_context__
    assert "pässwörd" not in str(told.value)


def test_numbers_beyond_all_sense_are_none():
    """Their mean would not be a float, and the check would end in an error."""
    answers = ask_metrics(METRICS, answering(vector("1.7e308", "1.7e308")).known, at_s=10.0)

    assert answers.samples == ()
    assert list(answers.unknown.values()) == [f"query '{RULE.query}': it answers no finite number"]


def test_a_query_stands_over_what_nodes_report_under_the_name():
    """Nodes report 10 % and the query returns 95: one more node."""
    nodes = tuple(Sample(10.0, node, "gpu0_utilization_percent", 10.0) for node in range(2))
    answers = ask_metrics(METRICS, lambda _query: (95.0,), at_s=10.0)

    seen = Observation(current=HERE, elapsed_s=10.0, samples=(*nodes, *answers.samples))

    assert decide(seen, POLICY).target.nodes == 3


def test_a_query_that_fails_now_leaves_nothing_to_what_it_answered_before():
    """An earlier number does not count as a current one."""
    before = ask_metrics(METRICS, lambda _query: (95.0,), at_s=10.0)
    after = ask_metrics(METRICS, answering(away).known, at_s=20.0)
    seen = Observation(current=HERE, elapsed_s=20.0, samples=before.samples)

    assert decide(seen, POLICY).action == "move"
    assert decide(replace(seen, unknown=after.unknown), POLICY).action == "keep"


def test_a_query_is_asked_once_and_a_server_that_is_away_is_not_waited_for_again():
    """Two rules of one query, and one rule of another."""
    metrics = tuple(
        ThresholdRule("load", query=query, across=across).needed
        for query, across in [("a", "mean"), ("a", "max"), ("b", "mean")]
    )
    asked = []

    def known(query):
        asked.append(query)
        if query == "b":
            raise SpecError("b is none")
        return (1.0, 3.0)

    def gone(query):
        asked.append(query)
        raise BackendError("away", transient=True)

    answers = ask_metrics(metrics, known, at_s=1.0)
    nothing = ask_metrics(metrics, gone, at_s=1.0)

    assert [(item.metric, item.value) for item in answers.samples] == [("mean of a", 2.0), ("max of a", 3.0)]
    assert answers.unknown == {"mean of b": "query 'b': b is none"}
    assert asked == ["a", "b", "a"]
    assert not nothing.samples
    assert sorted(nothing.unknown) == ["max of a", "mean of a", "mean of b"]


@pytest.fixture
def made(monkeypatch):
    """Return the arguments of the servers that were queried."""
    found = []

    class Fake:
        def __init__(self, server):
            found.append(server)

        def known(self, query):
            return (1.0,)

    monkeypatch.setattr(prometheus, "Prometheus", Fake)
    yield found
    reset_secrets_masker()


def test_the_setting_names_the_server_and_a_connection_goes_over_it(monkeypatch, made):
    """Login and password, a password alone as a token, a host with its scheme."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__PROMETHEUS_URL", "http://setting:9090")
    connections = {
        "BASIC": {"conn_type": "http", "host": "p", "port": 9090, "login": "ann", "password": "pw-12345"},
        "TOKEN": {"conn_type": "http", "host": "https://p/prom", "password": "pw-12345"},
    }
    for name, body in connections.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(body))

    for conn_id in (None, "basic", "token"):
        assert asks(conn_id)("up") == (1.0,)

    assert made == [
        HttpServer("http://setting:9090"),
        HttpServer("http://p:9090", ("ann", "pw-12345")),
        HttpServer("https://p/prom", headers={"Authorization": "Bearer pw-12345"}),
    ]


def test_no_server_and_no_such_connection_fail_the_query_alone(monkeypatch):
    """They are looked up at the first query, and the message names what to set."""
    monkeypatch.delenv("AIRFLOW__ENVSCALER__PROMETHEUS_URL", raising=False)
    monkeypatch.setenv("AIRFLOW_CONN_EMPTY", '{"conn_type": "http"}')

    with pytest.raises(SpecError, match=r"set \[envscaler\] prometheus_url"):
        asks()("up")
    with pytest.raises(SpecError, match="'no-such'"):
        asks("no-such")("up")
    with pytest.raises(SpecError, match="'empty' names no host"):
        asks("empty")("up")
