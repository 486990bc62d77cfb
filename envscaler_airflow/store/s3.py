"""The run store in a bucket: ``s3://`` URLs, using boto3."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import boto3
import boto3.exceptions
import boto3.session
from botocore import UNSIGNED
from botocore import exceptions as refusals
from botocore.config import Config
from s3transfer import exceptions as transfers

from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.store.clock import DatedStore, StoreDates, date_of
from envscaler_airflow.store.keys import (
    AT_ONCE,
    MAX_BYTES,
    arriving,
    check_name,
    check_prefix,
    check_tree,
    is_manifest,
    is_name,
    join,
    reading,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef, ObjectTypeDef

_SESSION_OPTIONS = frozenset(
    {"aws_access_key_id", "aws_secret_access_key", "aws_session_token", "profile_name", "region_name"}
)
_CLIENT_OPTIONS = frozenset({"endpoint_url", "verify"})
_OPTIONS = _SESSION_OPTIONS | _CLIENT_OPTIONS | {"session", "client", "config", "extra_args"}
_ONE_REQUEST_BYTES = 8 << 20
"""Files up to this size are uploaded in one PUT, without threads. Source: boto3, multipart_threshold."""
_BATCH = 1000
"""Keys deleted by one request. Source: Amazon S3 API reference, DeleteObjects."""
_TRANSIENT = frozenset(
    {
        "OperationAborted", "RequestTimeout", "SlowDown", "Throttling", "ThrottlingException",
        "ConditionalRequestConflict",
    }
)  # fmt: skip
_CUT = tuple(
    getattr(transfers, name)
    for name in ("RetriesExceededError", "S3DownloadFailedError", "S3ValidationError")
    if hasattr(transfers, name)  # the last is newer than the oldest boto3 that we support
)
"""Errors of a download that failed repeatedly, or whose object was replaced meanwhile."""
_CONFIG: dict[str, Any] = {
    # Chosen: a trigger's thread must return within about a minute even if the network fails.
    "connect_timeout": 10,
    "read_timeout": 30,
    "max_pool_connections": 32,  # chosen: many small files go up at once, beside parts of large ones
    "retries": {"mode": "standard", "total_max_attempts": 4},
}


class S3Store(DatedStore):
    """Objects below ``s3://bucket/prefix``.

    ``create`` is a PUT with ``If-None-Match: *``: exactly one of two creators wins. S3 returns 412 to the
    other, or 409 while both are in progress. A store behind *endpoint_url* must support this header too
    (MinIO, Ceph, Cloudflare R2 do); :func:`check_store` checks it. botocore repeats failed requests, so
    "exists" can refer to our own object: a caller that must know reads it back.

    The identity needs GetObject, PutObject, DeleteObject and, on the bucket, ListBucket; without ListBucket,
    S3 returns 403 instead of 404.
    """

    def __init__(self, bucket: str, prefix: str = "", options: Mapping[str, Any] | None = None) -> None:
        """Use *bucket* with the credentials that boto3 finds, or those in *options*.

        Args:
            bucket: Name of the bucket.
            prefix: Folder within it.
            options: ``endpoint_url``, ``region_name``, ``profile_name``, ``aws_access_key_id``,
                ``aws_secret_access_key``, ``aws_session_token``, ``verify``; ``config`` for
                botocore's Config; ``extra_args`` for every upload (e.g. ``ServerSideEncryption``);
                ``session`` or ``client`` for a boto3 object made elsewhere.

        Raises:
            SpecError: An option is not known.
        """
        super().__init__()
        self._bucket = bucket
        self._prefix = check_prefix(prefix)
        given = dict(options or {})
        _refuse_unknown(given)
        self._extra: dict[str, Any] = dict(given.get("extra_args") or {})
        self._client = _client(given)
        self.url = f"s3://{join(bucket, self._prefix)}"
        self._client.meta.events.register("after-call.s3", _tells(self._dates))

    at_once = AT_ONCE

    def _ask_date(self) -> None:
        with self._store_errors(""):
            self._client.head_bucket(Bucket=self._bucket)

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """Bytes of *name* and its LastModified; None when it is absent."""
        with self._store_errors(name):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            except self._client.exceptions.NoSuchKey:
                return None
            # The body's own "with" returns the underlying stream, whose errors are those of urllib3.
            with closing(answer["Body"]) as body:
                size = answer["ContentLength"]
                data = body.read() if size <= max_bytes else b""
        self._check_size(name, size, max_bytes)
        return data, date_of(answer.get("LastModified"))

    def write(self, name: str, data: bytes) -> None:
        """Write *data* to *name*, atomically; replaces an existing object."""
        with self._store_errors(name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data, **self._extra)

    def create(self, name: str, data: bytes) -> bool:
        """Write *data* to *name* unless it exists; return True if this call created it."""
        key = self._key(name)
        with self._store_errors(name):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*", **self._extra
                )
            except refusals.ClientError as err:
                if _status(err) in (409, 412):
                    return False
                raise
        return True

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """Upload a local file to *name*, in parts when large; it becomes visible when complete."""
        key = self._key(name)
        with reading(source) as stream, self._store_errors(name):
            if os.fstat(stream.fileno()).st_size <= _ONE_REQUEST_BYTES:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=stream, **self._extra)
            else:
                self._client.upload_fileobj(stream, self._bucket, key, ExtraArgs=self._extra or None)

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """Download *name* to a local file; atomically if the target is a path."""
        key = self._key(name)
        with arriving(target) as stream, self._store_errors(name):
            self._client.download_fileobj(self._bucket, key, stream)

    def size(self, name: str) -> int | None:
        """Bytes of *name*; None when it is absent."""
        found = self._head(name)
        return None if found is None else found["ContentLength"]

    def version(self, name: str) -> str | None:
        """ETag of *name*; None when it is absent."""
        found = self._head(name)
        return None if found is None else found["ETag"]

    def _head(self, name: str) -> HeadObjectOutputTypeDef | None:
        key = self._key(name)
        with self._store_errors(name):
            try:
                return self._client.head_object(Bucket=self._bucket, Key=key)
            except refusals.ClientError as err:
                if _status(err) != 404:
                    raise
            # A HEAD response has no body, so a missing bucket looks like a missing object.
            self._client.head_bucket(Bucket=self._bucket)
        return None

    def delete(self, name: str) -> None:
        """Delete *name*; do nothing if it is absent."""
        with self._store_errors(name):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below *prefix*, manifests first."""
        bare = check_tree(prefix)
        with self._store_errors(bare):
            keys = [item["Key"] for item in self._listed(self._below(bare))]
            manifests = [key for key in keys if is_manifest(key)]
            # Within one request S3 does not guarantee an order.
            for batch in (*_batches(manifests), *_batches([key for key in keys if not is_manifest(key)])):
                self._delete_batch(batch)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every name below *prefix*, a thousand per request."""
        bare = check_prefix(prefix)
        skip = len(self._below(""))
        with self._store_errors(bare):
            # Consoles create "folders" as empty objects whose keys end with a slash; skip them.
            found = {item["Key"][skip:]: item["Size"] for item in self._listed(self._below(bare))}
        return {name: size for name, size in found.items() if is_name(name)}

    def children(self, prefix: str) -> list[str]:
        """First parts of the names below *prefix*, sorted."""
        bare = check_prefix(prefix)
        below = self._below(bare)
        with self._store_errors(bare):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=below, Delimiter="/"
            )
            found: set[str] = set()
            for page in pages:
                found.update(item["Key"][len(below) :] for item in page.get("Contents", ()))
                found.update(item["Prefix"][len(below) : -1] for item in page.get("CommonPrefixes", ()))
        return sorted(name for name in found if is_name(name))

    def uri(self, name: str) -> str:
        """``s3://bucket/key`` of *name*."""
        return f"s3://{join(self._bucket, join(self._prefix, check_prefix(name)))}"

    def _key(self, name: str) -> str:
        return join(self._prefix, check_name(name))

    def _below(self, bare: str) -> str:
        whole = join(self._prefix, bare)
        return f"{whole}/" if whole else ""

    def _listed(self, below: str) -> Iterator[ObjectTypeDef]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=below)
        return (item for page in pages for item in page.get("Contents", ()))

    def _delete_batch(self, keys: list[str]) -> None:
        answer = self._client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        for error in answer.get("Errors", ()):
            code, key = error.get("Code", "unknown error"), error.get("Key", "?")
            raise StoreError(
                f"s3://{self._bucket}/{key}: not deleted: {code}",
                transient=code in _TRANSIENT or code == "InternalError",
            )

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except refusals.ClientError as err:
            raise self._refused(err, name) from err
        except (refusals.NoCredentialsError, refusals.PartialCredentialsError) as err:
            raise StoreError(
                f"{self.uri(name)}: {err}: give the connection or the machine AWS credentials"
            ) from err
        except (refusals.ParamValidationError, refusals.ProfileNotFound) as err:
            raise StoreError(f"{self.uri(name)}: {err}") from err
        except (refusals.BotoCoreError, boto3.exceptions.Boto3Error) as err:
            raise StoreError(f"{self.uri(name)}: no answer: {err}", transient=True) from err
        except _CUT as err:
            why = getattr(err, "last_exception", err)
            raise StoreError(f"{self.uri(name)}: the download broke off: {why}", transient=True) from err

    def _refused(self, err: refusals.ClientError, name: str) -> StoreError:
        status, code = _status(err), err.response.get("Error", {}).get("Code", "")
        hint = ""
        if status == 403:
            hint = " (without s3:ListBucket on the bucket S3 also says this of what is absent)"
        elif code == "NoSuchBucket" or status == 404:
            hint = " (no such bucket or object)"
        return StoreError(
            f"{self.uri(name)}: {err}{hint}",
            status=status,
            transient=status is None or status >= 500 or status == 429 or code in _TRANSIENT,
        )


def _tells(dates: StoreDates) -> Callable[..., None]:
    """Return a hook that records the date of every response of a client, including errors."""

    def take(http_response: Any = None, **_more: object) -> None:
        headers = getattr(http_response, "headers", None) or {}
        dates.seen(date_of(headers.get("date")))

    return take


def _batches(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _BATCH):
        yield keys[start : start + _BATCH]


def _status(err: refusals.ClientError) -> int | None:
    status: int | None = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            near = get_close_matches(name, sorted(_OPTIONS), n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(_OPTIONS))}"
            raise SpecError(f"store option {name!r} is not known for s3://{hint}")


def _client(options: Mapping[str, Any]) -> S3Client:
    if options.get("client") is not None:
        client: S3Client = options["client"]
        return client
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        return _made_client(chosen)
    except (refusals.BotoCoreError, ValueError, TypeError) as err:  # names only, no values
        names = ", ".join(chosen) or "no options"
        raise SpecError(
            f"store s3://: cannot be opened with {names}: {err}: set the store connection's options, "
            "or AWS_PROFILE"
        ) from err


def _made_client(chosen: Mapping[str, Any]) -> S3Client:
    session = chosen.get("session") or boto3.session.Session(
        **{name: chosen[name] for name in _SESSION_OPTIONS & chosen.keys()}
    )
    given = {**_CONFIG, **chosen.get("config", {})}
    if given.get("signature_version") == "unsigned":  # as Airflow's connections write it
        given["signature_version"] = UNSIGNED
    config = Config(**given)
    made: S3Client = session.client(
        "s3", config=config, **{name: chosen[name] for name in _CLIENT_OPTIONS & chosen.keys()}
    )
    return made
