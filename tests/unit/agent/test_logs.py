"""Unit tests of chunks and last lines: small files in a temporary folder, and a manual clock."""

import os

import pytest

from envscaler_agent import output
from envscaler_agent.output import LOG_CHUNK_S, METRICS_CHUNK_S, Chunks, Lines, chunk_age_s


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock():
    """A clock at 0."""
    return Clock()


def chunks(folder, clock, *, max_bytes=10):
    """Chunks of ten bytes or ten seconds."""
    return Chunks(folder, "log", max_bytes=max_bytes, max_age_s=10, clock=clock)


def closed(folder):
    """Return contents of closed chunks by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.log"))}


@pytest.mark.parametrize(("hours", "seconds"), [(0, 10), (0.9, 10), (2, 20), (5, 50), (24, 60)])
def test_the_longer_a_training_runs_the_later_a_chunk_is_closed(tmp_path, clock, hours, seconds):
    """Ten seconds in the first hour, twice that after two, and never later than after a minute."""
    writer = chunks(tmp_path, clock, max_bytes=1 << 18)
    clock.now = begun = hours * 3600
    writer.write(b"one line\n")

    while not closed(tmp_path):
        clock.now += 0.5
        writer.tick()

    assert clock.now - begun == pytest.approx(seconds, abs=0.7)


def test_a_week_of_output_is_some_thousand_chunks():
    """10,726 and not the 60,480 of one each ten seconds; metrics keep their five minutes."""
    logs, metrics, second = 0, 0, 0.0
    while second < 7 * 86_400:
        logs, second = logs + 1, second + chunk_age_s(LOG_CHUNK_S, second)
    second = 0.0
    while second < 7 * 86_400:
        metrics, second = metrics + 1, second + chunk_age_s(METRICS_CHUNK_S, second)

    assert (logs, metrics) == (10_726, 2016)


def test_a_chunk_is_closed_when_it_is_full(tmp_path, clock):
    """Ten bytes: the second line fills the chunk, and the third begins another."""
    writer = chunks(tmp_path, clock)

    for line in (b"one\n", b"two...\n", b"three\n"):
        writer.write(line)

    assert closed(tmp_path) == {"000001.log": b"one\ntwo...\n"}


def test_a_full_chunk_ends_with_a_whole_line(tmp_path, clock):
    """The text after the last line break is in the next chunk."""
    writer = chunks(tmp_path, clock)

    writer.write(b"one\ntwo\nthree")
    writer.close()

    assert closed(tmp_path) == {"000001.log": b"one\ntwo\n", "000002.log": b"three"}


def test_a_line_longer_than_a_chunk_is_kept(tmp_path, clock):
    """Without any line break the bytes are still written."""
    writer = chunks(tmp_path, clock)

    writer.write(b"x" * 25)

    assert closed(tmp_path) == {"000001.log": b"x" * 25}


def test_a_chunk_is_closed_when_it_is_old(tmp_path, clock):
    """Ten seconds after its first byte, not after its creation."""
    writer = chunks(tmp_path, clock)
    clock.now = 100
    writer.write(b"one\n")

    clock.now = 109.9
    writer.tick()
    assert closed(tmp_path) == {}

    clock.now = 110
    writer.tick()
    assert closed(tmp_path) == {"000001.log": b"one\n"}


def test_an_empty_chunk_is_never_closed(tmp_path, clock):
    """Silence creates no files."""
    writer = chunks(tmp_path, clock)
    clock.now = 100

    writer.tick()
    writer.close()

    assert closed(tmp_path) == {}


def test_a_restarted_wrapper_reuses_no_number(tmp_path, clock):
    """Chunk 1 was uploaded and deleted, chunk 2 was open when the wrapper died: 2 is closed, 3 is next."""
    before = chunks(tmp_path, clock)
    before.write(b"uploaded..\n")
    before.write(b"half")
    (tmp_path / "000001.log").unlink()

    after = chunks(tmp_path, clock)
    after.write(b"new\n")
    after.close()

    assert closed(tmp_path) == {"000002.log": b"half", "000003.log": b"new\n"}


def test_a_number_whose_chunk_was_deleted_is_not_used_again(tmp_path, clock):
    """Everything is uploaded and only the empty next chunk is open: it keeps its number."""
    before = chunks(tmp_path, clock)
    before.write(b"uploaded..\n")
    (tmp_path / "000001.log").unlink()

    after = chunks(tmp_path, clock)
    after.write(b"uploaded too\n")

    assert closed(tmp_path) == {"000002.log": b"uploaded too\n"}


def test_a_full_disk_drops_output_and_counts_it(tmp_path, clock, monkeypatch):
    """A failed write raises nothing, the bytes are counted, and later output is kept again."""
    writer = chunks(tmp_path, clock)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output.os, "write", full)
        writer.write(b"lost\n")
    writer.write(b"kept\n")
    writer.close()

    assert writer.dropped_bytes == 5
    assert writer.problem.endswith("No space left on device")
    assert closed(tmp_path) == {"000001.log": b"kept\n"}


def test_output_is_dropped_when_the_sidecar_is_away_for_too_long(tmp_path, clock, monkeypatch):
    """Three closed chunks may wait here; then the training has priority on the disk."""
    monkeypatch.setattr(output, "MAX_WAITING", 3)
    writer = chunks(tmp_path, clock)

    for _ in range(5):
        writer.write(b"ten bytes\n")

    assert len(closed(tmp_path)) == 3
    assert writer.dropped_bytes == 20
    assert "3 chunks wait for the sidecar" in writer.problem


def test_written_bytes_are_in_the_file_at_once(tmp_path, clock):
    """A killed wrapper loses nothing that it had read."""
    chunks(tmp_path, clock).write(b"one\n")

    assert (tmp_path / "000001.open").read_bytes() == b"one\n"


def test_lines_are_joined_over_reads():
    """A line is returned once it is complete."""
    lines = Lines()

    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\n") == [b"two"]


def test_the_last_hundred_lines_are_kept():
    """150 lines and an unfinished one: 51 to 149, and that one."""
    lines = Lines()

    lines.feed(b"".join(b"%d\n" % number for number in range(150)) + b"unfinished")

    assert lines.tail() == (*(str(number) for number in range(51, 150)), "unfinished")


def test_a_progress_bar_is_shown_as_it_stood_last():
    """A carriage return overwrites the line, as in a terminal."""
    lines = Lines()

    lines.feed(b"10%\r50%\r100%\r\ndone\n")

    assert lines.tail() == ("100%", "done")


def test_last_lines_fit_into_a_status():
    """A hundred long lines of characters that JSON writes as twelve bytes: the oldest are dropped."""
    lines = Lines()

    lines.feed(("\U0001f642" * 3000 + "\n").encode() * 100)

    assert len(lines.tail()) == 10  # 24 kB each, of 256 KiB
    assert {len(line) for line in lines.tail()} == {output.MAX_LINE_CHARS}


def test_a_stream_without_line_breaks_stays_small():
    """Of a gigabyte of dots only the end is kept."""
    lines = Lines()

    for _ in range(10):
        lines.feed(b"." * 100_000)

    assert len(lines._rest) == 16 * output.MAX_LINE_CHARS


def test_files_are_closed_to_children(tmp_path, clock):
    """The command does not inherit the open chunk."""
    writer = chunks(tmp_path, clock)
    writer.write(b"one\n")

    assert not os.get_inheritable(writer._file)
