"""Unit tests of a node's output on the machine: bounded, in order."""

from pathlib import Path

from envscaler_airflow.backends.local.files import OutputWriter


def text(folder):
    """Return everything that is kept."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))


def write(folder, *chunks, kept=3):
    """Write chunks in segments of 10 bytes."""
    writer = OutputWriter(folder, segment_bytes=10, kept_segments=kept)
    for chunk in chunks:
        writer.write(chunk)
    writer.close()


def test_segments_are_named_by_their_first_byte(tmp_path):
    """The second begins at byte 10."""
    write(tmp_path, b"0123456789", b"abcde")

    assert text(tmp_path) == b"0123456789abcde"
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "000000000000000.log",
        "000000000000010.log",
    ]


def test_the_oldest_segments_go(tmp_path):
    """Five full segments, three are kept."""
    write(tmp_path, *(bytes([48 + i]) * 10 for i in range(5)))

    assert text(tmp_path) == b"2" * 10 + b"3" * 10 + b"4" * 10


def test_a_second_writer_goes_on_after_the_first(tmp_path):
    """A restarted sidecar appends."""
    write(tmp_path, b"one ")
    write(tmp_path, b"two")

    assert text(tmp_path) == b"one two"


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
