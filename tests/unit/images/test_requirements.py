"""Requirements files have any content: they are read, or refused with file and line."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.requirement_files import (
    MAX_BYTES,
    Requirements,
    read_requirements,
)

PIECES = [
    "attrs", "==1", "-r ", "-c ", "--requirement=", "-e ", "./x", "/etc/passwd", "..", '"', "'", "\\\n", "\n",
    "\r", "\x0c", "\x85", "\u2028", "#", " ", "--index-url ", "https://u:", "p@h/", "file:", " @ ", ";",
    "requirements.txt", "other.txt", "--hash=sha256:", "$HOME", "\0", "https://h/x.txt", "--find-links ",
]  # fmt: skip


def read(folder, text: str | bytes, name: str = "requirements.txt") -> Requirements:
    """Requirements of a stage whose file *name* contains *text*."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return of(folder, name)


def of(folder, name: str) -> Requirements:
    """Requirements of a stage that names the file."""
    body = {
        "version": "v1", "name": "s", "runtimes": [{"type": "python", "requirements": name}],
        "base_dirs": {"runtimes[0].requirements": str(folder)},
    }  # fmt: skip
    return read_requirements(EnvSpec.from_dict(body))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join))
def test_any_file_is_read_or_refused(tmp_path, text):
    """Nothing of the machine outside its folder gets into the result."""
    try:
        got = read(tmp_path, text)
    except SpecError:
        return
    assert all(not name.startswith(("/", "..")) for name in got.files)
    assert "root:" not in "".join(got.files.values())


@pytest.mark.parametrize("line", ['-r "a b.txt"', "-r 'a.txt", '-c "', "--requirement=\\"])
def test_a_name_in_quotes_that_do_not_close_is_a_fault(tmp_path, line):
    """With its line."""
    with pytest.raises(SpecError, match=r"requirements.txt:2|requirements.txt cannot|cannot be read"):
        read(tmp_path, f"attrs\n{line}\n")


def test_a_comment_does_not_go_on_in_the_next_line(tmp_path):
    """The next line is a line of its own to pip, after any line break; so it is checked."""
    with pytest.raises(SpecError, match=r"requirements\.txt:2: installs from this machine"):
        read(tmp_path, "# a note \\\n-e ./local\n")


def test_a_name_in_quotes_is_that_file(tmp_path):
    """As pip reads it."""
    (tmp_path / "more ones.txt").write_text("attrs\n")

    assert set(read(tmp_path, '-r "more ones.txt"\n').files) == {"requirements.txt", "more ones.txt"}


@pytest.mark.parametrize(
    "text", ["https://me:pass\\\nword@example.com/x.whl\n", "--index-url https://me:\\\nword@example.com\n"]
)
def test_a_password_over_two_lines_is_a_password(tmp_path, text):
    """A backslash at the end of a line joins it with the next, for pip and for us."""
    with pytest.raises(SpecError, match="contains a user or password"):
        read(tmp_path, text)


def test_an_editable_over_two_lines_installs_from_this_machine(tmp_path):
    """Here too a backslash joins the lines."""
    with pytest.raises(SpecError, match=r"requirements.txt:2: installs from this machine"):
        read(tmp_path, "attrs\n-\\\ne ./mine\n")


def test_what_is_no_file_or_too_large_is_not_read(tmp_path):
    """A pipe without a writer, a device without an end, a folder, a link to one of them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))

    for name, fault in [("pipe", "a plain file"), ("folder", "a plain file"), ("large", "larger than")]:
        with pytest.raises(SpecError, match=fault):
            of(tmp_path, name)


def test_a_file_whose_name_an_installer_would_take_apart_is_refused(tmp_path):
    """The combined file names it without quotes, which pip and uv read in different ways."""
    with pytest.raises(SpecError, match="rename it"):
        read(tmp_path, "attrs\n", name="my requirements.txt")
