"""Requests for attempts, from the fields of a spec that matter to a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.launch import Launch, Paths, launch_of
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Handle


def launch(spec: Mapping[str, Any], nodes: int = 1, **fields: Any) -> Launch:
    """The launch of a spec with the fields *spec*; *fields* are the launch's own."""
    body = {"version": "v1", "name": "s", **spec}
    return replace(launch_of(EnvSpec.from_dict(body), nodes), **fields)


def paths(**spec: Any) -> Paths:
    """The paths of a spec with these fields."""
    return launch(spec).paths


def printed(handle: Handle) -> bytes:
    """What the nodes of an attempt of the local backend printed, as far as it is kept."""
    return b"".join(
        path.read_bytes() for path in sorted(Path(handle.details["folder"]).glob("n*/output/*.log"))
    )


def request(
    *,
    allocation: Allocation,
    command: tuple[str, ...],
    env: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    **fields: Any,
) -> AttemptRequest:
    """A request that runs *command* with *env*, and the rest as the owner computes it from *spec*."""
    known = launch(spec or {}, allocation.nodes)
    launched = replace(known, command=command, env={**known.env, **(env or {})})
    return AttemptRequest(allocation=allocation, launch=launched, **fields)
