"""The owner's lease: renewed by the owner and watched by the sidecar."""

import pytest

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.store import Lease, LeaseWatch, open_store
from envscaler_airflow.store.lease import LeaseFile
from envscaler_airflow.store.run import Run


@pytest.fixture
def store(tmp_path):
    """An empty store that exists."""
    (tmp_path / "store").mkdir()
    return open_store(str(tmp_path / "store"))


class Clock:
    """A monotonic clock that moves only when a test moves it."""

    def __init__(self):
        """Start at any value."""
        self.now = 1000.0

    def __call__(self):
        """Seconds."""
        return self.now


def test_a_lease_begins_at_one_and_grows_by_one(store):
    """For any owner that renews it."""
    assert Run(store, "run").lease.read() is None

    first = Run(store, "run").lease.renew(holder="execution")
    second = Run(store, "run").lease.renew(holder="trigger")

    assert first == Lease(1, "execution")
    assert second == Lease(2, "trigger")
    assert Run(store, "run").lease.read() == second


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"schema":"2.0"}',
        b'{"schema":"3.0","counter":1}',
        b'{"schema":"2.0","counter":"x"}',
        b'{"schema":"2.0","counter":1,"ages":[]}',
    ],
)
def test_what_is_no_lease_is_refused_by_readers_and_replaced_by_the_owner(store, text):
    """A torn lease must not keep the owner from renewing."""
    store.write("lease/run.json", text)

    with pytest.raises(ProtocolError, match=r"lease/run\.json"):
        LeaseFile(store).read()
    assert LeaseFile(store).renew(holder="h") == Lease(1, "h")


def test_a_newer_lease_is_read(store):
    """A later minor version may add fields."""
    store.write("lease/run.json", b'{"schema":"2.7","counter":5,"more":[]}')

    assert LeaseFile(store).read() == Lease(5)


def test_a_lease_that_cannot_be_read_is_not_renewed(store, monkeypatch):
    """Restarting at one while the store is unavailable could look like no change."""

    def away(*_args, **_kwargs):
        raise StoreError("away", transient=True)

    monkeypatch.setattr(store, "read", away)

    with pytest.raises(StoreError):
        LeaseFile(store).renew(holder="h")
    monkeypatch.undo()
    assert LeaseFile(store).read() is None


def watch_of(clock, *, max_gap_s=120.0):
    """A watch that has seen lease 1."""
    watch = LeaseWatch(clock, max_gap_s=max_gap_s)
    watch.seen(Lease(1))
    return watch


def test_a_lease_that_stands_still_ages_by_the_watchers_clock():
    """Three reads, a minute apart."""
    clock = Clock()
    watch = watch_of(clock)

    for _ in range(3):
        clock.now += 60
        watch.seen(Lease(1))

    assert watch.unchanged_s == 180


def test_any_change_begins_again():
    """The counter, or a lease of the same number from another owner."""
    clock = Clock()
    watch = watch_of(clock)
    clock.now += 60
    watch.seen(Lease(1))

    watch.seen(Lease(2))
    assert watch.unchanged_s == 0
    clock.now += 60
    watch.seen(Lease(2))
    watch.seen(Lease(2, "other"))
    assert watch.unchanged_s == 0


def test_a_lease_that_went_back_is_a_change():
    """An owner that restarted after a torn file is alive."""
    clock = Clock()
    watch = watch_of(clock)
    watch.seen(Lease(7))
    clock.now += 60

    watch.seen(Lease(1))

    assert watch.unchanged_s == 0


def test_a_lease_that_was_never_written_ages_too():
    """An owner that died before its first renewal is detected."""
    clock = Clock()
    watch = LeaseWatch(clock)
    watch.seen(None)
    clock.now += 60
    watch.seen(None)

    assert watch.unchanged_s == 60
    watch.seen(Lease(1))
    assert watch.unchanged_s == 0


def test_time_without_a_reading_does_not_count():
    """Before the first reading, and since the last one."""
    clock = Clock()
    watch = LeaseWatch(clock)
    clock.now += 5000
    assert watch.unchanged_s == 0

    watch.seen(Lease(1))
    clock.now += 5000

    assert watch.unchanged_s == 0


def test_an_outage_of_the_store_is_no_expiry():
    """An hour without an answer, then the same lease: the owner had no store either. Two minutes count."""
    clock = Clock()
    watch = watch_of(clock)

    clock.now += 3600
    watch.seen(Lease(1))
    assert watch.unchanged_s == 120

    clock.now += 60
    watch.seen(Lease(1))
    assert watch.unchanged_s == 180
