"""A store that cannot be read or created, in the CLI: a clear error, never an empty table."""

from __future__ import annotations

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.spec import AbstractFileSystem

from envscaler_airflow.cli import main
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.store import check_store, open_store


class Unreachable(AbstractFileSystem):
    """A host that does not answer, and one with a folder that cannot be listed."""

    protocol = "unreachable"

    def ls(self, path, detail=True, **_more):  # noqa: FBT002 - fsspec's signature
        """Fail as fsspec's http does without a route: with an OSError other than FileNotFoundError."""
        name = self._strip_protocol(path)
        if name == "here":
            return [{"name": "here/away", "size": 0, "type": "directory"}] if detail else ["here/away"]
        raise ConnectionError(f"cannot connect to {path}")


@pytest.fixture(autouse=True)
def unreachable():
    """Register it with fsspec."""
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)


@pytest.mark.parametrize("url", ["unreachable://nohost/x", "unreachable://here"])
@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["report", "x"], ["logs", "x"]])
def test_a_store_that_does_not_answer_is_an_error_and_no_empty_table(url, words):
    """A host without an answer, and a folder that cannot be listed below one that can (F8)."""
    got = CliRunner().invoke(main, [*words, "--store", url])

    assert got.exit_code == 2
    assert got.stdout == ""
    assert "ConnectionError: cannot connect to" in got.stderr


def test_an_empty_store_is_no_error(tmp_path):
    """No run exists there yet (F8)."""
    (tmp_path / "store").mkdir()

    got = CliRunner().invoke(main, ["status", "--store", f"file://{tmp_path}/store"])

    assert (got.exit_code, got.stdout.startswith("no run in")) == (0, True)
    assert open_store("memory://nothing-here").names("") == []


def test_a_folder_that_cannot_be_made_is_said_to_be():
    """The error names the reason, and not that the folder keeps being removed (F8)."""
    with pytest.raises(StoreError, match="store folder /proc/no/store cannot be created: No such") as caught:
        check_store(open_store("file:///proc/no/store"))

    assert not caught.value.transient


def test_a_link_to_nothing_is_named(tmp_path):
    """A missing mount (F8)."""
    (tmp_path / "store").symlink_to(tmp_path / "mount" / "gone")

    with pytest.raises(StoreError, match="cannot be created: its name is a link to what does not exist"):
        check_store(open_store(f"file://{tmp_path}/store"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile_name": "no-such-profile"}, r"profile \(no-such-profile\) could not be found"),
        ({"endpoint_url": "nohost", "region_name": "us-east-1"}, "Invalid endpoint: nohost"),
        ({"config": {"no_such": 1}}, "no_such"),
    ],
)
def test_s3_options_that_make_no_client_are_a_fault_of_the_settings(options, words):
    """Without a traceback of botocore (F8)."""
    with pytest.raises(SpecError, match=words):
        open_store("s3://bucket/path", options)


def test_a_profile_that_is_not_there_ends_a_command_with_one_line(monkeypatch):
    """AWS_PROFILE names it (F8)."""
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")

    got = CliRunner().invoke(main, ["status", "--store", "s3://bucket/path"])

    assert got.exit_code == 2
    assert "no-such-profile" in got.stderr
    assert "Traceback" not in got.stderr
