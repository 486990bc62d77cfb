"""Twenty stages at once on one machine that fits a few of them: each gets its turn."""

from __future__ import annotations

import contextlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Delivered, Stage
from envscaler_airflow.run import Actor
from envscaler_airflow.store import RunKey, check_store, open_store
from envscaler_airflow.store.run import Run

STAGES = 20
FAST = 120.0
"""So many times faster is the owners' clock: a stage that finds too little space looks again after 10 s, at
last after 10 min, as recovery.py says."""
SPEC = {
    "version": "v1",
    "name": "small",
    "resources": {"requests": {"cpu": 1, "memory": "32Mi"}},
    "entrypoint": [
        "sh",
        "-c",
        'mkdir -p "$ENVSCALER_OUTPUT_MODEL"; echo small > "$ENVSCALER_OUTPUT_MODEL/name"',
    ],
    "outputs": {"model": "/output/model"},
}


def processes_below(root):
    """Every process of an attempt below *root*."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(root) in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.timeout(240)
def test_twenty_stages_at_once_all_end_and_leave_nothing_behind(tmp_path):
    """Owners in threads, trainings as processes: none starves and none stays (feature C6)."""
    store, root = open_store(f"file://{tmp_path}/store"), tmp_path / "attempts"
    check_store(store)
    cpus = len(LocalBackend(root).machine.cpus)

    def own(number):
        backend = LocalBackend(root)
        key = RunKey("one", "dag", "run", f"stage-{number}")
        owner = Owner(
            run=Run(store, key),
            backend=backend,
            actor=Actor(str(uuid.uuid4()), 1, 3),
            stage=Stage(EnvSpec.from_dict(SPEC), "small.yaml"),
        )
        waits = {"sleep": lambda s: time.sleep(s / 10), "monotonic": lambda: time.monotonic() * FAST}
        return ForegroundOwner(owner, **waits).own(), Run(store, key).events.load()

    with ThreadPoolExecutor(STAGES) as pool:
        ends = list(pool.map(own, range(STAGES)))

    assert [type(end) for end, _ in ends] == [Delivered] * STAGES
    assert {state.status for _, state in ends} == {"succeeded"}
    assert [sum(one.outcome == "succeeded" for one in state.attempts) for _, state in ends] == [1] * STAGES
    assert {one.outcome for _, state in ends for one in state.attempts} <= {"succeeded", "not-started"}
    assert processes_below(root) == []
    assert LocalBackend(root).free_nodes(LocalBackend(root).offers())["local/cpu-1"] == cpus
