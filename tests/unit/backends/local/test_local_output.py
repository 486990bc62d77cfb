"""Unit tests of a node's output on the machine: bounded, and addressed by byte."""

from pathlib import Path

from envscaler_airflow.backends.local.files import OutputWriter, read_output


def text(folder, since=0):
    """Return everything that is kept from byte *since* on."""
    return b"".join(read_output(folder, since))


def write(folder, *chunks, kept=3):
    """Write chunks in segments of 10 bytes."""
    writer = OutputWriter(folder, segment_bytes=10, kept_segments=kept)
    for chunk in chunks:
        writer.write(chunk)
    writer.close()


def test_output_is_read_from_any_byte(tmp_path):
    """Across segments too."""
    write(tmp_path, b"0123456789", b"abcde")

    assert text(tmp_path) == b"0123456789abcde"
    assert text(tmp_path, 8) == b"89abcde"
    assert text(tmp_path, 12) == b"cde"
    assert text(tmp_path, 99) == b""


def test_the_oldest_segments_go(tmp_path):
    """Five full segments, three are kept; offsets do not change."""
    write(tmp_path, *(bytes([48 + i]) * 10 for i in range(5)))

    assert text(tmp_path) == b"2" * 10 + b"3" * 10 + b"4" * 10
    assert text(tmp_path, 45) == b"4" * 5


def test_a_second_writer_goes_on_after_the_first(tmp_path):
    """A restarted sidecar appends."""
    write(tmp_path, b"one ")
    write(tmp_path, b"two")

    assert text(tmp_path) == b"one two"


def test_nothing_written_is_nothing_read(tmp_path):
    """The same for an absent folder."""
    write(tmp_path / "made")

    assert text(tmp_path / "made") == b""
    assert text(tmp_path / "absent") == b""


def test_a_full_disk_loses_bytes_and_not_the_caller(tmp_path):
    """The node keeps running."""
    writer = OutputWriter(tmp_path)
    real, writer._file = writer._file, Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # closed below

    writer.write(b"x")

    writer._file.close()
    writer._file = real
    writer.write(b"y")
    writer.close()
    assert text(tmp_path) == b"y"
