"""Unit tests of what the local backend would start: pure, writing nothing."""

import json
import sys
from pathlib import PurePosixPath

import attempts
import pytest

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.local import mount_main
from envscaler_airflow.backends.local.node_plan import (
    PathMap,
    Programs,
    attempt_name,
    render_attempt,
)
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer

OFFER = Offer("local", "", "cpu-2", "on-demand", vcpus=2.0, memory_gib=4.0, usd_per_hour=0.1)
SPEC = {
    "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "3Gi"}},
    "volumes": [
        {"name": "data", "source": "s3://b/p", "mount_path": "/data", "access_mode": "ReadOnly"},
        {
            "name": "scratch",
            "source": "hostPath:/tmp",
            "mount_path": "/data/tmp",
            "access_mode": "ReadWriteOnce",
        },
    ],
    "outputs": {"my-model": "/output/model", "report": "/out/report.json"},
    "checkpoint": {"path": "/output/checkpoints"},
    "inputs": {"data": "s3://b/p", "base": "s3://b/base"},
}
ROOT = "/r/a/n0/root"
SAVES = "/r/dag-train-ba220497bbab-saves/n0"


def request_for(**changes):
    """Return a request on two CPUs; *changes* are fields."""
    fields = {
        "store_url": "s3://store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 3,
        "allocation": Allocation(OFFER),
        "command": ("python", "train.py", "--data=/data/train", "/output/model"),
        "env": {"CACHE": "/data/tmp/cache", "URL": "https://x/data"},
        "secret_env": {"API_KEY": "canary"},
        "spec": SPEC,
    }
    return attempts.request(**(fields | changes))


def first_node(request):
    """Return what is rendered for node 0."""
    return render_attempt(request, PurePosixPath("/r/a"), Programs())["nodes"][0]


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("/data", f"{ROOT}/data"),
        ("/data/", f"{ROOT}/data"),
        ("/data/train/a.bin", f"{ROOT}/data/train/a.bin"),
        ("--data_dir=/data", f"--data_dir={ROOT}/data"),
        ("model.path=/output/model/x", f"model.path={ROOT}/output/model/x"),
        ("/database", "/database"),
        ("/other/data", "/other/data"),
        ("s3://data", "s3://data"),
        ("--url=http://h/?q=/data", "--url=http://h/?q=/data"),
        ("data", "data"),
    ],
)
def test_arguments_that_name_a_mounted_path_follow_it(text, becomes):
    """The path itself, paths below it, and both behind a flag; nothing that only looks similar."""
    paths = PathMap.of(["/data", "/output/model"], PurePosixPath(ROOT))

    assert paths.argument(text) == becomes


def test_the_longest_path_wins():
    """A volume inside a volume has a folder of its own name."""
    paths = PathMap.of(["/a", "/a/b"], PurePosixPath("/r"))

    assert paths.path("/a/b/c") == "/r/a/b/c"
    assert paths.pairs[0][0] == "/a/b"


def test_a_name_carries_run_generation_and_attempt_and_is_safe():
    """Arbitrary labels become one file name; the hash separates stores and runs."""
    request = request_for(run_label="../Äß dag/x.train" * 9)

    name = attempt_name(request)

    assert name.endswith("-g1-a3")
    assert all(character.isalnum() or character in "_-" for character in name)
    assert name.isascii()
    assert len(name) < 100
    assert name.split("-g1")[0] != attempt_name(request_for(store_url="s3://other")).split("-g1")[0]


def test_the_request_of_a_node_as_it_is_written():
    """Golden: command, limits and environment, without the secret's value."""
    body = first_node(request_for(deadline_s=60.0, grace_s=20.0))["request"]

    assert body == {
        "attempt": "a",
        "node": 0,
        "nodes": 1,
        "python": None,
        "command": ["python", "train.py", f"--data={ROOT}/data/train", f"{ROOT}/output/model"],
        "wrapper": [
            *(sys.executable, "-P", "-m", "envscaler_agent", "run"),
            *("--spool", "/r/a/n0/spool", "--grace", "15", "--"),
            *(sys.executable, "-I", "-S", mount_main.__file__, "--root", "/r/a/n0/mounts"),
            *("--bind", f"{ROOT}/data", "/data", "--bind", f"{ROOT}/data/tmp", "/data/tmp"),
            *("--out", f"{ROOT}/output/model", "/output/model"),
            *("--out", f"{ROOT}/out/report.json", "/out/report.json", "--out"),
            *(f"{SAVES}/output/checkpoints", "/output/checkpoints", "--"),
            *("python", "train.py", f"--data={ROOT}/data/train", f"{ROOT}/output/model"),
        ],
        "sidecar": [
            *(sys.executable, "-P", "-m", "envscaler_airflow.sidecar"),
            *("--spool", "/r/a/n0/spool", "--store", "s3://store", "--prefix", "dep/dag/run/train/-1"),
            *("--generation", "1", "--attempt", "3", "--nodes", "1"),
            *("--layout", "/r/a/n0/layout.json", "--node", "0"),
        ],
        "env": {
            "CACHE": f"{ROOT}/data/tmp/cache",
            "URL": "https://x/data",
            "ENVSCALER_SPOOL": "/r/a/n0/spool",
            "ENVSCALER_RUN": "dep/dag/run/train/-1",
            "ENVSCALER_GENERATION": "1",
            "ENVSCALER_ATTEMPT": "3",
            "ENVSCALER_NODE": "0",
            "ENVSCALER_NODES": "1",
            "ENVSCALER_CPUS": "2",
            "ENVSCALER_OUTPUT_MY_MODEL": f"{ROOT}/output/model",
            "ENVSCALER_OUTPUT_REPORT": f"{ROOT}/out/report.json",
            "ENVSCALER_VOLUME_DATA": f"{ROOT}/data",
            "ENVSCALER_VOLUME_SCRATCH": f"{ROOT}/data/tmp",
            "ENVSCALER_INPUT_DATA": f"{ROOT}/data",
            "ENVSCALER_INPUT_BASE": "s3://b/base",
            "ENVSCALER_CHECKPOINT_DIR": f"{SAVES}/output/checkpoints",
        },
        "secret_names": ["API_KEY"],
        "limits": {"memory_bytes": 3 << 30, "vcpus": 2.0},
        "deadline_s": 60.0,
        "grace_s": 20.0,
        "drain_s": 3600.0,
        "cgroups": True,
    }


def test_the_layout_for_the_sidecar_as_it_is_written():
    """Golden: where inputs, outputs and checkpoints are."""
    assert first_node(request_for(store_options={"region": "x"}))["layout"] == {
        "work": "/r/a/n0/work",
        "mounts": [
            {"name": "data", "source": "s3://b/p", "path": f"{ROOT}/data", "read_only": True},
            {"name": "scratch", "source": "hostPath:/tmp", "path": f"{ROOT}/data/tmp", "read_only": False},
        ],
        "outputs": {"my-model": f"{ROOT}/output/model", "report": f"{ROOT}/out/report.json"},
        "checkpoint_path": f"{SAVES}/output/checkpoints",
        "training_paths": {
            f"{ROOT}/data": "/data",
            f"{ROOT}/data/tmp": "/data/tmp",
            f"{ROOT}/output/model": "/output/model",
            f"{ROOT}/out/report.json": "/out/report.json",
            f"{SAVES}/output/checkpoints": "/output/checkpoints",
        },
        "store_options": {"region": "x"},
        "workdir_archive": None,
        "keep": 3,
        "session": attempts.launch(SPEC).session.to_dict(),
    }


def test_a_profile_of_the_store_s_connection_is_an_option_of_the_sidecar():
    """It names files of the worker's user, which the sidecar can read too."""
    layout = first_node(request_for(store_login=StoreLogin(profile="team")))["layout"]

    assert layout["store_options"] == {"profile_name": "team"}


def test_keys_of_the_store_s_connection_are_in_no_file():
    """The sidecar gets them only by the environment."""
    login = StoreLogin({"AWS_SECRET_ACCESS_KEY": "canary-of-the-store"})

    assert "canary-of-the-store" not in json.dumps(first_node(request_for(store_login=login)))


def test_a_login_that_the_sidecar_could_not_use_starts_nothing():
    """The message has the reason, and what to write instead."""
    login = StoreLogin(refusal="connection 'store' assumes a role")

    with pytest.raises(SpecError, match=r"'store' assumes a role: name a profile_name instead"):
        first_node(request_for(store_login=login))


def test_an_export_is_the_folder_where_the_machine_has_mounted_it():
    """The sidecar mounts nothing; it links the existing mount."""
    volume = {"name": "d", "source": "nfs://filer/x", "mount_path": "/mnt/x"}

    (mount,) = first_node(request_for(spec={"volumes": [volume]}))["layout"]["mounts"]

    assert mount["source"] == "hostPath:/mnt/x"


def test_a_bare_spec_needs_no_paths():
    """No volumes, outputs or checkpoint: the share's memory is the limit."""
    node = first_node(request_for(spec={}, command=("true",), env={}))

    assert node["request"]["limits"] == {"memory_bytes": 4 << 30, "vcpus": 2.0}
    assert node["layout"]["mounts"] == []
    assert node["layout"]["checkpoint_path"] is None


def test_a_limit_above_the_share_is_the_share():
    """A neighbour's memory is not available to promise."""
    spec = {"resources": {"limits": {"memory": "64Gi"}}}

    assert first_node(request_for(spec=spec))["request"]["limits"]["memory_bytes"] == 4 << 30


def test_the_interpreter_of_the_command_runs_neither_wrapper_nor_sidecar():
    """It may be older and lacks their imports; it is only for the command's PATH."""
    body = first_node(request_for(python="/opt/py38/bin/python"))["request"]

    assert body["python"] == "/opt/py38/bin/python"
    assert body["wrapper"][:4] == [sys.executable, "-P", "-m", "envscaler_agent"]
    assert body["sidecar"][:4] == [sys.executable, "-P", "-m", "envscaler_airflow.sidecar"]


def test_every_node_has_a_folder_of_its_own():
    """Two nodes, distinguished by folder and number."""
    nodes = render_attempt(request_for(allocation=Allocation(OFFER, 2)), PurePosixPath("/r/a"), Programs())[
        "nodes"
    ]

    assert [node["request"]["env"]["ENVSCALER_NODE"] for node in nodes] == ["0", "1"]
    assert [node["layout"]["work"] for node in nodes] == ["/r/a/n0/work", "/r/a/n1/work"]


@pytest.mark.parametrize(
    ("saves", "outputs", "expected"),
    [
        ("/out/ck", {"m": "/out/model"}, {"/out/ck": SAVES, "/out/model": ROOT}),
        ("/out/ck", {"m": "/out"}, {"/out/ck": SAVES, "/out": SAVES}),
        ("/out", {"m": "/out/model"}, {"/out": SAVES, "/out/model": SAVES}),
    ],
)
def test_the_checkpoint_folder_lies_at_one_place_in_every_attempt(saves, outputs, expected):
    """A training that remembers absolute paths finds them again; outputs that contain it stay too (C3)."""
    spec = {"checkpoint": {"path": saves}, "outputs": outputs}

    for attempt in (1, 2):
        layout = first_node(request_for(attempt=attempt, spec=spec))["layout"]
        found = {saves: layout["checkpoint_path"], outputs["m"]: layout["outputs"]["m"]}
        assert found == {path: f"{root}{path}" for path, root in expected.items()}
