"""Chunks of logs and metrics: uploaded in order, then deleted."""

import pytest

from envscaler_airflow.sidecar.uploads import Chunks


def chunk(bench, folder, name, text):
    """Write a chunk as the wrapper does."""
    (bench.spool.root / folder / name).write_text(text)


def left(bench, folder):
    """Return the names that remain in the spool."""
    return sorted(path.name for path in (bench.spool.root / folder).iterdir())


def test_closed_chunks_go_up_in_order_and_are_deleted(bench, store):
    """The store uses the spool's numbers; an open chunk stays."""
    for number in (3, 1, 2):
        chunk(bench, "logs", f"{number:06d}.log", f"line {number}")
    chunk(bench, "logs", "000004.open", "half")
    chunk(bench, "metrics", "000001.jsonl", "{}")

    assert Chunks(bench.context).step(has_ended=False)

    expected = [f"logs/g1-a2-n0-c1-{number:06d}.log" for number in (1, 2, 3)]
    assert store.puts == [*expected, "metrics/g1-a2-n0-c1-000001.jsonl"]
    assert store.read("logs/g1-a2-n0-c1-000002.log") == b"line 2"
    assert left(bench, "logs") == ["000004.open"]


def test_a_store_outage_keeps_chunks_and_their_order(bench, store):
    """Retried after two, then four seconds; no chunk is lost, and none overtakes another."""
    chunks = Chunks(bench.context)
    for number in (1, 2):
        chunk(bench, "logs", f"{number:06d}.log", str(number))
    store.down = True
    assert not chunks.step(has_ended=False)
    assert bench.context.messages.text() == "logs and metrics wait: the store is down"
    bench.clock.now += 2
    assert not chunks.step(has_ended=False)
    store.down = False
    bench.clock.now += 3.9
    assert not chunks.step(has_ended=False)
    assert store.puts == []

    bench.clock.now += 0.1
    assert chunks.step(has_ended=False)

    assert store.puts == ["logs/g1-a2-n0-c1-000001.log", "logs/g1-a2-n0-c1-000002.log"]
    assert bench.context.messages.text() == ""


def test_a_sidecar_killed_after_an_upload_repeats_it_under_the_same_number(bench, store, monkeypatch):
    """The chunk was uploaded and not yet deleted: it is uploaded once more under the same name."""
    chunk(bench, "logs", "000007.log", "x")
    with monkeypatch.context() as patch:
        patch.setattr(
            "envscaler_airflow.store.root.Root.remove",
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            Chunks(bench.context).step(has_ended=False)

    Chunks(bench.restarted()).step(has_ended=False)

    assert store.puts == ["logs/g1-a2-n0-c1-000007.log"] * 2
    assert store.children("logs") == ["g1-a2-n0-c1-000007.log"]


def test_what_a_killed_wrapper_left_open_goes_up_at_the_end(bench, store):
    """Its last lines explain why it was killed; empty files do not count as chunks."""
    chunk(bench, "logs", "000002.open", "MemoryError")
    chunk(bench, "metrics", "000001.open", "")

    Chunks(bench.context).step(has_ended=True)

    assert store.read("logs/g1-a2-n0-c1-000002.log") == b"MemoryError"
    assert store.children("metrics") == []


def test_a_link_among_the_chunks_is_not_followed(bench, store, tmp_path):
    """The training could point it at a file that only the sidecar may read."""
    (tmp_path / "secret").write_text("token")
    (bench.spool.root / "logs/000001.log").symlink_to(tmp_path / "secret")

    Chunks(bench.context).step(has_ended=True)

    assert store.puts == []
