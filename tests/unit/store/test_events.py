"""The event log: numbers, races, lost answers, snapshots."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import MAX_EVENT_BYTES, Actor, Event, RunState, fold
from envscaler_airflow.run.event_bodies import NewOwner, StopRequested, read_body
from envscaler_airflow.store import EventLog, open_store
from envscaler_airflow.store import events as module
from envscaler_airflow.store.events import event_name, snapshot_name
from envscaler_airflow.store.run import Run

EVERY = 50
ACTOR = Actor("ti-1", 1, 3)
OFFER = Offer("local", "", "cpu-1", "on-demand", vcpus=1, memory_gib=0.5, usd_per_hour=0.04)
BEGIN = ("generation", {"generation": 1, "spec_hash": "a"})


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """A snapshot after every 50 events instead of 500, so that tests need fewer."""
    assert module.SNAPSHOT_EVERY == 500
    monkeypatch.setattr(module, "SNAPSHOT_EVERY", EVERY)


class Recorded:
    """A store that counts its calls and fails as scripted."""

    def __init__(self, store):
        """Pass every call to *store*."""
        self._store = store
        self.calls = []
        self.fail = {}

    def __getattr__(self, name):
        """Record the call, fail if scripted, and pass it on."""
        real = getattr(self._store, name)
        kind = "read" if name == "read_dated" else name
        if kind not in ("read", "write", "create", "size", "names", "children", "delete"):
            return real

        def call(*args, **kwargs):
            self.calls.append((kind, args[0]))
            failure = self.fail.get(kind)
            if failure is not None:
                return failure(*args, real=real, **kwargs)
            return real(*args, **kwargs)

        return call

    def count(self, *names):
        """How many calls of these names there were since the last count."""
        count = sum(1 for call, _ in self.calls if call in names)
        self.calls.clear()
        return count


@pytest.fixture
def store(tmp_path):
    """An empty recorded store that exists."""
    (tmp_path / "store").mkdir()
    return Recorded(open_store(str(tmp_path / "store")))


def log_of(store, writer=None, **options):
    """A log with a constant clock."""
    return EventLog(Run(store, "run", clock=lambda: 7.5), writer=writer, **options)


def attempts(count):
    """Events of a run with *count* attempts, three each, and an unknown one at the end."""
    bodies = [BEGIN]
    for number in range(1, count + 1):
        name = {"generation": 1, "attempt": number}
        bodies += [
            ("attempt-intended", {**name, "allocation": Allocation(OFFER).to_dict(), "candidates": ["x"]}),
            (
                "attempt-started",
                {**name, "handle": {"backend": "local", "name": "a", "details": {"pids": [1, 2]}}},
            ),
            ("attempt-ended", {**name, "outcome": "lost", "step": None, "usd": 0.5}),
        ]
    bodies += [("invented-later", {"deep": {"er": [1, 2.5, None]}})]
    return [
        Event(number, read_body(kind, body), "w", 7.5, ACTOR) for number, (kind, body) in enumerate(bodies, 1)
    ]


def write_events(store, events):
    """Write *events* to their places, without waiting for the disk."""
    folder = store._store.root / "run" / "events"
    folder.mkdir(parents=True)
    for event in events:
        (folder.parent / event_name(event.number)).write_bytes(event.to_json())


# Numbers and the content of a file


def test_the_first_event_is_number_one(store):
    """Its file contains number, type, time, writer, actor and body."""
    event = log_of(store, "me").append(0, read_body(*BEGIN), actor=ACTOR)

    assert event == Event(1, read_body(*BEGIN), "me", 7.5, ACTOR)
    assert json.loads(store.read("run/events/000001.json")) == {
        "schema": "2.0",
        "number": 1,
        "type": "generation",
        "writer": "me",
        "at": 7.5,
        "actor": {"ti_id": "ti-1", "try_number": 1, "max_tries": 3},
        "body": {"generation": 1, "reason": "", "spec_hash": "a"},
    }


def test_an_empty_log_is_no_run(store):
    """There are no events, and the state is the initial one."""
    assert log_of(store).read() == []
    assert log_of(store).load() == RunState()


def test_reading_goes_on_after_a_number(store):
    """Only later events are read."""
    log = log_of(store)
    first = log.append(0, read_body(*BEGIN))
    second = log.append(1, StopRequested())

    assert log.read() == [first, second]
    assert log.read(after=1) == [second]
    assert log.read(after=2) == []


def test_the_millionth_event_has_a_name_too(store):
    """Six digits are the minimum, not the maximum."""
    assert event_name(17) == "events/000017.json"
    assert event_name(1_234_567) == "events/1234567.json"


def test_absence_is_proven_by_reading_and_never_by_listing(store):
    """A listing of an object store may lag; this log never lists."""
    log = log_of(store)
    log.append(0, read_body(*BEGIN))
    log.append_request(StopRequested())
    log_of(store).load()

    assert store.count("names", "children") == 0


# Races and lost answers


def test_two_writers_at_one_number_have_one_winner(store):
    """The loser gets None, folds, and appends its next event later."""
    mine, other = log_of(store), log_of(store)
    first = mine.append(0, read_body(*BEGIN))

    won = mine.append(1, StopRequested(reason="mine"))
    lost = other.append(1, StopRequested(reason="theirs"))
    after = other.append(other.load().number, StopRequested(reason="theirs"))

    assert lost is None
    assert log_of(store).read() == [first, won, after]


def test_the_same_event_of_two_writers_is_won_once(store):
    """Equal body, equal time: the writer's uuid distinguishes them."""
    assert log_of(store).append(0, read_body(*BEGIN)) is not None
    assert log_of(store).append(0, read_body(*BEGIN)) is None


def written_then_lost(name, data, *, real):
    """The store keeps the object and loses the answer."""
    real(name, data)
    raise StoreError("answer lost", transient=True)


def test_a_lost_answer_after_writing_is_a_win(store):
    """The number is read back, and the event there is identical to ours."""
    store.fail["create"] = written_then_lost

    event = log_of(store).append(0, read_body(*BEGIN))

    assert log_of(store).read() == [event]


def test_exists_said_of_our_own_event_is_a_win(store):
    """Botocore repeats a PUT whose answer was lost, and S3 then returns 412 for our own object."""
    store.fail["create"] = lambda name, data, real: real(name, data) and False

    event = log_of(store).append(0, read_body(*BEGIN))

    assert log_of(store).read() == [event]


def test_a_lost_answer_before_writing_is_an_error(store):
    """It may still arrive: neither won nor lost."""

    def lost(_name, _data, *, real):
        raise StoreError("answer lost", transient=True)

    store.fail["create"] = lost

    with pytest.raises(StoreError, match="answer lost"):
        log_of(store).append(0, read_body(*BEGIN))


def test_a_conflict_without_an_event_is_tried_once_more(store):
    """S3 returns 409 while another writer is in progress; that one may have failed."""
    answers = [lambda *_: False, store._store.create]
    store.fail["create"] = lambda name, data, real: answers.pop(0)(name, data)

    event = log_of(store).append(0, read_body(*BEGIN))

    assert log_of(store).read() == [event]


def test_a_conflict_that_stays_is_an_error(store):
    """The store reports twice that it exists, and nothing is there."""
    store.fail["create"] = lambda *_args, real: False

    with pytest.raises(StoreError, match="was reported to exist and is absent") as caught:
        log_of(store).append(0, read_body(*BEGIN))
    assert caught.value.transient


def unreadable(*_args, real, **_kwargs):
    """The store is unavailable."""
    raise StoreError("away", transient=True)


def test_a_lost_answer_that_cannot_be_read_back_is_an_error(store):
    """The first error is the one shown."""
    store.fail = {"create": written_then_lost, "read": unreadable}

    with pytest.raises(StoreError, match="answer lost"):
        log_of(store).append(0, read_body(*BEGIN))


def test_an_unreadable_event_is_never_absent(store):
    """Reading, folding and finding the end all report that the result is unknown."""
    write_events(store, attempts(1))
    store.fail = {"read": unreadable, "size": unreadable}
    log = log_of(store)

    for call in [log.read, log.load, lambda: log.append_request(StopRequested())]:
        with pytest.raises(StoreError, match="away"):
            call()


def test_no_event_follows_one_that_is_absent(store):
    """A wrong number would leave a gap that hides everything after it."""
    with pytest.raises(ProtocolError, match=r"000003\.json is absent"):
        log_of(store).append(3, read_body(*BEGIN))
    assert log_of(store).read() == []


def test_a_request_finds_its_number_in_few_looks(store):
    """A thousand events, none known: at most 2 x 10 reads, one check and one create."""
    write_events(store, attempts(333))

    event = log_of(store).append_request(StopRequested(reason="r"))

    assert event.number == 1002
    assert store.count("read", "size", "create") <= 22
    assert log_of(store).read(after=1001) == [event]


def test_a_request_that_loses_tries_again(store):
    """An owner that appends at the same moment twice only delays it."""
    other = Run(store._store, "run", clock=lambda: 1.0).events
    other.append(0, read_body(*BEGIN))
    races = [1, 2]

    def overtaken(name, data, *, real):
        if races:
            other.append(races.pop(0), NewOwner(), actor=ACTOR)
        return real(name, data)

    store.fail["create"] = overtaken

    event = log_of(store).append_request(StopRequested())

    assert event.number == 4
    assert [item.type for item in log_of(store).read()] == ["generation", "owner", "owner", "stop-requested"]


class Memory:
    """A store whose creates fail as scripted."""

    url, at_once = "memory://", 1

    def __init__(self, faults):
        """Fail by *faults*, in order, then succeed."""
        self.files = {}
        self.faults = faults

    def read(self, name, *, max_bytes):
        """The stored content."""
        return self.files.get(name)

    def read_dated(self, name, *, max_bytes):
        """The stored content, without a date."""
        return (self.files[name], None) if name in self.files else None

    def now(self):
        """A constant clock."""
        return 0.0

    def size(self, name):
        """Its size."""
        return len(self.files[name]) if name in self.files else None

    def uri(self, name):
        """A name for messages."""
        return name

    def create(self, name, data):
        """Lose the request or the answer, or return "exists" for what was just written."""
        fault = self.faults.pop(0) if self.faults else "none"
        created = fault != "request lost" and name not in self.files
        if created:
            self.files[name] = data
        if fault in ("request lost", "answer lost"):
            raise StoreError(fault, transient=True)
        return created and fault != "repeated"


@given(
    turns=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20),
    faults=st.lists(st.sampled_from(["none", "request lost", "answer lost", "repeated"]), max_size=20),
)
def test_whatever_goes_wrong_each_win_stands_once_and_without_gaps(turns, faults):
    """Three writers in any order, current or not: exactly the writers that won are in the log."""
    store = Memory(faults)
    logs = [EventLog(store, writer=f"w{index}") for index in range(3)]
    known, won = [0, 0, 0], []
    for turn, (index, is_up_to_date) in enumerate(turns):
        log = logs[index]
        if is_up_to_date:
            known[index] = log.load().number
        try:
            event = log.append(known[index], read_body("noted", {"turn": turn}))
        except StoreError:
            continue
        if event is not None:
            known[index] = event.number
            won.append(event)

    stored = EventLog(store).read()

    assert stored == sorted(won, key=lambda event: event.number)
    assert [event.number for event in stored] == list(range(1, len(won) + 1))


# Sizes, versions, types


def test_an_event_is_at_most_256_kib(store):
    """A larger event is rejected before anything is written."""
    log = log_of(store)
    room = MAX_EVENT_BYTES - len(Event(1, read_body("x", {"text": ""}), log.writer, 7.5).to_json())

    with pytest.raises(ProtocolError, match=f"at most {MAX_EVENT_BYTES} are written"):
        log.append(0, read_body("x", {"text": "x" * (room + 1)}))
    assert log.read() == []
    assert log.append(0, read_body("x", {"text": "x" * room})) is not None
    assert log.load().number == 1


def test_a_file_that_is_too_large_is_refused_and_never_ours(store):
    """It is not read into memory; a writer that finds it there has lost the race."""
    store.write("run/events/000001.json", b" " * (MAX_EVENT_BYTES + 1))

    assert log_of(store).append(0, read_body(*BEGIN)) is None
    with pytest.raises(ProtocolError, match=f"at most {MAX_EVENT_BYTES} are read"):
        log_of(store).read()


def test_unknown_types_and_newer_minors_are_kept(store):
    """They count, and change only the list of unknown events."""
    text = b'{"schema":"2.9","number":1,"type":"invented","writer":"w","at":1,"body":{"a":1},"new":2}'
    store.write("run/events/000001.json", text)
    log = log_of(store)

    assert log.read() == [Event(1, read_body("invented", {"a": 1}), "w", 1.0)]
    assert log.load() == RunState(number=1, unknown=(1,))
    assert log.append(1, read_body(*BEGIN)).number == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b'{"schema":"3.0","number":1,"type":"x","body":{}}', "schema '3.0', this side uses"),
        (b'{"schema":"2.0","number":2,"type":"x","body":{}}', "says that it is event 2"),
    ],
)
def test_what_is_no_event_of_this_log_is_refused(store, text, says):
    """It is torn, of another major version, or copied from another number."""
    store.write("run/events/000001.json", text)

    for call in [log_of(store).read, log_of(store).load]:
        with pytest.raises(ProtocolError, match=says):
            call()


# Folding and snapshots


def test_a_second_load_reads_only_what_is_new(store):
    """One read when there is no new event, two when there is one."""
    write_events(store, attempts(3))
    log = log_of(store)
    log.load()
    store.calls.clear()

    log.load()
    assert store.count("read", "size") == 1
    Run(store._store, "run").events.append_request(StopRequested())
    assert log.load().number == 12
    assert store.count("read", "size") == 2


def test_a_state_with_snapshots_is_the_state_without(store):
    """122 events: two snapshots, and the next reader begins with the second."""
    events = attempts(40)
    write_events(store, events)

    first = log_of(store).load()
    store.calls.clear()
    second = log_of(store).load()

    assert first == second == fold(events)
    assert store.count("read") == 1 + 1 + 22 + 1  # the snapshot, its last event, the later ones, the end
    assert [name for name in store.names("run") if "snapshot" in name] == [
        "run/events/snapshot-000050.json",
        "run/events/snapshot-000100.json",
    ]


def test_a_reader_that_must_write_nothing_writes_nothing(store):
    """The pages inside Airflow use the snapshots of others."""
    write_events(store, attempts(20))

    assert log_of(store, snapshots=False).load().number == 62
    assert store.count("create", "write") == 0


def snapshot_of(events):
    """What another run's log would have written."""
    return module.pack_snapshot(fold(events), event=events[-1].to_json())


def bad_snapshots():
    """Name and bytes of invalid snapshots."""
    events = attempts(20)[:EVERY]
    good = snapshot_of(events)
    body = json.loads(good)
    other = [*events[:-1], Event(EVERY, StopRequested(reason="other run"), "w")]
    tampered = {**body, "state": {**body["state"], "spec_hash": "b"}}
    older = {key: value for key, value in {**body, "fold": "0.0.1"}.items() if key != "sha256"}
    return {
        "empty": b"",
        "torn": good[: len(good) // 2],
        "not an object": b"[1]",
        "null": b"null",
        "too deep": b"[" * 100_000,
        "of another run": snapshot_of(other),
        "of another number": snapshot_of(events[:40]),
        "changed": json.dumps(tampered).encode(),
        "of another version": json.dumps({**older, "sha256": module.digest(older)}).encode(),
    }


@pytest.mark.parametrize("which", bad_snapshots())
def test_a_snapshot_that_cannot_be_trusted_is_ignored_and_replaced(store, which):
    """The events are read instead, and the next reader finds a good one."""
    events = attempts(20)
    write_events(store, events)
    store.write("run/" + snapshot_name(EVERY), bad_snapshots()[which])
    store.calls.clear()

    assert log_of(store).load() == fold(events)
    assert store.count("read") >= len(events)
    assert log_of(store).load() == fold(events)
    assert store.count("read") == 1 + 1 + 12 + 1


def test_a_snapshot_beyond_the_last_event_is_ignored(store):
    """Event 50 is absent, so nothing proves that the snapshot is of this run."""
    write_events(store, attempts(1))
    store.write("run/" + snapshot_name(EVERY), snapshot_of(attempts(20)[:EVERY]))

    assert log_of(store).load() == fold(attempts(1))


def test_the_snapshot_before_helps_when_the_newest_does_not(store):
    """122 events, snapshot 100 torn: 50 is used."""
    write_events(store, attempts(40))
    log_of(store).load()
    store.write("run/" + snapshot_name(2 * EVERY), b"torn")
    store.calls.clear()

    assert log_of(store, snapshots=False).load() == fold(attempts(40))
    assert store.count("read") == 2 + 2 + 72 + 1


@pytest.mark.parametrize("call", ["create", "size"])
def test_a_store_that_keeps_no_snapshots_does_no_harm(store, call):
    """The log is not allowed to write or cannot find them: it reads the events."""
    events = attempts(20)
    write_events(store, events)
    store.fail[call] = unreadable

    assert log_of(store).load() == fold(events)


def test_a_fold_that_fails_leaves_the_log_usable(store):
    """An event that lacks a field is rejected every time, not skipped the second time."""
    log = log_of(store)
    log.append(0, read_body(*BEGIN))
    torn = {"schema": "2.0", "number": 2, "type": "attempt-intended", "body": {"generation": 1}}
    store.write("run/events/000002.json", json.dumps(torn).encode())

    for _ in range(2):
        with pytest.raises(ProtocolError, match="attempt-intended: attempt: is missing"):
            log.load()
