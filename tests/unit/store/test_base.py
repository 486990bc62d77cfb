"""Opening and checking a store, and the name of a deployment."""

import json
import subprocess
import sys

import pytest

from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.store import check_store, deployment_of, open_store


@pytest.mark.parametrize(
    "url", ["", "runs", "./runs", "../runs", "file://host/runs", "file://", "file:/runs"]
)
def test_a_folder_must_be_absolute(url):
    """A relative one would differ between processes."""
    with pytest.raises(SpecError, match="not an absolute path"):
        open_store(url)


def test_a_bucket_must_be_named():
    """``s3:///x`` has none."""
    with pytest.raises(SpecError, match="names no bucket"):
        open_store("s3:///x")


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/x", "sftp://me:hunter2@host/x"])
def test_credentials_in_a_url_are_refused_unsaid(url):
    """Logs would contain them; the message does not repeat them."""
    with pytest.raises(SpecError, match="use a connection") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


class Faulty:
    """A store with one fault."""

    def __init__(self, store, **faults):
        """Replace methods of *store* by *faults*."""
        self._store = store
        self.__dict__.update(faults)

    def __getattr__(self, name):
        """Every other method works."""
        return getattr(self._store, name)


def refuse(*_args, **_kwargs):
    """Fail as a store does."""
    raise StoreError("Permission denied", status=403)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"create": refuse}, "Permission denied"),
        ({"create": lambda *_: False}, "the store reported that a new name exists"),
        ({"create": lambda *_: True}, "created twice"),
        ({"write": refuse}, "Permission denied"),
        ({"write": lambda *_: None}, "not read back"),
        ({"read": refuse}, "Permission denied"),
        ({"delete": refuse}, "Permission denied"),
        ({"delete": lambda *_: None}, "still there"),
    ],
)
def test_a_store_that_does_not_do_what_it_says_is_refused(tmp_path, fault, says):
    """The message names the fault and who must see the same store."""
    store = Faulty(open_store(str(tmp_path)), **fault)

    with pytest.raises(StoreError, match=says) as caught:
        check_store(store, "deployment")
    assert "operator, triggerer, API server and sidecar must all see the same store" in str(caught.value)
    assert caught.value.status == (403 if fault in [{k: refuse} for k in fault] else None)


def test_a_folder_keeps_the_uuid_that_came_first(tmp_path, monkeypatch):
    """Two processes that create it at once agree: the create decides, and both read."""
    store, other = open_store(str(tmp_path / "s")), open_store(str(tmp_path / "s"))
    theirs = []
    real = store.create
    store.create = lambda name, data: (theirs.append(deployment_of(other, None)), real(name, data))[1]

    assert deployment_of(store, None) == theirs[0]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"schema":"2.0","deployment":"../x"}', b'{"schema":"2.0"}']
)
def test_a_foreign_deployment_file_is_refused(tmp_path, text):
    """An invalid uuid never becomes part of a path."""
    (tmp_path / "deployment.json").write_bytes(text)

    with pytest.raises(ProtocolError, match=r"deployment\.json"):
        deployment_of(open_store(str(tmp_path)), None)


def test_a_newer_deployment_file_is_read(tmp_path):
    """A later minor version may add fields."""
    known = "12345678-1234-5678-1234-567812345678"
    (tmp_path / "deployment.json").write_text(json.dumps({"schema": "2.9", "deployment": known, "more": 1}))

    assert deployment_of(open_store(str(tmp_path)), "  ") == known


def test_importing_the_store_costs_no_sdk():
    """A DAG file that imports an operator must not load boto3, fsspec or pydantic."""
    code = (
        "import sys, envscaler_airflow.store as s; s.open_store('/x');"
        "print([m for m in ('boto3', 'botocore', 'fsspec', 'pydantic', 'airflow') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
