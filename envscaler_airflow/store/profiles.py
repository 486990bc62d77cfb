"""What runs of each stage measured, outside the runs' folders: ``profiles.v1/<stage>/<time>-<run>.json``.

Each generation of a run adds one file under a name of its own, so concurrent runs lose nothing, and a second
owner of the same end writes the same name. No process changes a file. Readers merge the newest ones; writers
delete the oldest beyond twice that number. A file that cannot be read is named and ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.profile import MOST_RUNS, RunProfile
from envscaler_airflow.store.keys import RunKey, encode_part
from envscaler_airflow.store.run_store import Store

FOLDER = "profiles.v1"
"""Folder in the store. No run's folder has a dot in its name."""
MAX_BYTES = 1 << 18
"""Largest profile of a run read, bytes. Chosen: ten times the size of a large one."""
KEPT = 2 * MOST_RUNS
"""Files kept of a stage. Chosen: twice what is read, so that some torn ones do not shorten the history."""
AHEAD_S = 86_400.0
"""A run that ended later than this from now is of a wrong clock, seconds. Chosen: a day."""


@dataclass(frozen=True, slots=True)
class StoredProfiles:
    """The readable profiles of a stage, newest last, and why others are ignored."""

    runs: tuple[RunProfile, ...] = ()
    faults: tuple[str, ...] = ()


def stage_folder(key: RunKey) -> str:
    """Folder of the profiles of every run of the same stage: deployment, team, DAG and task."""
    parts = (key.deployment, key.team or "", key.dag_id, key.task_id)
    apart = (part.replace("%", "%25").replace("/", "%2F") for part in parts)  # a part may contain a slash
    return f"{FOLDER}/{encode_part('/'.join(apart))}"


def add_profile(store: Store, folder: str, profile: RunProfile) -> bool:
    """Add *profile* to the stage's, and delete the oldest beyond :data:`KEPT`; False if it is there already.

    Files of a wrong clock are deleted before any other.

    Raises:
        StoreError: The store does not answer.
    """
    digest = hashlib.sha256(f"{profile.run} {profile.generation}".encode()).hexdigest()[:16]
    name = f"{int(profile.at * 1000):015d}-{digest}.json"
    body = {"schema": SCHEMA, **profile.to_dict()}
    is_new = store.create(f"{folder}/{name}", json.dumps(body, allow_nan=False).encode())
    for old in _oldest_first(store.children(folder), now=store.now())[:-KEPT]:
        store.delete(f"{folder}/{old}")
    return is_new


def stored_profiles(store: Store, folder: str, *, now: float) -> StoredProfiles:
    """Read the newest :data:`MOST_RUNS` readable profiles of a stage.

    Raises:
        StoreError: The store does not answer.
    """
    names = _oldest_first(store.children(folder), now=now)[-KEPT:]
    with ThreadPoolExecutor(max(1, min(store.at_once, len(names)))) as readers:
        found = list(readers.map(lambda name: _read(store, f"{folder}/{name}", now=now), names))
    runs = [item for item in found if isinstance(item, RunProfile)]
    faults = tuple(item for item in found if isinstance(item, str))
    return StoredProfiles(tuple(runs[-MOST_RUNS:]), faults)


def stage_folders(store: Store) -> Iterator[tuple[str, str]]:
    """Name and folder of every stage with a profile, sorted; the name is ``deployment/dag/task``.

    Raises:
        StoreError: The store does not answer.
    """
    for child in store.children(FOLDER):
        folder = f"{FOLDER}/{child}"
        names = store.children(folder)
        if not names:
            continue  # a reset deleted them meanwhile
        newest = _read(store, f"{folder}/{names[-1]}", now=None)
        parts = newest.run.split("/") if isinstance(newest, RunProfile) else []
        is_run = len(parts) == 5  # deployment, DAG, run, task, map
        yield ("/".join((parts[0], parts[1], parts[3])) if is_run else child), folder


def reset_profiles(store: Store, folder: str) -> int:
    """Delete every profile of a stage; return how many there were.

    Raises:
        StoreError: The store does not answer.
    """
    names = store.children(folder)
    for name in names:
        store.delete(f"{folder}/{name}")
    return len(names)


def _oldest_first(names: Iterable[str], *, now: float) -> list[str]:
    """*names* in the order of their times; those of a wrong clock come first, as they count least."""
    return sorted(names, key=lambda name: (_time_of(name) <= now + AHEAD_S, name))


def _time_of(name: str) -> float:
    """Seconds since the epoch in a file's name; infinity without a time."""
    digits = name.partition("-")[0]
    return float(digits) / 1000 if digits.isascii() and digits.isdigit() else math.inf


def _read(store: Store, name: str, *, now: float | None) -> RunProfile | str:
    """The profile, or why it is ignored."""
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        if text is None:
            return f"{name}: was deleted meanwhile"
        profile = RunProfile.from_dict(read_object(text, where=name, max_bytes=MAX_BYTES))
    except ProtocolError as err:
        return str(err)
    except ValueError as err:
        return f"{name}: {err}"
    if now is not None and profile.at > now + AHEAD_S:
        return f"{name}: ended {(profile.at - now) / 3600:.0f} h from now: a wrong clock"
    return profile
