"""The command and the batch size of an attempt, for its number of nodes."""

from __future__ import annotations

import pytest

from envscaler_airflow.backends.base import AttemptRequest, StoreLogin
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.owner import freeze
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import AttemptState
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.testing.scripted_backend import cpu_offer

KEY = RunKey("deployment", "dag", "run", "train")


def stage(*, nodes="1..2", **distributed):
    """A stage with one process per node."""
    body = {
        "version": "v1",
        "name": "s",
        "num_nodes": nodes,
        "distributed": distributed,
        "entrypoint": ["python", "train.py"],
    }
    return EnvSpec.from_dict(body)


def asked(tmp_path, spec, nodes, made=None):
    """Return the request of an attempt on *nodes* nodes."""
    store = open_store(f"file://{tmp_path}")
    frozen = freeze.freeze(spec, store)
    freeze.write(Run(store, KEY), frozen)
    live = AttemptState(1, 1, Allocation(cpu_offer(), nodes))
    return freeze.attempt_request(
        Run(store, KEY), made or Stage(spec, "s.yaml"), spec, live, spec_hash=frozen.spec_hash, grace_s=30
    )


def test_a_launch_names_the_code_of_the_spec_that_it_was_made_from(tmp_path):
    """The sidecar unpacks that archive, no matter which other files are beside it (A2)."""
    (tmp_path / "code").mkdir()
    spec = stage(nodes="1", launcher="torchrun")
    spec = spec.model_copy(update={"workdir": "code", "base_dirs": {"workdir": str(tmp_path)}})

    name = asked(tmp_path, spec, 1).launch.workdir_archive

    assert name in open_store(f"file://{tmp_path}").children(KEY.prefix)


def test_a_launch_carries_how_its_sidecar_opens_the_store(tmp_path):
    """Options and credentials of the connection, as the stage has them."""
    spec, login = stage(nodes="1", launcher="torchrun"), StoreLogin({"AWS_ACCESS_KEY_ID": "a"})
    made = Stage(spec, "s.yaml", store_options={"region_name": "x"}, store_login=login)

    request = asked(tmp_path, spec, 1, made)

    assert (request.store_options, request.store_login) == ({"region_name": "x"}, login)


@pytest.mark.parametrize(
    ("nodes", "command", "accumulation"),
    [
        (1, ("torchrun", "--standalone", "--nproc_per_node=1", "train.py"), "2"),
        (
            2,
            (
                "torchrun", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
                "--rdzv_endpoint=$ENVSCALER_RENDEZVOUS_HOST:$ENVSCALER_RENDEZVOUS_PORT",
                "--rdzv_id=envscaler", "--rdzv_conf=join_timeout=900", "train.py",
            ),
            "1",
        ),
    ],
)  # fmt: skip
def test_an_attempt_is_launched_for_its_nodes_and_keeps_the_global_batch(
    tmp_path, nodes, command, accumulation
):
    """A step has 64 samples: 32 x 2 passes on one node, 32 x 1 on each of two."""
    got = asked(tmp_path, stage(global_batch=64), nodes)

    assert got.launch.command == command
    assert got.launch.env == {
        "ENVSCALER_GLOBAL_BATCH": "64",
        "ENVSCALER_MICRO_BATCH": "32",
        "ENVSCALER_GRADIENT_ACCUMULATION": accumulation,
    }


def test_a_launcher_that_numbers_no_nodes_is_told_the_number_by_the_node(tmp_path):
    """Accelerate takes host, port and rank as separate arguments."""
    got = asked(tmp_path, stage(launcher="accelerate"), 2)

    assert got.launch.command == (
        "accelerate", "launch", "--num_machines=2", "--num_processes=2", "--machine_rank=$ENVSCALER_NODE",
        "--main_process_ip=$ENVSCALER_RENDEZVOUS_HOST", "--main_process_port=$ENVSCALER_RENDEZVOUS_PORT",
        "train.py",
    )  # fmt: skip


def test_a_stage_that_launches_itself_is_left_alone(tmp_path):
    """No launcher: the entrypoint is unchanged."""
    assert asked(tmp_path, stage(launcher="none"), 2).launch.command == ("python", "train.py")


def test_a_batch_that_no_size_could_keep_is_refused_before_anything_starts(tmp_path):
    """Two nodes cannot share 65 samples evenly."""
    with pytest.raises(SpecError, match=r"65 cannot be kept with 2 nodes \(2 copies\); write 130"):
        freeze.freeze(stage(global_batch=65), open_store(f"file://{tmp_path}"))


def test_a_request_shows_no_secret():
    """Tracebacks and debug logs print the arguments of calls."""
    request = AttemptRequest(
        "file:///s", "d/r/t/-1", "d.t", 1, 1, Allocation(cpu_offer(1)),
        secret_env={"TOKEN": "canary of the spec"},
        store_login=StoreLogin({"AWS_SECRET_ACCESS_KEY": "canary of the store"}),
    )  # fmt: skip

    assert "canary" not in repr(request)
