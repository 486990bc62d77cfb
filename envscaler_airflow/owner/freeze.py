"""Freeze what a generation runs, its spec and code, in the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.envspec import EnvSpec, parse_reference, spec_hash
from envscaler_airflow.errors import SpecError
from envscaler_airflow.launch import batches, launch_of
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.run import AttemptState
from envscaler_airflow.store.archive import pack_workdir
from envscaler_airflow.store.run import ARCHIVE_FIELD, RUN, Run, spec_name
from envscaler_airflow.store.run_store import Store, folder_of


@dataclass(frozen=True, slots=True)
class Frozen:
    """A spec with its code, ready to be written to the store.

    Attributes:
        spec_hash: Over the resolved spec, parameters, inputs, and the content of the workdir.
        document: Content of the frozen spec's file.
        archive: Packed workdir on this machine, None without a workdir; the caller deletes it.
        archive_name: Name of the archive in the store.
    """

    spec_hash: str
    document: Mapping[str, Any]
    archive: Path | None = None
    archive_name: str | None = None

    def discard(self) -> None:
        """Delete the packed workdir from this machine."""
        if self.archive is not None:
            self.archive.unlink(missing_ok=True)


def freeze(spec: EnvSpec, store: Store) -> Frozen:
    """Pack the workdir, without a *store* inside it, and hash everything that decides what runs.

    Raises:
        SpecError: The spec runs nothing, its global batch cannot be kept on every number of nodes that it
            allows, or its workdir cannot be packed: missing, too large, or with links that lead out of it.
    """
    if not spec.entrypoint:
        raise SpecError(f"{spec.name}: entrypoint: is empty; write entrypoint: [python, train.py]")
    batches(spec)
    document = spec.to_dict()
    digest = spec_hash(spec)
    folder = spec.resolve_path("workdir")
    if folder is None:
        return Frozen(digest, document)
    packed = pack_workdir(folder, store=folder_of(store))
    whole = hashlib.sha256(f"{digest} {packed.sha256}".encode()).hexdigest()
    return Frozen(whole, {**document, ARCHIVE_FIELD: packed.name}, packed.path, packed.name)


def write(run: Run, frozen: Frozen) -> None:
    """Write code, key and spec to *run*, in an order that is safe to interrupt at any point.

    Nothing runs on it before an event names its hash.

    Raises:
        StoreError: The store cannot be written.
    """
    if frozen.archive is not None and frozen.archive_name and run.size(frozen.archive_name) is None:
        run.put_file(frozen.archive_name, frozen.archive)
    made = {"schema": SCHEMA, "key": run.key().to_dict(), "at": run.store.now()}
    run.create(RUN, json.dumps(made, indent=1).encode())
    run.write(spec_name(frozen.spec_hash), json.dumps(frozen.document, indent=1).encode())


MAX_DIFFERENCES = 10
"""Differing fields that a log line names. Chosen: more than a person reads."""


def differences(run: Run, spec_hash: str, frozen: Frozen) -> str:
    """Return the fields of *frozen* that differ from that spec: ``entrypoint, resources.requests.cpu``.

    Raises:
        StoreError: The store cannot be read.
        ProtocolError: The spec does not exist.
    """
    paths = _differing(run.document(spec_hash), frozen.document, "")
    found = sorted("the files of workdir" if path == ARCHIVE_FIELD else path for path in paths)
    more = len(found) - MAX_DIFFERENCES
    names = ", ".join(found[:MAX_DIFFERENCES])
    return f"{names} and {more} more" if more > 0 else names


def _differing(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one.keys() | other.keys():
            yield from _differing(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    elif json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
        yield path


def named_request(run: Run, live: AttemptState) -> AttemptRequest:
    """Return a request that identifies the attempt: enough to find what was started for it."""
    key = run.key()
    return AttemptRequest(
        store_url=run.store.url,
        run_prefix=key.prefix,
        run_label=f"{key.dag_id}.{key.task_id}",
        generation=live.generation,
        attempt=live.number,
        allocation=live.allocation,
    )


def attempt_request(
    run: Run,
    stage: Stage,
    spec: EnvSpec,
    live: AttemptState,
    *,
    spec_hash: str,
    grace_s: float,
    deadline_s: float | None = None,
) -> AttemptRequest:
    """Return the request that the backend starts. Secrets are resolved here and passed only to its call.

    A stage with several processes is started by its launcher, for as many nodes as this attempt has.

    Raises:
        SpecError: A secret cannot be resolved, or this number of nodes cannot keep the global batch.
    """
    archive = run.document(spec_hash).get(ARCHIVE_FIELD)
    launch = launch_of(spec, live.allocation.nodes, workdir_archive=archive)
    return replace(
        named_request(run, live),
        launch=launch.resized(memory_bytes=live.memory_bytes, vcpus=live.vcpus),
        secret_env=_secrets(stage, spec),
        store_options=stage.store_options,
        store_login=stage.store_login,
        grace_s=grace_s,
        deadline_s=deadline_s,
        python=stage.python,
    )


def _secrets(stage: Stage, spec: EnvSpec) -> dict[str, str]:
    values = {}
    for item in spec.env:
        if item.value_from is None:
            continue
        if stage.resolve_secret is None:
            raise SpecError(f"env {item.name}: {item.value_from} cannot be resolved here")
        reference = parse_reference(item.value_from, variable=item.name)
        values[item.name] = stage.resolve_secret(str(reference))
    return values
