"""Input from the owner, and the end of an orphaned attempt."""

import os

import pytest

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow.sidecar.context import UnheededError
from envscaler_airflow.sidecar.owner_watch import OwnerWatch
from envscaler_airflow.store.lease import LEASE, LeaseFile

NAME = control_name(1, 2)


def run(bench, watch, seconds, every=2):
    """Let *seconds* pass."""
    for _ in range(0, seconds, every):
        bench.clock.now += every
        watch.step()


def control(bench):
    """Return what the wrapper reads."""
    return bench.spool.current_control()


def test_a_control_is_handed_over_byte_for_byte(bench, store):
    """Including fields that this version does not know."""
    body = b'{ "schema": "2.7", "sequence": 3, "action": "drain", "mood": "new" }'
    store.write(NAME, body)

    OwnerWatch(bench.context).step()

    assert bench.spool.control.read_bytes() == body


def test_an_unchanged_control_is_not_written_again(bench):
    """A watcher of the file sees a change only when there is one."""
    bench.owner_asks(sequence=1)
    watch = OwnerWatch(bench.context)
    watch.step()
    before = bench.spool.control.stat().st_ino

    run(bench, watch, 10)
    assert bench.spool.control.stat().st_ino == before

    bench.owner_asks(sequence=2, action="checkpoint")
    run(bench, watch, 2)
    assert control(bench).sequence == 2


@pytest.mark.parametrize("body", [b"{torn", b'{"schema":"3.0"}', b'{"schema":"2.0","action":"explode"}'])
def test_a_control_of_another_version_is_refused_and_training_goes_on(bench, store, body):
    """The last valid one stays, and the message quotes the new one."""
    bench.owner_asks(sequence=1)
    watch = OwnerWatch(bench.context)
    watch.step()
    store.write(NAME, body)

    run(bench, watch, 2)

    assert control(bench).sequence == 1
    assert bench.context.messages.text().startswith("the owner's requests cannot be read: ")


def test_a_word_that_comes_late_does_not_undo_the_later_one(bench):
    """An owner that hung between its event and its control overwrites its successor's control."""
    bench.owner_asks(sequence=7, action="drain")
    watch = OwnerWatch(bench.context)
    watch.step()
    bench.owner_asks(sequence=5, action="checkpoint")
    run(bench, watch, 10)

    assert (control(bench).sequence, control(bench).action) == (7, "drain")


def lease_bench(bench, store):
    """Return a watch of an attempt with an owner, orphaned after 300 s, grace 30 s."""
    bench.owner_asks(sequence=4, orphan_after_s=300, grace_s=30, candidates=("g1-step-00000100-a1",))
    LeaseFile(store).renew(holder="trigger")
    watch = OwnerWatch(bench.context)
    watch.step()
    return watch


def test_a_lease_that_moves_keeps_the_attempt(bench, store):
    """Renewed every minute: for an hour nothing happens."""
    watch = lease_bench(bench, store)
    for _ in range(60):
        LeaseFile(store).renew(holder="trigger")
        run(bench, watch, 60, every=10)

    assert control(bench).action == "run"


def test_a_lease_that_stands_still_ends_the_attempt(bench, store):
    """After orphan_after the sidecar requests a drain with a checkpoint, and 60 s + grace later a stop."""
    watch = lease_bench(bench, store)
    run(bench, watch, 290)
    assert control(bench).action == "run"

    run(bench, watch, 30)
    asked = control(bench)
    assert (asked.sequence, asked.action, asked.align, asked.grace_s) == (5, "drain", "step", 30)
    assert asked.reason.startswith("orphaned: the lease stood still for 3")
    assert asked.candidates == ("g1-step-00000100-a1",)

    run(bench, watch, 60)
    assert control(bench).action == "drain"
    run(bench, watch, 32)
    assert (control(bench).sequence, control(bench).action) == (6, "stop")
    assert control(bench).reason == asked.reason


def test_a_lease_that_was_never_written_counts_as_still(bench):
    """The owner died before its first renewal: the machine must not run for ever."""
    bench.owner_asks(orphan_after_s=300)
    watch = OwnerWatch(bench.context)

    run(bench, watch, 330)

    assert control(bench).action == "drain"


def test_a_store_that_cannot_be_read_is_no_expiry(bench, store):
    """Two hours of outage: the training continues; only observed time counts."""
    watch = lease_bench(bench, store)
    store.down = True
    run(bench, watch, 7200, every=20)

    assert control(bench).action == "run"
    assert bench.context.messages.text() == "the owner's requests cannot be read: the store is down"

    store.down = False
    run(bench, watch, 60)
    assert control(bench).action == "run"


def test_a_torn_lease_is_no_expiry(bench, store):
    """It reveals nothing about its owner."""
    watch = lease_bench(bench, store)
    store.write(LEASE, b"{torn")

    run(bench, watch, 3600, every=20)

    assert control(bench).action == "run"


def test_an_orphan_stays_one(bench, store):
    """Owner back, sidecar killed and restarted: the requested drain is still carried out."""
    watch = lease_bench(bench, store)
    run(bench, watch, 330)
    LeaseFile(store).renew(holder="trigger")
    bench.owner_asks(sequence=9)
    bench.spool.control.unlink()

    watch = OwnerWatch(bench.restarted())
    run(bench, watch, 10)
    assert (control(bench).sequence, control(bench).action) == (5, "drain")

    run(bench, watch, 100)
    assert control(bench).action == "stop"


def test_a_zombie_goes(bench, store):
    """A control of attempt 3 exists: attempt 2 was abandoned, and its writes are void."""
    bench.owner_asks(sequence=4)
    watch = OwnerWatch(bench.context)
    run(bench, watch, 60)
    store.write(control_name(1, 3), Control().to_json())

    run(bench, watch, 62)

    assert control(bench).action == "stop"  # its save would be void
    assert control(bench).reason == "orphaned: a later attempt has begun; what this one writes is void"


def test_a_wrapper_that_does_not_go_is_given_up(bench, store):
    """Drain requested (60 s and the grace), stop requested (twice the grace): the machine must end it."""
    watch = lease_bench(bench, store)
    run(bench, watch, 300 + 90 + 12)
    assert control(bench).action == "stop"
    run(bench, watch, 50)

    with pytest.raises(UnheededError, match="asked to stop 60 s ago and still here: orphaned"):
        run(bench, watch, 20)


def test_an_orphan_on_a_full_disk_is_given_up_as_soon(bench, store, monkeypatch):
    """Neither the control nor its record can be written; the time still counts."""
    watch = lease_bench(bench, store)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("envscaler_airflow.store.root.Root.landing", full)

    with pytest.raises(UnheededError):
        run(bench, watch, 330 + 90 + 70)


def test_room_on_the_disk_lets_the_orphan_be_asked_after_all(bench, store, monkeypatch):
    """The disk was full for half a minute."""
    watch = lease_bench(bench, store)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("envscaler_airflow.store.root.Root.landing", full)
        run(bench, watch, 330)
        assert control(bench).action == "run"
    run(bench, watch, 2)

    assert control(bench).action == "drain"
    assert bench.state.override is not None


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "garbage"])
def test_whatever_the_training_lays_in_its_place_the_control_comes_again(bench, store, tmp_path, kind):
    """Neither a hang nor a write through a link."""
    watch = lease_bench(bench, store)
    path, target = bench.spool.control, tmp_path / "precious"
    target.write_text("mine")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.write_bytes(b"\xff")

    run(bench, watch, 4)

    assert control(bench).sequence == 4
    assert target.read_text() == "mine"


def test_a_training_cannot_lengthen_its_own_lease(bench, store):
    """It writes a control of a year; the owner's 300 s count."""
    watch = lease_bench(bench, store)
    forged = Control(sequence=9, orphan_after_s=31e6).to_json()
    for _ in range(33):
        run(bench, watch, 10)
        bench.spool.write(bench.spool.control, forged)
    run(bench, watch, 2)

    assert control(bench).action == "drain"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"checkpoints":"many"}',
        b'{"override":"{torn"}',
        b'{"rejected":7}',
        b"[" * 9000,
        b'{"sequence":1e999}',
    ],
)
def test_a_memory_that_another_hand_wrote_ends_no_sidecar(bench, store, body):
    """Another process wrote it: the sidecar starts over, and watches the lease."""
    lease_bench(bench, store)
    bench.spool.sidecar.write_bytes(body)

    watch = OwnerWatch(bench.restarted())
    run(bench, watch, 332)

    assert control(bench).action == "drain"
