"""External programs: their output as it comes, also if others write to it or keep it open."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import BackendError
from envscaler_airflow.images.programs import stream_program


def test_lines_come_whole_and_progress_is_lines_too():
    """Invalid UTF-8 becomes a replacement mark, and the last line needs no newline."""
    lines: list[str] = []

    code = stream_program(["sh", "-c", r"printf '1%%\r2%%\nb\377d\nno end'; exit 3"], lines.append)

    assert (code, lines) == (3, ["1%", "2%", "b�d", "no end"])


def test_what_writes_to_the_fifo_is_heard_in_its_place(tmp_path):
    """Like a container whose builder forwards only a part."""
    fifo, lines = tmp_path / "output", []

    code = stream_program(
        ["sh", "-c", f"echo builder; sh -c 'exec >{fifo}; echo inside'; echo again"], lines.append, fifo=fifo
    )

    assert (code, lines) == (0, ["builder", "inside", "again"])


def test_who_keeps_the_output_open_keeps_nobody_waiting():
    """A process that a stage left behind."""
    lines: list[str] = []

    assert stream_program(["sh", "-c", "sleep 3 & echo done"], lines.append) == 0
    assert lines == ["done"]


def test_a_program_that_is_not_there_is_reported(tmp_path):
    """No pipe is left open, which would be a warning."""
    with pytest.raises(BackendError, match="cannot be started"):
        stream_program([str(tmp_path / "none")], print, fifo=tmp_path / "output")
