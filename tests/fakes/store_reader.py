"""What the next attempt or the next stage would read from a store, without a sidecar."""

from pathlib import Path

from envscaler_agent.protocol import Manifest
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store import manifests
from envscaler_airflow.store.checkpoints import (
    checkpoint_prefix,
    complete_checkpoints,
    read_checkpoint,
    resume_order,
)
from envscaler_airflow.store.outputs import open_folder
from envscaler_airflow.store.run_store import Store


def newest_good(store: Store, *, attempt: int, candidates: list[str]) -> tuple[str | None, list[str]]:
    """The checkpoint of generation 1 that *attempt* would resume from, and why earlier ones were rejected."""
    complete = complete_checkpoints(store, 1)
    rejected = []
    for name in resume_order(complete, generation=1, attempt=attempt, candidates=candidates):
        try:
            manifests.verify(store, checkpoint_prefix(name), manifest=read_checkpoint(store, name))
        except CheckpointError as err:
            rejected.append(f"{name}: {err}")
        else:
            return name, rejected
    return None, rejected


def read_output(uri: str) -> Manifest:
    """Manifest of the output at *uri*."""
    return manifests.read_manifest(*open_folder(uri))


def fetch_output(uri: str, target: Path, between=lambda: None) -> Manifest:
    """Copy the output at *uri* to *target*; returns its manifest."""
    store, prefix = open_folder(uri)
    manifest = manifests.read_manifest(store, prefix)
    target.mkdir(parents=True, exist_ok=True)
    manifests.fetch(store, prefix, manifest, target, between=between)
    return manifest
