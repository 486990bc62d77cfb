"""What a status reports of the sidecar's transfers, at the interval of all statuses."""

import os
import threading
from contextlib import suppress

import pytest

from envscaler_agent.protocol import Control, Status, Transfer, status_name
from envscaler_airflow.errors import StoreError
from envscaler_airflow.sidecar.loop import Sidecar
from envscaler_airflow.sidecar.restore import restore
from envscaler_airflow.sidecar.setup import copy_in
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.sidecar.uploads import WriteBack
from envscaler_airflow.store import open_store
from envscaler_airflow.store.filesystem import FilesystemStore
from envscaler_airflow.store.transfer_progress import Moved

MIB = 1 << 20


@pytest.fixture
def node(make_bench, store, tmp_path):
    """A node whose sidecar has completed setup, with one output."""
    bench = make_bench(layout={"outputs": {"model": f"{tmp_path}/model"}})
    bench.owner_asks()
    bench.sidecar = Sidecar(bench.context)
    return bench


@pytest.fixture
def halfway(node, store, monkeypatch):
    """Let 16 s pass in rounds of half a second while half of a file is moved; return the statuses."""
    seen = []

    def rounds():
        before = len(store.puts)
        for _ in range(32):
            node.clock.now += 0.5
            node.sidecar.step()
        seen.append((node.status(), store.puts[before:].count(status_name(1, 2, 0))))

    def put(name, stream, real=store._store.put_file):
        if name.startswith(("checkpoints/", "outputs/")):
            os.lseek(stream.fileno(), MIB // 2, os.SEEK_SET)
            rounds()
        real(name, stream)

    def get(name, stream, real=store._store.get_file):
        stream.write(bytes(MIB // 4))
        stream.flush()
        rounds()
        real(name, stream)

    monkeypatch.setattr(store._store, "put_file", put)
    monkeypatch.setattr(store._store, "get_file", get)
    return seen


def begin(node):
    """Complete setup, and let the training report."""
    node.sidecar.heavy.step()
    node.wrapper_says(progress={"step": 440})
    node.sidecar.step()


def test_a_status_says_how_far_an_upload_is_and_is_written_no_more_often(node, halfway):
    """Half of 1 MiB is up after 16 s, which is one status; afterwards no transfer runs (F6)."""
    begin(node)
    node.session_saves("g1-step-00000440-a2", {"model.bin": bytes(MIB)}, step=440)

    node.sidecar.heavy.step()
    node.sidecar.step()

    [(status, writes)] = halfway
    assert status.transfer == Transfer("uploading", "checkpoint 440", MIB // 2, MIB)
    assert (status.phase, writes) == ("running", 1)
    assert node.status().transfer is None


def test_a_status_says_how_far_an_output_is(node, halfway, tmp_path):
    """The command has ended; the status names the remaining upload (F6)."""
    begin(node)
    (tmp_path / "model").write_bytes(bytes(MIB))
    node.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    for _ in range(4):
        node.sidecar.heavy.step()
        node.sidecar.snapshot()
        node.sidecar.step()

    status, _ = halfway[-1]
    assert status.transfer == Transfer("uploading", "output model", MIB // 2, MIB)
    assert status.phase == "uploading"
    assert (node.status().phase, node.status().transfer) == ("ended", None)


def test_a_status_says_how_far_a_restore_is(node, halfway):
    """A quarter of a checkpoint of attempt 1 is here (F6)."""
    name = node.in_store("g1-step-00000440-a1", {"model.bin": bytes(MIB)})
    halfway.clear()
    node.owner_asks(candidates=(name,))

    node.sidecar.heavy.step()

    [(status, _)] = halfway
    assert status.transfer == Transfer("restoring", "checkpoint 440", MIB // 4, MIB)
    assert status.phase == "restoring"


def test_a_transfer_that_ends_while_a_status_is_made_ends_no_sidecar(bench, monkeypatch):
    """The upload's thread ends between two instructions of the other thread (F6)."""
    seen = []

    class Ends(type(bench.context)):
        """A context whose transfer ends when it is read."""

        @property
        def _transfer(self):
            seen.append(1)
            return ("uploading", "checkpoint 440", Moved()) if len(seen) == 1 else None

        @_transfer.setter
        def _transfer(self, value):
            """Keep nothing."""

    context = Ends(
        **{name: getattr(bench.context, name) for name in ("spool", "run", "who", "layout", "memory")}
    )

    assert context.transferring() is None
    assert len(seen) == 1


def test_what_a_training_says_of_transfers_is_not_passed_on(node):
    """The training transfers nothing; only the sidecar knows of transfers (F6)."""
    begin(node)
    node.wrapper_says(progress={"step": 441}, transfer=Transfer("uploading", "all", -1, 2**62))
    node.clock.now += 16

    node.sidecar.step()

    assert (node.status().progress.step, node.status().transfer) == (441, None)


def test_a_status_without_a_transfer_is_as_it_was():
    """Without a transfer, the field is absent from the store."""
    assert b"transfer" not in Status().to_json()


def test_files_that_fail_and_come_again_count_once(tmp_path):
    """Half of the second of two files, an error, and both again: never more than the total."""
    (tmp_path / "a").write_bytes(bytes(100))
    moved = Moved()
    moved.begin(200)
    moved.add(100)
    with (tmp_path / "a").open("rb") as stream:
        with suppress(OSError), moved.sending(stream, 100):
            os.lseek(stream.fileno(), 50, os.SEEK_SET)
            half = moved.done
            raise OSError
        after = moved.done
        moved.begin(200)
        with moved.sending(stream, 100):
            again = moved.done

    assert (half, after, again, moved.done) == (150, 100, 0, 100)


class Passing(threading.Event):
    """An event that takes no real time: *clock* advances instead."""

    def __init__(self, clock):
        """Start unset."""
        super().__init__()
        self._clock = clock

    def wait(self, timeout=None):
        """Let *timeout* pass."""
        self._clock.now += timeout or 0
        return self.is_set()


def test_a_long_restore_outlives_an_error_of_the_store(make_bench, store, monkeypatch):
    """Ten minutes for each of four files, and an error at the third: it resumes with that file (B7)."""
    bench = make_bench()
    files = {f"{number}.bin": bytes([number]) * (5 << 20) for number in range(4)}
    name = bench.in_store("g1-step-00000440-a1", files)
    bench.context.ending, bench.context.patience_s = Passing(bench.clock), 900
    asked = []

    def get(path, stream, real=store._store.get_file):
        asked.append(path[-5:])
        bench.clock.now += 600
        if len(asked) == 3:
            raise StoreError("no answer", transient=True)
        real(path, stream)

    monkeypatch.setattr(store._store, "get_file", get)

    found = restore(bench.context, Control(candidates=(name,)))

    assert found.manifest.step == 440
    assert asked == ["0.bin", "1.bin", "2.bin", "2.bin", "3.bin"]


def test_a_store_that_moves_nothing_is_given_up(make_bench, store, monkeypatch):
    """Fifteen minutes of errors are the limit (B7)."""
    bench = make_bench()
    name = bench.in_store("g1-step-00000440-a1")
    bench.context.ending, bench.context.patience_s = Passing(bench.clock), 900
    began = bench.clock.now

    def get(_name, _stream):
        raise StoreError("no answer", transient=True)

    monkeypatch.setattr(store._store, "get_file", get)

    with pytest.raises(StoreError, match="no answer"):
        restore(bench.context, Control(candidates=(name,)))
    assert 900 <= bench.clock.now - began < 960


@pytest.fixture
def counted(monkeypatch):
    """Record how many files of an object store are moved at once, and return the maximum so far."""
    lock, now, most = threading.Lock(), [0], [0]
    together = threading.Barrier(4)

    def slowly(real):
        def moving(*arguments):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            with suppress(threading.BrokenBarrierError):
                together.wait(1)
            try:
                return real(*arguments)
            finally:
                with lock:
                    now[0] -= 1

        return moving

    monkeypatch.setattr(FilesystemStore, "__init__", _side_by_side(FilesystemStore.__init__))
    for method in ("get_file", "put_file"):
        monkeypatch.setattr(FilesystemStore, method, slowly(getattr(FilesystemStore, method)))
    return most


def _side_by_side(real):
    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        self.at_once = 4

    return init


@pytest.mark.parametrize("is_cached", [False, True])
def test_small_files_of_a_volume_come_side_by_side(make_bench, tmp_path, counted, request, is_cached):
    """Four at a time, also on a machine with a cache; one listing gives the sizes (B7)."""
    bucket = open_store(f"memory://{request.node.name}/data")
    for number in range(8):
        bucket.write(f"{number}.bin", b"12345")
    index = str(tmp_path / "index.json") if is_cached else None
    mount = Mount(name="d", source=bucket.url, path=str(tmp_path / "data"), read_only=True, index=index)

    copy_in(make_bench().context, mount)

    assert counted == [4]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [f"{n}.bin" for n in range(8)]


def test_small_files_of_a_volume_go_back_side_by_side(make_bench, tmp_path, counted, request):
    """Four at a time (B7)."""
    bucket = open_store(f"memory://{request.node.name}/data")
    mounts = [{"name": "d", "source": bucket.url, "path": str(tmp_path / "data")}]
    context = make_bench(layout={"mounts": mounts}).context
    for number in range(8):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}.bin").write_bytes(b"12345")

    WriteBack(context).flush()

    assert counted == [4]
    assert bucket.names("") == [f"{number}.bin" for number in range(8)]
