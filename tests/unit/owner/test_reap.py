"""``reap`` and one orphan that cannot be removed."""

from __future__ import annotations

import pytest

from envscaler_airflow.backends.base import Leftover
from envscaler_airflow.errors import BackendError, StoreError
from envscaler_airflow.owner.reap import YOUNG_S, reap
from envscaler_airflow.run import Handle
from envscaler_airflow.testing import FaultyStore


class Listing:
    """A backend on which attempts of three runs are left, and that refuses to remove some."""

    name = "listing"

    def __init__(self, refuses=()):
        """Refuse to remove the attempts of these names."""
        self.refuses, self.removed = refuses, []

    def leftovers(self, store_url):
        """The three attempts, which have ended."""
        del store_url
        for name in ("a", "b", "c"):
            yield Leftover(Handle(self.name, name), f"deployment/dag/{name}/t/-1", 1, 1, YOUNG_S, runs=False)

    def remove(self, handle):
        """Remove an attempt."""
        if handle.name in self.refuses:
            raise BackendError(f"{handle.name}: forbidden", status=403)
        self.removed.append(handle.name)


@pytest.mark.parametrize(("refuses", "message"), [(("a",), "a: forbidden"), (("a", "b"), "a: forbidden")])
def test_an_orphan_that_cannot_be_removed_stops_no_other(world, caplog, refuses, message):
    """The rest goes, each error is in the log, and the first ends the call (A8)."""
    world.store.write("deployment/dag/other/t/-1/run.json", b"{}")
    backend, found = Listing(refuses), []

    with pytest.raises(BackendError, match=message):
        found.extend(orphan.handle.name for orphan in reap(world.store, backend))

    assert backend.removed == [name for name in "abc" if name not in refuses]
    assert caplog.text.count("left alone") == len(refuses)


def test_a_run_that_cannot_be_read_stops_no_other(world):
    """It may be of a store policy that forbids one prefix (A8)."""
    world.store.write("deployment/dag/other/t/-1/run.json", b"{}")
    backend, store = Listing(), FaultyStore(world.store)
    store.add("refuse", "read", "deployment/dag/a/*", times=None, error=StoreError("access denied"))

    with pytest.raises(StoreError, match="access denied"):
        list(reap(store, backend))

    assert backend.removed == ["b", "c"]
