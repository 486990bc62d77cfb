"""Who may see the page: Airflow's whole API server, with logins, and requests of several users."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from envscaler_airflow.store import RunKey, open_store

TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "compat/schema-2/run"

pytestmark = pytest.mark.timeout(240)


def page(dag_id, run_id="r1", task_id="train", map_index="{MAP_INDEX}"):
    """Address of a page, as the UI requests it."""
    query = f"run_id={quote(run_id)}&task_id={quote(task_id)}&map_index={quote(map_index)}"
    return f"/envscaler/dags/{quote(dag_id, safe='')}/training?{query}"


REQUESTS = {
    "allowed": ("ann", page("mine")),
    "mapped": ("ann", page("mine", map_index="3")),
    "another dag": ("ann", page("theirs")),
    "no dag": ("bob", page("mine")),
    "no login": ("nobody", page("mine")),
    "forged": ("ann?", page("mine")),
    "all dags": ("ann", page("~")),
    "query for path": ("ann", page("theirs") + "&dag_id=mine"),
    "own store": ("ann", page("mine", run_id="elsewhere")),
    "no run": ("ann", page("mine", run_id="never")),
    "broken": ("ann", page("mine", run_id="broken")),
    "hostile": ("ann", page("mine", run_id="<script>alert(1)</script>")),
    "outside": ("ann", page("mine", run_id="../../../theirs/r1")),
    "no names": ("ann", "/envscaler/dags/mine/training"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answer to each of REQUESTS, from one server with the same run in two DAGs."""
    home = tmp_path_factory.mktemp("airflow")
    store = open_store(str(home / "store"))
    for dag_id, run_id, index in (
        ("mine", "r1", -1),
        ("theirs", "r1", -1),
        ("mine", "broken", -1),
        ("mine", "r1", 3),
    ):
        key = RunKey("local", dag_id, run_id, "train", index)
        shutil.copytree(RECORDED, home / "store" / key.prefix)
    own = RunKey("local", "mine", "elsewhere", "train")
    shutil.copytree(RECORDED, home / "elsewhere" / own.prefix)
    store.write(f"{RunKey('local', 'mine', 'broken', 'train').prefix}/events/000001.json", b"{")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    env = kept | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__AUTH_MANAGER": "page_access.ByDag",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__API_AUTH__JWT_SECRET": "0123456789abcdef0123456789abcdef",
        "AIRFLOW__ENVSCALER__STORE_URL": str(home / "store"),
        "AIRFLOW__ENVSCALER__DEPLOYMENT": "local",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "PYTHONPATH": str(TESTS / "standins"),
        "PAGE_ELSEWHERE": str(home / "elsewhere"),
        "_AIRFLOW_PROCESS_CONTEXT": "server",  # as ``airflow api-server`` sets it
    }
    for command in (
        ["-m", "airflow", "db", "migrate"],
        ["-m", "page_access", json.dumps(list(REQUESTS.values()))],
    ):
        done = subprocess.run(
            [sys.executable, *command], check=False, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return dict(zip(REQUESTS, json.loads(line.removeprefix("ANSWERS ")), strict=True))


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("allowed", 200, "Training: succeeded"),
        ("mapped", 200, "Training: succeeded"),
        ("another dag", 403, ""),
        ("no dag", 403, ""),
        ("no login", 401, ""),
        ("forged", 403, ""),  # by Airflow itself
        ("all dags", 403, ""),
        ("query for path", 403, ""),
        ("own store", 200, "/elsewhere/local/mine/elsewhere/train/-1"),
        ("no run", 404, "No training has begun here"),
        ("broken", 502, "The record of this run is broken"),
        ("hostile", 404, "No training has begun here"),
        ("outside", 404, "No training has begun here"),
        ("no names", 422, ""),
    ],
)
def test_airflow_says_who_may_see_a_page(answers, name, status, words):
    """The DAG in the address decides; no other user gets any data of the run."""
    code, _, _, text = answers[name]

    assert code == status
    assert words in text
    assert ("local/cpu-2" in text) is (status == 200)


@pytest.mark.parametrize("name", ["allowed", "no run", "broken", "hostile"])
def test_every_page_forbids_scripts(answers, name):
    """Also pages that only report an error."""
    _, kind, policy, text = answers[name]

    assert kind == "text/html; charset=utf-8"
    assert policy.startswith("default-src 'none'; ")
    assert "<script" not in text
