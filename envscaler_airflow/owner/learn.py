"""Learn from a run: add what it measured to its stage's profile, and read the profile before a plan.

Advice, never state: if the store fails, the stage goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envscaler_agent.protocol import Status
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import EnvScalerError, ProtocolError
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.planning import Estimate
from envscaler_airflow.planning.profile import Forecast, RunProfile, StageProfile, merge
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run.measured import profile_of, profiled_metric
from envscaler_airflow.scaling import Check
from envscaler_airflow.scaling.observation import is_measured
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.profiles import add_profile, stage_folder, stored_profiles
from envscaler_airflow.store.run import ARCHIVE_FIELD, Run

log = logging.getLogger(__name__)

MOST_ATTEMPTS, MOST_NODES = 8, 16
"""Newest attempts, and nodes of each, whose last statuses are read. Chosen: nodes of a stage are alike."""
MOST_CHUNKS = 6
"""Chunks of metrics and of decisions that are read at the end. Chosen: half a minute of an object store's
answers in the worst case, half an hour of samples at least."""
CHUNK_BYTES = 1 << 21
"""Largest chunk of metrics read, bytes. Chosen: twice the size at which it is closed."""
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d(?:[T_ ]\d\d[:.]?\d\d(?:[:.]?\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?")
_CODE = ("entrypoint", "runtimes", "base", "system_packages", "distributed", ARCHIVE_FIELD)
"""Fields of a frozen spec that say what runs."""


def code_of(document: Mapping[str, Any]) -> str:
    """Hash of what a frozen spec runs, without dates and the values of inputs, which change with each run."""
    text = json.dumps({name: document.get(name) for name in _CODE}, sort_keys=True)
    inputs = document.get("inputs")
    for name, value in sorted(inputs.items()) if isinstance(inputs, Mapping) else ():
        if isinstance(value, str) and value:
            text = text.replace(json.dumps(value)[1:-1], f"{{{{ inputs.{name} }}}}")
    return hashlib.sha256(_DATE.sub("DATE", text).encode()).hexdigest()[:16]


def profile_for(run: Run, spec_hash: str) -> StageProfile:
    """Return what earlier runs of the stage measured; an empty profile if the store does not answer."""
    try:
        stored = stored_profiles(run.store, stage_folder(run.key()), now=run.now())
        merged = merge(stored.runs, code=code_of(run.document(spec_hash)))
    except (EnvScalerError, ValueError, ArithmeticError) as err:
        log.warning("the profile of earlier runs cannot be read, and is not used: %s", err)
        return StageProfile()
    for fault in stored.faults:
        log.warning("a profile of an earlier run is ignored: %s", fault)
    return merged


def learn(owned: OwnedRun, state: RunState) -> None:
    """Add what the current generation measured to the profile of its stage; log why that fails."""
    run = owned.run
    try:
        measured = _measured(owned, state)
        if measured is not None:
            add_profile(run.store, stage_folder(run.key()), measured)
    except (EnvScalerError, OSError, ValueError) as err:
        log.warning("what the run measured is not added to the profile of its stage: %s", err)


def _measured(owned: OwnedRun, state: RunState) -> RunProfile | None:
    run = owned.run
    attempts = state.attempts_of(state.generation)[-MOST_ATTEMPTS:]
    found = profile_of(
        state,
        [(attempt, _statuses(run, attempt)) for attempt in attempts],
        run=run.prefix,
        checks=_checks(run, state.generation),
        samples=_samples(run, attempts),
    )
    if found is None:
        return None
    document, spec = run.document(state.spec_hash), run.spec(state.spec_hash)
    return replace(
        found,
        code=code_of(document),
        image=(spec.base.image or "") if spec.base is not None else "",
        data_gib=_data_gib(spec),
        checkpoint_bytes=_checkpoint_bytes(run, attempts),
        forecast=_forecast(run, state),
    )


def _statuses(run: Run, attempt: AttemptState) -> list[Status]:
    nodes = range(min(MOST_NODES, attempt.allocation.nodes))
    return [status for node in nodes if (status := run.status(attempt.key, node)) is not None]


def _checks(run: Run, generation: int) -> list[Check]:
    found = read_decisions(run, newest_chunks=MOST_CHUNKS)
    return [check for check, _ in found if check.observation.generation == generation]


def _data_gib(spec: EnvSpec) -> float | None:
    sizes = [volume.gib for volume in spec.volumes if volume.gib is not None]
    return sum(sizes) if sizes else None


def _checkpoint_bytes(run: Run, attempts: Sequence[AttemptState]) -> int | None:
    """Bytes of the newest checkpoint; None without one."""
    name = next((one.end.checkpoint for one in reversed(attempts) if one.end.checkpoint), None)
    return None if name is None else sum(run.sizes(f"checkpoints/{name}").values()) or None


def _samples(run: Run, attempts: Sequence[AttemptState]) -> dict[str, list[float]]:
    """Values of each metric of node 0 over time, from a few chunks spread over the generation."""
    wanted = {f"g{attempt.generation}-a{attempt.number}-n0" for attempt in attempts}
    names = [name for name in run.children("metrics") if name.rpartition("-c")[0] in wanted]
    every = max(1, math.ceil(len(names) / MOST_CHUNKS))
    found: dict[str, list[float]] = {}
    for name in names[::every]:
        for line in _lines(run, f"metrics/{name}"):
            for reported, value in line.items():
                metric = profiled_metric(reported)
                if metric and isinstance(value, int | float) and value >= 0 and is_measured(value):
                    found.setdefault(metric, []).append(float(value))
    return found


def _lines(run: Run, name: str) -> list[dict[str, Any]]:
    try:
        text = run.read(name, max_bytes=CHUNK_BYTES) or b""
    except ProtocolError:
        return []
    found = []
    for line in text.splitlines():
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(body, dict):
            found.append(body)
    return found


def _forecast(run: Run, state: RunState) -> Forecast | None:
    """What the first plan of the generation expected, and what it became; None if it expected nothing."""
    try:
        foretold = run.plan().get("forecast") or {}
        is_of_this = foretold.get("generation") == state.generation
        expected = (
            Estimate.from_dict(foretold["estimate"]) if is_of_this and foretold.get("estimate") else None
        )
    except (ProtocolError, AttributeError, KeyError, ValueError):
        return None
    attempts = state.attempts_of(state.generation)
    ended = attempts[-1].ended_at if attempts else None
    if expected is None or state.status != "succeeded" or ended is None:
        return None
    costs = [one.end.usd for one in attempts]
    return Forecast(
        hours_low=expected.hours_low,
        hours=expected.hours,
        hours_high=expected.hours_high,
        actual_hours=max(0.0, ended - attempts[0].intended_at) / 3600.0,
        usd=expected.usd,
        actual_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
    )
