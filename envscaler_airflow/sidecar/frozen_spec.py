"""The parts of a run's frozen spec that the sidecar and, through ``start.json``, the wrapper need."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from envscaler_airflow.envspec.quantities import duration_s
from envscaler_airflow.errors import ProtocolError

MAX_SPEC_BYTES = 1 << 22
"""Largest spec that is read, bytes. Chosen: a thousand times the usual size."""
SNAPSHOT_EVERY: Mapping[str, float] = {"seconds": 600.0}
"""Time between snapshots when the spec does not say. Chosen: at most ten minutes of work are lost."""
KEEP = 3
"""Checkpoints kept when the spec does not say. Source: the spec's own default, ``checkpoint.keep``."""

_COUNT = re.compile(r"(\d+)\s*(step|epoch)s?\Z")


@dataclass(frozen=True, slots=True)
class Frozen:
    """The parts of the spec that the sidecar and the wrapper use.

    Attributes:
        every: ``{"seconds"|"steps"|"epochs": n}`` between checkpoints; None when the spec does not say.
        keep: How many checkpoints to keep.
        align: ``step`` or ``epoch``.
        global_batch: Samples per step over all ranks; None when the spec does not say.
        log_patterns: For scripts that do not import the library.
        stall_factor, stall_min_s: When a training without steps counts as stalled; None: the wrapper's.
        secret_env: Names of variables whose values are secrets.
        workdir_archive: Name of the archive in the store; None when the spec does not say.
        success: ``exit-code``, or ``all-steps`` where exit code 0 before the last step is a failure.
    """

    every: Mapping[str, float] | None = None
    keep: int = KEEP
    align: str = "step"
    global_batch: int | None = None
    log_patterns: Mapping[str, str] = field(default_factory=dict)
    stall_factor: float | None = None
    stall_min_s: float | None = None
    secret_env: tuple[str, ...] = ()
    workdir_archive: str | None = None
    success: str = "exit-code"

    def with_interval(self, seconds: float | None) -> Frozen:
        """Copy with checkpoints at least every *seconds*, if its interval is a time; None changes nothing."""
        every = (self.every or {}).get("seconds")
        if not seconds or every is None or every <= seconds:
            return self
        return replace(self, every={"seconds": seconds})


def read_frozen(body: bytes) -> Frozen:
    """Read the frozen spec, which the owner wrote as JSON.

    Raises:
        ProtocolError: It is not a mapping, or a field that is used here has another form.
    """
    spec = _mapping(_parse(body), "frozen spec")
    checkpoint = _mapping(spec.get("checkpoint"), "checkpoint")
    stall = _mapping(spec.get("stall"), "stall")
    try:
        return Frozen(
            every=read_every(checkpoint.get("every")),
            keep=int(checkpoint.get("keep") or KEEP),
            align=str(checkpoint.get("align") or "step"),
            global_batch=_mapping(spec.get("distributed"), "distributed").get("global_batch"),
            log_patterns=_mapping(
                _mapping(spec.get("metrics"), "metrics").get("log_patterns"), "log_patterns"
            ),
            stall_factor=float(stall["factor"]) if "factor" in stall else None,
            stall_min_s=duration_s(stall["min"]) if "min" in stall else None,
            secret_env=tuple(_secret_names(spec.get("env"))),
            workdir_archive=spec.get("workdir_archive"),
            success=str(spec.get("success") or "exit-code"),
        )
    except (TypeError, ValueError) as err:
        raise ProtocolError(f"frozen spec: {err}") from err


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        try:
            return yaml.safe_load(body)
        except yaml.YAMLError as err:
            raise ProtocolError(f"frozen spec: {err}") from err


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{where}: got {type(value).__name__}, expected a mapping")
    return value


def read_every(value: Any) -> Mapping[str, float] | None:
    """``"10m"``, ``"100 steps"``, ``"1 epoch"`` or ``{"steps": 100}``, as one mapping.

    Raises:
        ValueError: It has another form.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(unit): float(count) for unit, count in value.items() if count is not None} or None
    match = _COUNT.match(str(value).strip())
    if match:
        return {f"{match[2]}s": float(match[1])}
    return {"seconds": duration_s(value)}


def _secret_names(env: Any) -> list[str]:
    entries = env if isinstance(env, list) else []
    return [str(item["name"]) for item in entries if isinstance(item, Mapping) and item.get("value_from")]
