"""Unit tests of the page: what it reads and draws, and that text of a run stays text."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_agent.protocol import Progress, Status, Transfer, claim_name, status_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.plugin import charts
from envscaler_airflow.plugin import page as page_module
from envscaler_airflow.plugin.charts import Axis
from envscaler_airflow.plugin.page import MOST_TEXT, POLICY, message_page, moment, run_page, shown
from envscaler_airflow.plugin.page_facts import (
    MOST_CHUNKS,
    MOST_NODES,
    Rate,
    read_facts,
    speeds,
)
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import AttemptEnded, Failed, MoveRefused, NewGeneration, read_body
from envscaler_airflow.store import events as store_events
from envscaler_airflow.store import open_store
from envscaler_airflow.store.run import Run, spec_name

RECORDED = Path(__file__).parents[2] / "compat/schema-2/run"
EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\u202e\0"
HANDLE = {"backend": "local", "name": "a"}
ACTOR = Actor("ti", 1, 3)
NAMED = {"cloud": "local", "region": "", "capacity_type": "on-demand", "vcpus": 1.0, "memory_gib": 4.0}
CPU = Allocation(Offer(**NAMED, instance_type="cpu-1", usd_per_hour=0.36))


class Elements(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page):
        """Read *page*."""
        super().__init__()
        self.tags, self.attributes, self.words, self.open = set(), [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        """Keep its name and attributes."""
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        """Keep the text."""
        self.words.append(data)

    @property
    def text(self):
        """Return all text on one line."""
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def recorded(tmp_path):
    """A store with the run of an earlier release."""
    shutil.copytree(RECORDED, tmp_path / "recorded/run")
    return open_store(str(tmp_path / "recorded"))


def begin(store, *, allocation=CPU, reason="first attempt of the generation", number=1):
    """Begin a run with one attempt that has started, and return its log."""
    log = Run(store, "run", clock=lambda: 1000.0).events
    if number == 1:
        log.append(0, NewGeneration(generation=1, spec_hash="h"), actor=ACTOR)
    body = {"generation": 1, "attempt": number, "allocation": allocation.to_dict(), "reason": reason}
    log.append_request(read_body("attempt-intended", body), actor=ACTOR)
    log.append_request(
        read_body("attempt-started", {"generation": 1, "attempt": number, "handle": HANDLE}), actor=ACTOR
    )
    return log


def say(store, text, *, node=0, attempt=1):
    """Write a node's status."""
    store.write(f"run/{status_name(1, attempt, node)}", text)


def test_a_recorded_run_is_told_whole(recorded):
    """Attempts, their machines, speed, decisions with reasons, cost and its breakdown."""
    page = Elements(run_page(read_facts(Run(recorded, "run")), now=2e9)).text

    for words in (
        "Training: succeeded",
        "step 900 of 900",
        "1 local/cpu-1 $0.0662",
        "0 to 120 $0.000252 moved",
        "120 to 900 $0.00301 succeeded",
        "move requested to local/cpu-2 local/cpu-2 saves $0.85 of $2.24",
        "move accepted to local/cpu-2",
        "keep local/cpu-2 cool-down: 9 s of 10 s since the last move 8 times",
        "compute $0.00311",
        "provisioning $0.0000577",
        "local/cpu-1 would have cost $0.00171: this run cost $0.00155 more",
    ):
        assert words in page, words


def _two_pods(store):
    """Node 0 reported 10 s and was replaced; the second pod reports its own first seconds."""
    for claim in (1, 2):
        lines = b'{"t": 0, "step": 0}\n{"t": 10, "step": 50}\n'
        store.write(f"run/metrics/g1-a1-n0-c{claim}-000001.jsonl", lines)
        store.create(f"run/{claim_name(1, 1, 0, claim)}", b"{}")


@pytest.mark.parametrize(("dated", "at"), [(1600.0, 1605.0), (9e9, 1015.0), (None, 1015.0)])
def test_the_speed_of_a_replaced_pod_is_shown_when_it_trained(store, monkeypatch, dated, at):
    """It counts from its claim; in a copied store, or without times, from the pod before it (D14)."""
    begin(store)
    _two_pods(store)
    log = Run(store, "run", clock=lambda: 2000.0).events
    log.append_request(AttemptEnded(generation=1, attempt=1, outcome="failed"), actor=ACTOR)
    read = type(store).read_dated

    def read_dated(self, name, **more):
        found = read(self, name, **more)
        return (found[0], dated) if found is not None and "/claims/" in name else found

    monkeypatch.setattr(type(store), "read_dated", read_dated)
    facts = read_facts(Run(store, "run"))

    assert [rate.at for rate in facts.rates] == [1005.0, at]


def test_speed_is_told_on_the_owners_clock(recorded):
    """Node 0's own seconds, counted from when the owner saw its attempt start; two lines for two attempts."""
    facts = read_facts(Run(recorded, "run"))
    first, second = facts.state.attempts

    assert facts.unit == "samples"
    assert {rate.attempt for rate in facts.rates} == {1, 2}
    assert all(first.started_at <= rate.at <= first.ended_at for rate in facts.rates if rate.attempt == 1)
    assert all(35 < rate.per_s < 45 for rate in facts.rates if rate.attempt == 2)
    assert second.started_at < facts.rates[-1].at < second.ended_at


def test_the_folder_is_only_read(recorded, tmp_path, monkeypatch):
    """No snapshot (due every 5 events here) and no check: reading writes nothing."""
    monkeypatch.setattr(store_events, "SNAPSHOT_EVERY", 5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    run_page(read_facts(Run(recorded, "run")), now=2e9)

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_no_run_is_none(store):
    """A task that is not a stage, or a stage that has not begun."""
    store.write("deployment.json", b"{}")

    assert read_facts(Run(store, "run")) is None


def test_a_run_that_lives_asks_again_and_one_that_is_over_does_not(store, recorded):
    """A live page reloads every 15 seconds."""
    begin(store)

    live, over = (
        run_page(read_facts(Run(store, "run")), now=1060),
        run_page(read_facts(Run(recorded, "run")), now=2e9),
    )

    assert '<meta http-equiv="refresh" content="15">' in live
    assert "http-equiv" not in over
    assert "Training: active" in live


def test_a_live_attempt_costs_what_it_was_held_for(store):
    """0.36 USD an hour for a minute by the owner's clock."""
    begin(store)

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "cost $0.006" in text
    assert "time 1 min" in text


def test_an_attempt_that_was_changed_in_place_is_told_whole(store):
    """An hour at 0.36 USD and one at 0.72: its resources, each price, and the cost of both."""
    begin(store)
    larger = Allocation(Offer(**NAMED, instance_type="cpu-2", usd_per_hour=0.72))
    log = Run(store, "run", clock=lambda: 1000.0 + 3600).events
    what = {"generation": 1, "attempt": 1, "kind": "resize", "target": larger.to_dict()}
    log.append_request(
        read_body("move-requested", {"target": larger.to_dict(), "reason": "faster"}), actor=ACTOR
    )
    log.append_request(read_body("change-intended", {**what, "request": 4, "reason": "faster"}), actor=ACTOR)
    log.append_request(read_body("changed", what), actor=ACTOR)

    facts = read_facts(Run(store, "run"))
    text = Elements(run_page(facts, now=1000.0 + 7200)).text
    drawn = charts.lanes(facts.state.attempts, charts.Axis(1000.0, 8200.0), now=8200.0)

    assert "1 local/cpu-1 then local/cpu-2 $0.3600 then $0.7200 1970" in text
    assert text.count("$1.08") == 2  # of the run, and of its attempt
    assert "move requested to local/cpu-2 faster" in text
    assert "change in place to local/cpu-2 faster" in text
    assert drawn.names == ("local/cpu-1", "local/cpu-2")
    assert [(bar.lane, bar.x, bar.end_x, bar.kind) for bar in drawn.bars] == [
        (0, 150.0, 555.0, "moved"),
        (1, 555.0, 960.0, "live"),
    ]


def test_where_each_price_of_a_mixed_allocation_is_from_is_reported(store):
    """An hour of one node on demand and one on spot, whose prices come from two price lists."""
    spot = {**NAMED, "capacity_type": "spot"}
    core = Offer(**NAMED, instance_type="cpu-1", usd_per_hour=0.36, price_source="the list")
    rest = Offer(**spot, instance_type="cpu-1", usd_per_hour=0.12, price_source="the market")
    begin(store, allocation=Allocation(core, 2, rest=rest, rest_nodes=1))

    text = Elements(run_page(read_facts(Run(store, "run")), now=1000.0 + 3600)).text

    assert "cost $0.48" in text
    assert "Price: the list Price: the market" in text


def test_what_is_not_known_is_said_to_be(store):
    """No status, no price, no step: the page says "unknown", never zero."""
    free = Allocation(Offer(**NAMED, instance_type="cpu-1"))
    begin(store, allocation=free)

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "step unknown" in text
    assert "local/cpu-1 unknown" in text
    assert "What the money went to is not known yet." in text


def test_the_parameters_that_a_run_was_made_with_are_reported(store):
    """They come from its frozen spec; their text stays text (F14)."""
    begin(store)
    body = {"parameters": {"rate": 0.5, "note": "<b>x</b>"}}
    store.write(f"run/{spec_name('h')}", json.dumps(body).encode())

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "Parameters note <b>x</b> rate 0.5" in text


@pytest.mark.parametrize("spec", [b"{", b"[]", b'{"parameters": 3}'])
def test_a_spec_that_cannot_be_read_hides_nothing_else(store, spec):
    """The page then shows no parameters."""
    begin(store)
    store.write(f"run/{spec_name('h')}", spec)

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "Parameters" not in text
    assert "local/cpu-1" in text


def test_the_newest_word_of_a_node_is_reported(store):
    """Step, speed, loss and GPUs."""
    begin(store)
    progress = Progress(step=7, total_steps=10, loss=0.25, samples_per_s=12.5)
    usage = {"gpu0_utilization_percent": 93.0, "gpu0_power_watts": 300.0, "cpu_percent": 80.0}
    status = Status(generation=1, attempt=1, phase="running", progress=progress, usage=usage)
    say(store, status.to_json())

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "step 7 of 10" in text
    assert "now 12.5 samples/s loss 0.25" in text
    assert "running, ok, step 7, cpu 80 %, gpu0 93 %" in text


def test_how_far_a_transfer_is_is_reported(store):
    """Beside the phase (F6)."""
    begin(store)
    moving = Transfer("restoring", "checkpoint 440", 12, 100)
    say(store, Status(generation=1, attempt=1, phase="restoring", transfer=moving).to_json())

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "restoring, restoring checkpoint 440: 12 % of 100 bytes, ok" in text


HARMLESS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "code", "bdi", "dl", "div"),
    *("dt", "dd", "figure", "figcaption", "svg", "g", "line", "text", "rect", "polyline", "table", "thead"),
    *("tbody", "tr", "th", "td", "ul", "li"),
}


def hostile(store, words):
    """A run in which every text is *words*."""
    offer = Offer(**NAMED, instance_type=words, usd_per_hour=1.0, price_source=words)
    allocation = Allocation(offer)
    log = begin(store, allocation=allocation, reason=words)
    status = Status(
        generation=1,
        attempt=1,
        message=words,
        transfer=Transfer(words, words, 1, 2),
        progress=Progress(step=1, phase=words),
        usage={f"{words}_utilization_percent": 1.0},
    )
    say(store, status.to_json())
    request = log.append_request(
        read_body("move-requested", {"target": allocation.to_dict(), "reason": words, "numbers": {}})
    )
    log.append_request(MoveRefused(request=request.number, reason=words), actor=ACTOR)
    body = {"generation": 1, "attempt": 1, "outcome": "failed", "detail": words, "last_lines": [words]}
    log.append_request(read_body("attempt-ended", body), actor=ACTOR)
    log.append_request(Failed(generation=1, reason=words), actor=ACTOR)
    return run_page(read_facts(Run(store, "run")), now=1060)


def test_words_of_a_run_stay_words(store):
    """Machine, reason, message, detail, price source: no tag, no attribute, no invisible character."""
    page = hostile(store, EVIL)
    elements = Elements(page)

    assert elements.tags == HARMLESS - {"polyline", "ul", "li"}
    assert [name for name, _ in elements.attributes if name.startswith("on")] == []
    assert "\u202e" not in page
    assert "\0" not in page
    assert page.count("&lt;script&gt;") >= 6


@settings(max_examples=30)
@given(words=st.text(min_size=1, max_size=60))
def test_no_text_at_all_makes_a_tag(tmp_path_factory, words):
    """The name of the run does not matter."""
    elements = Elements(hostile(open_store(str(tmp_path_factory.mktemp("store"))), words))

    assert elements.tags <= HARMLESS
    assert [name for name, _ in elements.attributes if name.startswith("on") or name in ("href", "src")] == []


def test_messages_are_escaped_too():
    """An error may quote unreadable content."""
    assert Elements(message_page("Broken", EVIL)).tags == {
        *("html", "head", "meta", "title", "style", "body", "h1", "p", "bdi")
    }


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[1]",
        b'{"t": 1, "step": "x"}',
        b'{"t": 1e999, "step": 5}',
        b'{"t": 1, "step": NaN}',
        b'{"t": true, "step": 5}',
        b'{"t": 1, "step": ' + b"9" * 400 + b"}",
        b'{"step": ' + b"[" * 5000,
        b'{"t": -5, "step": -1}',
        b'\xff\xfe{"step": 1}',
    ],
)
def test_a_metric_that_is_none_is_left_out(store, line):
    """The training's side wrote it: the rest is still shown."""
    begin(store)
    good = b'{"t": 1, "step": 10}\n{"t": 3, "step": 30}\n'
    store.write("run/metrics/g1-a1-n0-c1-000001.jsonl", line + b"\n" + good)
    store.write("run/metrics/what-is-this", b"?")

    facts = read_facts(Run(store, "run"))

    assert facts.rates == (Rate(attempt=1, at=1002.0, per_s=10.0),)
    assert facts.unit == "steps"
    assert "<polyline" in run_page(facts, now=1060)


@pytest.mark.parametrize(("t", "step"), [(1e-300, 1e300), (1.0, 1e300), (1e300, 1e-20), (1e300, 5e-324)])
def test_a_speed_that_no_chart_holds_is_left_out(t, step, store):
    """Counts and times from the training's side, each a number, whose quotient is not one."""
    begin(store)
    lines = f'{{"t": 0, "step": 0}}\n{{"t": {t}, "step": {step}}}\n'
    store.write("run/metrics/g1-a1-n0-c1-000001.jsonl", lines.encode())

    assert "Training: active" in run_page(read_facts(Run(store, "run")), now=1060)


def test_a_status_that_is_none_is_left_out(store):
    """Torn, or of another version."""
    begin(store)
    say(store, b'{"schema": "9.0"}')

    assert read_facts(Run(store, "run")).statuses == (None,)
    assert "Training: active" in run_page(read_facts(Run(store, "run")), now=1060)


def test_a_run_whose_events_are_broken_says_so(recorded):
    """The page invents nothing from an incomplete record."""
    recorded.write("run/events/000003.json", b'{"schema": "2.0", "number": 3}')

    with pytest.raises(ProtocolError, match=r"000003\.json"):
        read_facts(Run(recorded, "run"))


def test_a_long_run_is_read_in_part(store):
    """Ten hours of five-minute chunks: the page reads 24 of 120, including the first and the last."""
    begin(store)
    for number in range(1, 121):
        t = number * 300
        lines = [{"t": t, "step": t}, {"t": t + 100, "step": t + 100}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        store.write(f"run/metrics/g1-a1-n0-c1-{number:06d}.jsonl", text.encode())
    read = []
    original = store.read

    class Counting:
        """A store that counts reads."""

        def __getattr__(self, name):
            """Return every other attribute of the store."""
            return getattr(store, name)

        def read(self, name, **options):
            """Count the read."""
            read.append(name)
            return original(name, **options)

    facts = read_facts(Run(Counting(), "run"))

    chunks = [name for name in read if "/metrics/" in name]
    assert len(chunks) == MOST_CHUNKS
    assert chunks[0].endswith("000001.jsonl")
    assert chunks[-1].endswith("000120.jsonl")
    assert len(facts.rates) == MOST_CHUNKS


def test_a_large_chunk_and_a_large_cluster_are_cut(store):
    """It skips a chunk larger than the agent writes, and reads 16 of 500 nodes."""
    begin(store, allocation=Allocation(CPU.offer, nodes=500))
    store.write("run/metrics/g1-a1-n0-c1-000001.jsonl", b'{"t": 1, "step": 1}\n' * 100_000)

    facts = read_facts(Run(store, "run"))

    assert facts.rates == ()
    assert len(facts.statuses) == MOST_NODES
    assert "484 more nodes are not shown" in run_page(facts, now=1060)


def test_a_page_has_an_end(store, monkeypatch):
    """Attempts with endless reasons: the newest ones (3 here), each cut."""
    monkeypatch.setattr(page_module, "MOST_ATTEMPTS", 3)
    log = Run(store, "run", clock=lambda: 1000.0).events
    log.append(0, NewGeneration(generation=1, spec_hash="h"), actor=ACTOR)
    for number in range(1, 9):
        body = {"generation": 1, "attempt": number, "allocation": CPU.to_dict(), "reason": "x" * 50_000}
        log.append(2 * number - 1, read_body("attempt-intended", body), actor=ACTOR)
        log.append(2 * number, AttemptEnded(generation=1, attempt=number, outcome="lost"))

    page = run_page(read_facts(Run(store, "run")), now=1060)

    assert "5 earlier attempts are not shown" in page
    assert len(page) < 30_000
    assert "x" * (MOST_TEXT + 1) not in page


def test_a_clear_begins_the_page_again(store):
    """The page shows and bills only attempts of the current generation."""
    log = begin(store)
    log.append_request(AttemptEnded(generation=1, attempt=1, outcome="failed"), actor=ACTOR)
    log.append_request(NewGeneration(generation=2, spec_hash="h"), actor=ACTOR)

    text = Elements(run_page(read_facts(Run(store, "run")), now=1060)).text

    assert "attempts 0 generation 2" in text
    assert "None has begun yet." in text


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], []),
        ([(0.0, 5.0)], []),
        ([(0.0, 0.0), (10.0, 20.0)], [(5.0, 2.0)]),
        ([(0.0, 50.0), (10.0, 20.0)], []),
        ([(5.0, 1.0), (5.0, 2.0)], []),
        ([(0.0, None), (10.0, 20.0)], []),
    ],
)
def test_speed_is_growth_over_time(counts, expected):
    """A count that fell, or a zero time, gives no speed."""
    assert speeds(counts) == expected


def test_time_has_round_ticks():
    """An hour and a half: every quarter; two years: whole days; a second: at least that."""
    assert [label for _, label in Axis(0.0, 5400.0).ticks()] == [
        *("0 s", "15 min", "30 min", "45 min", "1 h", "1 h 15 min", "1 h 30 min")
    ]
    assert [label for _, label in Axis(0.0, 730 * 86400.0).ticks()][1] == "122 d"
    assert charts.time_axis((), now=0) is None


def test_marks_stay_on_the_chart(recorded):
    """Also marks after its end, from another clock."""
    facts = read_facts(Run(recorded, "run"))
    axis = charts.time_axis(facts.state.attempts, now=2e9)
    drawn = charts.curve([Rate(1, 0.0, 5.0), Rate(1, 9e9, 7.0)], axis)

    assert drawn.lines == ("150,78 960,50",)
    assert [label for _, label in drawn.ticks] == ["0", "5", "10"]
    assert charts.curve([], axis) is None


def test_text_is_cut_and_plain():
    """600 letters, no control characters."""
    assert shown("a\nb\x1b[31m") == "a b [31m"
    assert shown("x" * 10_000) == "x" * MOST_TEXT + "..."
    assert moment(1e300) == "unknown"


def test_the_style_is_the_only_thing_that_the_policy_allows():
    """The hash covers exactly the text between the tags."""
    [style] = re.findall(r"<style>(.*?)</style>", message_page("a", "b"), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    assert f"style-src 'sha256-{digest}'" in POLICY
    assert POLICY.startswith("default-src 'none'; ")
    assert "script-src" not in POLICY


@pytest.mark.parametrize("status", ["active", "stopped", "failed"])
def test_a_part_of_the_work_is_not_compared_with_the_whole(status, recorded, tmp_path):
    """It cost less because it did less."""
    for name in ("000010.json", "000011.json"):
        (tmp_path / "recorded/run/events" / name).unlink()
    log = begin(recorded, number=3)
    if status != "active":
        end = {"generation": 1, "attempt": 3, "outcome": "failed", "usage": [[0, 1000.0, 1001.0]]}
        log.append_request(read_body("attempt-ended", end), actor=ACTOR)
        log.append_request(read_body(status, {"generation": 1, "reason": "asked for"}), actor=ACTOR)

    text = Elements(run_page(read_facts(Run(recorded, "run")), now=2e9)).text

    assert f"Training: {status}" in text
    assert "local/cpu-1 would have cost $0." in text
    assert "this run cost" not in text
