"""The events of a distant store are read ahead, several at a time."""

import threading
from itertools import pairwise

import pytest

from envscaler_airflow.errors import StoreError
from envscaler_airflow.run import MAX_EVENT_BYTES, Actor
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store import EventLog, open_store
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.run_store import StoreView

ACTOR = Actor("ti-1", 1, 3)


class Distant(StoreView):
    """A store that answers concurrent calls faster, as an object store does."""

    at_once = 8

    def __init__(self, store):
        """See all of *store*; remember what is read, and how many reads run at the same time."""
        super().__init__(store, "")
        self.read_names = []
        self.batches = []
        self.most = self.now_reading = 0
        self._lock = threading.Condition()

    @property
    def url(self):
        """Not a folder's."""
        return "s3://bucket"

    def read_dated(self, name, *, max_bytes=MAX_EVENT_BYTES):
        """Wait until all reads of the same batch have begun."""
        with self._lock:
            self.read_names.append(name)
            self.now_reading += 1
            self.most = max(self.most, self.now_reading)
            self._lock.notify_all()
            batch = next((names for names in self.batches if name in names), set())
            self._lock.wait_for(lambda: batch <= set(self.read_names), timeout=1.5)
        try:
            return self.store.read_dated(name, max_bytes=max_bytes)
        finally:
            with self._lock:
                self.now_reading -= 1


@pytest.fixture
def distant(tmp_path):
    """Twenty events in a distant store."""
    store = Distant(open_store(str(tmp_path)))
    log = EventLog(store.store)
    for number in range(20):
        log.append(number, read_body("owner", {"reason": str(number)}), actor=ACTOR)
    return store


def test_the_events_of_a_distant_store_are_read_side_by_side(distant):
    """1, 2, 4, 8 and 8 at a time instead of 21 one after another; the state is the same."""
    starts = (1, 2, 4, 8, 16, 24)
    distant.batches = [{event_name(number) for number in range(*pair)} for pair in pairwise(starts)]

    state = EventLog(distant, snapshots=False).load()

    assert state == EventLog(distant.store, snapshots=False).load()
    assert (state.number, distant.most) == (20, 8)
    assert sorted(set(distant.read_names)) == [event_name(number) for number in range(1, 24)]


def test_a_poll_of_a_distant_store_reads_one_event(distant):
    """Nothing is read ahead before something new is found."""
    log = EventLog(distant, snapshots=False)
    log.load()
    distant.read_names.clear()

    log.load()
    assert distant.read_names == [event_name(21)]

    EventLog(distant.store).append(20, read_body("owner", {"reason": "new"}), actor=ACTOR)
    assert log.load().number == 21


def test_a_fault_beyond_the_last_event_is_not_met(distant):
    """What is read ahead and does not exist yet cannot fail the reader."""
    real = distant.store.read_dated

    def read_dated(name, *, max_bytes):
        if name > event_name(21):
            raise StoreError("503")
        return real(name, max_bytes=max_bytes)

    distant.store.read_dated = read_dated

    assert EventLog(distant, snapshots=False).load().number == 20
