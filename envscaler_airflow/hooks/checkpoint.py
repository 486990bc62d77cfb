"""Checkpoints of runs, for DAG code: list, verify, download, delete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from envscaler_airflow.errors import CheckpointError, EnvScalerError
from envscaler_airflow.hooks.settings import CONN_TYPE, StorePlace, store_place

if TYPE_CHECKING:
    from envscaler_agent.protocol import Manifest
    from envscaler_airflow.store import Run, RunKey, Store


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint of a run.

    Attributes:
        name: Folder name, ``g1-step-00000400-a3``.
        uri: Value for ``restore_from``.
        generation, attempt: Attempt that saved it.
        step, epoch, samples: State of the training; None if it did not report them.
        size_bytes: Of all files.
        cooperative: True if the training saved it itself; False for a snapshot of its files.
    """

    name: str
    uri: str
    generation: int
    attempt: int
    step: int | None
    epoch: int | None
    samples: int | None
    size_bytes: int
    cooperative: bool


class CheckpointHook(BaseHook):
    """Reads and deletes the checkpoints of runs in a run store.

    ::

        hook = CheckpointHook()
        key = hook.key("retrain", run_id, "train")
        newest = hook.latest(key)

    Args:
        store_conn_id: Connection of type ``envscaler_store``; None: ``[envscaler] store_url``.
        store_url: Overrides the connection's URL.
    """

    conn_name_attr = "store_conn_id"
    default_conn_name = "envscaler_store_default"
    conn_type = CONN_TYPE
    hook_name = "envscaler run store"

    def __init__(
        self, store_conn_id: str | None = None, *, store_url: str | None = None, **kwargs: Any
    ) -> None:
        """Open nothing yet."""
        super().__init__(**kwargs)
        self.store_conn_id = store_conn_id
        self.store_url = store_url

    @cached_property
    def _place(self) -> StorePlace:
        return store_place(self.store_url, self.store_conn_id)

    @cached_property
    def _store(self) -> Store:
        return self._place.open()

    def get_conn(self) -> Store:
        """Return the run store.

        Raises:
            SpecError: No store is configured, or its URL cannot be used.
        """
        return self._store

    def test_connection(self) -> tuple[bool, str]:
        """Create, overwrite, read and delete one small file."""
        from envscaler_airflow.store import check_store  # noqa: PLC0415  (DAG files do without)

        try:
            check_store(self._store)
        except EnvScalerError as err:
            return False, str(err)
        return True, f"{self._store.url} can be written, read and deleted, each name once"

    def key(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, *, team: str | None = None
    ) -> RunKey:
        """Return the key of the run of a stage in a DAG run of this deployment."""
        from envscaler_airflow.store import RunKey  # noqa: PLC0415  (DAG files do without)

        deployment = self._place.deployment(self._store)
        return RunKey(deployment, dag_id, run_id, task_id, map_index, team)

    def list_checkpoints(self, key: RunKey, *, generation: int | None = None) -> list[Checkpoint]:
        """Return complete checkpoints of *generation* (default: the newest that has any), newest first.

        Torn manifests are left out: no run resumes from such checkpoints.

        Raises:
            StoreError: The store cannot be read.
        """
        return list(self._listed(key, generation))

    def latest(self, key: RunKey, *, generation: int | None = None) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte matches its manifest; None if there is none."""
        for found in self._listed(key, generation):
            try:
                self.verify(key, found.name)
            except CheckpointError as err:
                self.log.warning("%s: %s", found.name, err)
            else:
                return found
        return None

    def verify(self, key: RunKey, name: str) -> Manifest:
        """Verify every byte of a checkpoint against its manifest.

        Raises:
            CheckpointError: Missing, torn, truncated, or with another hash.
            StoreError: The store cannot be read.
        """
        from envscaler_airflow.store import checkpoints, manifests  # noqa: PLC0415  (DAG files do without)

        run = self._run(key)
        manifest = checkpoints.read_checkpoint(run, name)
        return manifests.verify(run, checkpoints.checkpoint_prefix(name), manifest=manifest)

    def download(self, key: RunKey, name: str, target: Path) -> Path:
        """Write a checkpoint to the folder *target*, with every file verified; returns *target*.

        Raises:
            CheckpointError: Missing, torn, truncated, or with another hash.
            StoreError: The store cannot be read.
        """
        from envscaler_airflow.store import checkpoints, manifests  # noqa: PLC0415  (DAG files do without)

        run = self._run(key)
        manifest = checkpoints.read_checkpoint(run, name)
        target.mkdir(parents=True, exist_ok=True)
        manifests.fetch(run, checkpoints.checkpoint_prefix(name), manifest, target)
        return target

    def delete(self, key: RunKey, name: str) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CheckpointError: It is the newest of a run that is not over, or the newest whose files are all
                there with their sizes; or the name is not that of a checkpoint.
            StoreError: The store cannot be written.
        """
        from envscaler_airflow.store import checkpoints  # noqa: PLC0415  (DAG files do without)

        prefix = checkpoints.checkpoint_prefix(name)
        run = self._run(key)
        state = run.events.load()
        if state.status == "active":
            for newer in self._listed(key, state.generation):
                if newer.name == name:
                    raise CheckpointError(f"{name} is kept: the newest good one of a run that goes on")
                if checkpoints.looks_good(run, newer.name):
                    break
        run.delete_tree(prefix)

    def _run(self, key: RunKey) -> Run:
        from envscaler_airflow.store import Run  # noqa: PLC0415  (DAG files do without)

        return Run(self._store, key)

    def _listed(self, key: RunKey, generation: int | None) -> Iterator[Checkpoint]:
        from envscaler_airflow.store import checkpoints  # noqa: PLC0415  (DAG files do without)

        run = self._run(key)
        if generation is None:
            generation = _newest_generation(run)
        for name in checkpoints.complete_checkpoints(run, generation):
            try:
                manifest = checkpoints.read_checkpoint(run, name)
            except CheckpointError as err:
                self.log.warning("%s: %s", name, err)
            else:
                yield _checkpoint_of(name, run.uri(checkpoints.checkpoint_prefix(name)), manifest)


def _newest_generation(run: Store) -> int:
    from envscaler_agent.protocol import parse_checkpoint_name  # noqa: PLC0415  (DAG files do without)

    keys = (parse_checkpoint_name(name) for name in run.children("checkpoints"))
    return max((key[0] for key in keys if key is not None), default=0)


def _checkpoint_of(name: str, uri: str, manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        name=name,
        uri=uri,
        generation=manifest.generation,
        attempt=manifest.attempt,
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
        size_bytes=sum(item.size for item in manifest.files),
        cooperative=manifest.cooperative,
    )
