"""Possible answers of S3, by a scripted client without network."""

import io
import sys
from types import SimpleNamespace

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.response import StreamingBody
from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError
from urllib3.response import HTTPResponse

from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.store import open_store
from envscaler_airflow.store.s3 import S3Store


def refusal(status, code):
    """What botocore raises when S3 answers with *status* and *code*."""
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "PutObject")


class NoSuchKeyError(ClientError):
    """As botocore makes it for each service."""


def listed(*keys):
    """A listing's objects with *keys*."""
    return [{"Key": key, "Size": 1} for key in keys]


class Client:
    """Gives the next scripted answer to each call, and records the call."""

    class exceptions:  # noqa: N801 - botocore's name
        """Where botocore keeps a service's own errors."""

        NoSuchKey = NoSuchKeyError

    def __init__(self, *answers):
        """Answer with *answers*, in order."""
        self.answers = list(answers)
        self.calls = []
        self.meta = SimpleNamespace(events=self)
        self.tell = None

    def register(self, event, handler):
        """Register *handler* for every answer, as botocore's events do."""
        assert event == "after-call.s3"
        self.tell = handler

    def __getattr__(self, name):
        """Any method of the service."""

        def call(**arguments):
            self.calls.append((name, arguments))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def store_of(*answers, **options):
    """A store whose client is scripted."""
    return S3Store("bucket", "root", {"client": Client(*answers), **options})


@pytest.mark.parametrize("status", [409, 412])
def test_exists_and_conflict_are_lost_races(status):
    """412: another writer was first. 409: another writer is in progress."""
    store = store_of(refusal(status, "PreconditionFailed"))

    assert store.create("a", b"1") is False
    assert store._client.calls == [
        ("put_object", {"Bucket": "bucket", "Key": "root/a", "Body": b"1", "IfNoneMatch": "*"})
    ]


@pytest.mark.parametrize(
    ("error", "status", "transient"),
    [
        (refusal(500, "InternalError"), 500, True),
        (refusal(503, "SlowDown"), 503, True),
        (refusal(429, "TooManyRequests"), 429, True),
        (refusal(400, "RequestTimeout"), 400, True),
        (refusal(403, "AccessDenied"), 403, False),
        (refusal(404, "NoSuchBucket"), 404, False),
        (EndpointConnectionError(endpoint_url="http://x"), None, True),
        (ReadTimeoutError(endpoint_url="http://x"), None, True),
        (NoCredentialsError(), None, False),
    ],
)
@pytest.mark.parametrize("method", ["create", "write", "read", "delete", "size", "names"])
def test_what_cannot_be_told_is_an_error_and_never_absent(error, status, transient, method):
    """Every answer except 404 for this key, and whether it is transient."""
    store = store_of(error, error)
    store._client.get_paginator = lambda _name: Paginator(error)

    with pytest.raises(StoreError) as caught:
        getattr(store, method)(*{"create": ("a", b""), "write": ("a", b"")}.get(method, ("a",)))
    assert (caught.value.status, caught.value.transient) == (status, transient)
    assert "s3://bucket/root/a" in str(caught.value)


class Paginator:
    """A paginator that fails when it is read."""

    def __init__(self, error):
        """Fail with *error*."""
        self._error = error

    def paginate(self, **_arguments):
        """Fail at the first page."""
        raise self._error
        yield


def test_forbidden_names_the_missing_permission():
    """Without ListBucket S3 returns 403 for a missing object; the message explains it."""
    with pytest.raises(StoreError, match="s3:ListBucket"):
        store_of(refusal(403, "AccessDenied")).read("a")


def test_a_missing_object_is_told_from_a_missing_bucket():
    """HEAD returns 404 for both; the object is absent only if the bucket exists."""
    assert store_of(refusal(404, "404"), {}).size("a") is None
    with pytest.raises(StoreError):
        store_of(refusal(404, "404"), refusal(404, "404")).size("a")


def cut_body():
    """A download that breaks in the middle, with the exceptions that botocore raises."""
    raw = HTTPResponse(
        io.BytesIO(b"half"), {"content-length": "10"}, preload_content=False, enforce_content_length=True
    )
    return StreamingBody(raw, 10)


def test_a_read_that_breaks_is_an_error():
    """Half an object is not the object."""
    with pytest.raises(StoreError, match=r"\b4 (bytes )?read") as caught:
        store_of({"Body": cut_body(), "ContentLength": 10}).read("a")
    assert caught.value.transient


@pytest.mark.parametrize(
    "error", [RetriesExceededError(ResponseStreamingError(error="cut")), S3DownloadFailedError("cut")]
)
def test_a_download_that_breaks_again_and_again_is_an_error(monkeypatch, tmp_path, error):
    """Neither the sidecar nor a page ends in a traceback, and there is no file at the path."""

    def broken(*_arguments):
        raise error

    store = store_of()
    monkeypatch.setattr(store._client, "download_fileobj", broken, raising=False)

    with pytest.raises(StoreError, match=r"the download broke off: .*cut") as caught:
        store.get_file("a", tmp_path / "a")
    assert caught.value.transient
    assert list(tmp_path.iterdir()) == []


def test_manifests_are_deleted_by_a_request_of_their_own():
    """S3 promises no order within one request."""
    keys = ["root/c/a", "root/c/manifest.json", "root/c/z"]
    store = store_of({}, {})
    store._listed = lambda _below: listed(*keys)

    store.delete_tree("c")

    deleted = [[item["Key"] for item in call[1]["Delete"]["Objects"]] for call in store._client.calls]
    assert deleted == [["root/c/manifest.json"], ["root/c/a", "root/c/z"]]


def test_a_thousand_keys_go_by_one_request():
    """1,001 keys need two requests."""
    store = store_of({}, {})
    store._listed = lambda _below: listed(*(f"root/c/{number}" for number in range(1001)))

    store.delete_tree("c")

    assert [len(call[1]["Delete"]["Objects"]) for call in store._client.calls] == [1000, 1]


def test_what_is_not_deleted_is_an_error():
    """DeleteObjects returns 200 and lists the keys that it refused."""
    store = store_of({"Errors": [{"Key": "root/c/a", "Code": "AccessDenied"}]})
    store._listed = lambda _below: listed("root/c/a")

    with pytest.raises(StoreError, match=r"root/c/a: not deleted: AccessDenied") as caught:
        store.delete_tree("c")
    assert not caught.value.transient


def test_names_that_no_store_would_write_are_not_listed():
    """A console's folder object, and foreign keys with ``..`` or two slashes."""
    store = store_of()
    store._listed = lambda _below: listed("root/c/", "root/c/../x", "root/c//y", "root/c/z")

    assert store.names("c") == ["c/z"]


def test_every_upload_carries_the_extra_arguments():
    """They satisfy a bucket that requires a KMS key."""
    extra = {"ServerSideEncryption": "aws:kms"}
    store = store_of({}, {}, extra_args=extra)

    store.write("a", b"1")
    store.create("b", b"1")

    assert [call[1]["ServerSideEncryption"] for call in store._client.calls] == ["aws:kms", "aws:kms"]


def test_an_unknown_option_names_the_nearest():
    """A typo is found before the first request."""
    with pytest.raises(SpecError, match="did you mean endpoint_url"):
        S3Store("bucket", "", {"endpoint": "http://x"})


def test_options_reach_the_client():
    """Endpoint, region and botocore's own settings; changing one timeout keeps the other defaults."""
    options = {"endpoint_url": "http://minio:9000", "region_name": "eu-west-1", "config": {"read_timeout": 5}}

    client = S3Store("bucket", "", options)._client

    assert client.meta.endpoint_url == "http://minio:9000"
    assert client.meta.region_name == "eu-west-1"
    assert (client.meta.config.read_timeout, client.meta.config.connect_timeout) == (5, 10)


def test_without_boto3_the_extra_is_named(monkeypatch):
    """The message is the command to run."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "envscaler_airflow.store.s3")

    with pytest.raises(SpecError, match=r"pip install 'envscaler-airflow\[amazon\]'"):
        open_store("s3://bucket/x")
