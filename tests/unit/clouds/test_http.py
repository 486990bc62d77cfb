"""HTTP to clouds: silence, trickles, floods and nonsense, on the test's own clock."""

from __future__ import annotations

import httpx
import pytest

from envscaler_airflow.clouds import Access
from envscaler_airflow.clouds.azure import AzurePrices
from envscaler_airflow.clouds.gcp import GcpPrices
from envscaler_airflow.clouds.http import PAGE_BYTES, PAGE_S, TIMEOUT_S, Caller
from envscaler_airflow.errors import BackendError


class Clock:
    """Seconds that pass when a test moves them."""

    def __init__(self):
        """Start at 0."""
        self.now = 0.0
        self.slept = []

    def __call__(self):
        """Now."""
        return self.now

    def sleep(self, seconds):
        """Advance the time."""
        self.slept.append(seconds)
        self.now += seconds


def ask(answer, clock=None):
    """The JSON of one page of *answer*, or the error."""
    clock = clock or Clock()
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return Caller(client, sleep=clock.sleep, clock=clock).json("https://cloud.test/prices", "Prices")


def test_silence_is_an_error_that_may_pass():
    """A connection without data until the timeout."""

    def silent(request):
        raise httpx.ReadTimeout("timed out", request=request)

    clock = Clock()
    with pytest.raises(BackendError, match=r"no answer within 20 s: timed out") as caught:
        ask(silent, clock)

    assert caught.value.transient
    assert clock.slept == []  # it was waited for long enough
    assert TIMEOUT_S < 30


@pytest.mark.parametrize("link", ["https://cloud.test/\n", 5, ["x"]])
def test_a_next_page_that_is_no_address_is_an_error(link):
    """The region is skipped, and its last good prices apply."""
    with httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"Items": [], "NextPageLink": link}))
    ) as client:
        feed = AzurePrices(Access(endpoint_url="https://cloud.test/prices"), caller=Caller(client))
        with pytest.raises(BackendError, match="is not a valid URL"):
            feed.fetch("eastus")


def test_a_client_of_its_own_waits_no_longer():
    """This applies to connecting and to each read."""
    with Caller() as caller:
        assert caller._client.timeout == httpx.Timeout(TIMEOUT_S)


def test_a_page_that_trickles_is_given_up():
    """A byte every 19 s keeps a connection alive, but does not extend the wait indefinitely."""
    clock = Clock()

    def trickle():
        while True:
            clock.now += 19
            yield b" "

    with pytest.raises(BackendError, match="not there after 60 s") as caught:
        ask(lambda _: httpx.Response(200, content=trickle()), clock)

    assert caught.value.transient
    assert PAGE_S < clock.now < PAGE_S + 20


def test_a_flood_is_given_up():
    """More bytes than any page has."""
    read = 0

    def flood():
        nonlocal read
        while True:
            read += 1 << 20
            yield b" " * (1 << 20)

    with pytest.raises(BackendError, match="more than 64 MiB") as caught:
        ask(lambda _: httpx.Response(200, content=flood()))

    assert not caught.value.transient
    assert read <= PAGE_BYTES + (1 << 20)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_asked_again_after_a_pause(status):
    """It is retried twice; the third answer counts."""
    answers = [httpx.Response(status), httpx.Response(status), httpx.Response(200, json={"ok": True})]
    clock = Clock()

    assert ask(lambda _: answers.pop(0), clock) == {"ok": True}
    assert clock.slept == [1.0, 2.0]


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404])
def test_a_refusal_is_asked_once(status):
    """A retry would not help; the error quotes the cloud."""
    seen = []

    def refuse(request):
        seen.append(request)
        return httpx.Response(status, content=b"\xffno " + b"x" * 1000)

    with pytest.raises(BackendError, match=f"Prices answered {status}: .no x") as caught:
        ask(refuse)

    assert (caught.value.status, caught.value.transient) == (status, False)
    assert len(seen) == 1
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "body",
    [b"", b'{"Items": [', b"<html>", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "torn", "page", "binary", "deep"],
)
def test_what_is_no_json_is_an_error(body):
    """Half an answer is never used."""
    with pytest.raises(BackendError, match="not complete JSON"):
        ask(lambda _: httpx.Response(200, content=body))


def test_a_key_is_in_no_address():
    """The HTTP client and proxies log the addresses of requests."""
    seen = []

    def answer(request):
        seen.append(request)
        return httpx.Response(200, json={"skus": []})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        GcpPrices(Access(secret="secret-key"), caller=Caller(client), kinds=[]).fetch("us-central1")

    assert seen[0].headers["X-Goog-Api-Key"] == "secret-key"
    assert "secret-key" not in str(seen[0].url)


def test_a_key_follows_no_redirect():
    """Another host must not receive it."""
    with Caller() as caller:
        assert not caller._client.follow_redirects
