"""The launcher's command, and a global batch that stays the same at every size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attempts
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envscaler_agent
import envscaler_airflow
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import ProtocolError, SpecError
from envscaler_airflow.launch import JOIN_S, Batch, batch_env, batches, launch_command, launch_of
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.sidecar.restore import NODE_0_S
from envscaler_airflow.sidecar.spool_state import Layout

MEETING = "$ENVSCALER_RENDEZVOUS_HOST:$ENVSCALER_RENDEZVOUS_PORT"


def stage(
    *,
    gpus: int = 2,
    nodes: str | int = 2,
    entrypoint: tuple[str, ...] = ("python", "train.py"),
    **distributed,
):
    """A stage of *nodes* nodes with *gpus* GPUs each."""
    body = {
        "version": "v1",
        "name": "s",
        "resources": {"requests": {"gpu": {"count": gpus}}},
        "num_nodes": nodes,
        "distributed": distributed,
        "entrypoint": list(entrypoint),
    }
    return EnvSpec.from_dict(body)


def test_every_size_makes_the_same_global_batch_with_the_same_micro_batch():
    """1536 over 2, 4, 6 and 8 copies: 768, 384, 256 and 192 samples each; 64 divides them all."""
    got = batches(stage(nodes="1..4", global_batch=1536))

    assert got == (
        Batch(1, 2, 2, 64, 12),
        Batch(2, 4, 4, 64, 6),
        Batch(3, 6, 6, 64, 4),
        Batch(4, 8, 8, 64, 3),
    )


def test_model_parallel_copies_are_counted_and_not_processes():
    """Eight GPUs per copy: one node of four makes none, two make one, four make two."""
    got = batches(stage(gpus=4, nodes="1..4", global_batch=64, model_parallel=8))

    assert got == (Batch(2, 8, 1, 32, 2), Batch(4, 16, 2, 32, 1))


def test_a_batch_that_cannot_be_kept_names_sizes_and_a_batch_that_can():
    """256 samples do not divide over 3 copies; 768 do."""
    with pytest.raises(SpecError, match=r"256 cannot be kept with 3 nodes \(3 copies\); write 768"):
        batches(stage(gpus=1, nodes="1..4", global_batch=256))


def test_a_model_that_fits_no_size_is_said_so():
    """A copy of 16 GPUs on two nodes of four."""
    with pytest.raises(SpecError, match="model_parallel: no number of nodes gives a multiple of 16"):
        batches(stage(gpus=4, nodes=2, global_batch=64, model_parallel=16))


@given(
    gpus=st.integers(1, 8), low=st.integers(1, 6), more=st.integers(0, 6), total=st.integers(1, 20_000),
    parallel=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_micro_batch_times_copies_times_accumulation_is_the_global_batch(gpus, low, more, total, parallel):
    """At all sizes either each keeps the batch exactly or the spec is refused."""
    spec = stage(gpus=gpus, nodes=f"{low}..{low + more}", global_batch=total, model_parallel=parallel)
    try:
        got = batches(spec)
    except SpecError:
        return

    assert {batch.micro * batch.replicas * batch.accumulation for batch in got} == {total}
    assert len({batch.micro for batch in got}) == 1


def test_the_training_reads_its_accumulation_from_the_environment():
    """Two nodes of two GPUs: 4 copies x 64 x 6 = 1536."""
    assert batch_env(stage(nodes="1..4", global_batch=1536), 2) == {
        "ENVSCALER_GLOBAL_BATCH": "1536",
        "ENVSCALER_MICRO_BATCH": "64",
        "ENVSCALER_GRADIENT_ACCUMULATION": "6",
    }
    assert batch_env(stage(), 2) == {}


def test_torchrun_meets_by_c10d_at_node_zero():
    """Several nodes: count, processes, endpoint; torchrun ranks the nodes and has an interpreter."""
    got = launch_command(stage(launcher="torchrun"), 2)

    assert got == (
        "torchrun", "--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={MEETING}", "--rdzv_id=envscaler", "--rdzv_conf=join_timeout=900", "train.py",
    )  # fmt: skip


def test_torchrun_waits_as_long_as_a_node_for_a_new_pod_of_node_0():
    """Its own 600 s would end an attempt whose new pod is about to join."""
    assert JOIN_S == NODE_0_S


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_elastic_launch_takes_nodes_that_come_and_go(nodes):
    """Torchrun gets the bounds, for any starting number; one node also has a rendezvous: others may come."""
    got = launch_command(stage(nodes="1..4", launcher="torchrun", elastic=True), nodes)

    assert got == (
        "torchrun", "--nnodes=1:4", "--nproc_per_node=2", "--max_restarts=100", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={MEETING}", "--rdzv_id=envscaler", "--rdzv_conf=join_timeout=900", "train.py",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "entrypoint", "expected"),
    [
        (
            "torchrun",
            ("python", "train.py", "-x"),
            ("torchrun", "--standalone", "--nproc_per_node=2", "train.py", "-x"),
        ),
        (
            "torchrun",
            ("python", "-m", "pkg"),
            ("torchrun", "--standalone", "--nproc_per_node=2", "-m", "pkg"),
        ),
        (
            "torchrun",
            ("python", "-u", "a.py"),
            ("torchrun", "--standalone", "--nproc_per_node=2", "--no-python", "python", "-u", "a.py"),
        ),
        ("none", ("./train",), ("./train",)),
    ],
)
def test_one_node_needs_no_rendezvous_and_other_programs_no_python(launcher, entrypoint, expected):
    """The words before the user's own depend on the launcher and the program."""
    assert launch_command(stage(nodes=1, launcher=launcher, entrypoint=entrypoint), 1) == expected


@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_other_launchers_get_nodes_processes_rank_and_address(launcher):
    """The same four facts in each launcher's own words."""
    got = " ".join(launch_command(stage(launcher=launcher), 2))

    expected = {
        "accelerate": "accelerate launch --num_machines=2 --num_processes=4 --machine_rank=$ENVSCALER_NODE "
        "--main_process_ip=$ENVSCALER_RENDEZVOUS_HOST --main_process_port=$ENVSCALER_RENDEZVOUS_PORT "
        "train.py",
        "deepspeed": "deepspeed --num_nodes=2 --num_gpus=2 --node_rank=$ENVSCALER_NODE "
        "--master_addr=$ENVSCALER_RENDEZVOUS_HOST --master_port=$ENVSCALER_RENDEZVOUS_PORT --no_ssh train.py",
    }
    assert got == expected[launcher]


@pytest.mark.parametrize(
    ("checkpoint", "every", "keep"),
    [
        (None, None, 3),
        ({}, {"seconds": 600.0}, 3),
        ({"every": "10m"}, {"seconds": 600.0}, 3),
        ({"every": "100 steps"}, {"steps": 100.0}, 3),
        ({"every": "1 epoch", "keep": 5}, {"epochs": 1.0}, 5),
        ({"every": {"seconds": 5}}, {"seconds": 5.0}, 3),
    ],
)
def test_the_interval_of_checkpoints_reaches_the_training_in_one_form(checkpoint, every, keep):
    """In any form that a user writes; None is the wrapper's own default (C3)."""
    got = attempts.launch({} if checkpoint is None else {"checkpoint": checkpoint})

    assert (got.session.every, got.keep) == (every, keep)


def test_settings_of_the_training_survive_the_file_between(tmp_path):
    """``layout.json`` is read back as it was written, by the sidecar's one parser (C3)."""
    env = [{"name": "TOKEN", "value_from": "secret:a/b"}, {"name": "PLAIN", "value": "x"}]
    patterns = {"log_patterns": {"step": r"step (\d+)"}}
    spec = {"env": env, "metrics": patterns, "success": "all-steps", "distributed": {"global_batch": 8}}
    launched = attempts.launch({**spec, "checkpoint": {"align": "epoch"}})
    (tmp_path / "layout.json").write_text(json.dumps(launched.layout()))

    read = Layout.read(tmp_path / "layout.json")

    assert (read.session, read.keep, read.outputs) == (launched.session, 3, {})
    assert read.session.secret_env == ("TOKEN",)


@pytest.mark.parametrize(
    "body", ["[]", "{", '{"session": 3}', '{"session": {"every": "often"}}', '{"keep": "x"}']
)
def test_nonsense_in_the_layout_is_an_error_of_the_protocol(tmp_path, body):
    """It never crashes."""
    (tmp_path / "layout.json").write_text(body)

    with pytest.raises(ProtocolError):
        Layout.read(tmp_path / "layout.json")


@pytest.mark.parametrize(
    ("field", "modules"),
    [
        ("storage_class", {"envspec/models.py", "backends/kubernetes/mounts.py"}),
        ("stall_factor", {"launch.py", "spool.py", "wrapper.py"}),
    ],
)
def test_a_field_that_reaches_the_training_is_named_in_three_modules_at_most(field, modules):
    """The model, the launch where it does not carry the part, and the reader; the docs' example is data.

    A field of ``resources``, ``volumes`` or ``env`` is in the launch without a change there.
    """
    roots = [Path(package.__file__).parent for package in (envscaler_airflow, envscaler_agent)]

    found = {
        str(path.relative_to(root))
        for root in roots
        for path in root.rglob("*.py")
        if re.search(rf"\b{field}\b", path.read_text())
    }

    assert found == modules


@pytest.mark.parametrize("choice", ["any_of", "ordered"])
def test_more_memory_reaches_the_alternative_that_was_chosen(choice):
    """After an out-of-memory end the pod of any alternative gets the raised amounts."""
    amounts = {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "8Gi"}}
    gpus = [{"requests": {"gpu": {"count": 1, "type": name}}} for name in ("A10G", "T4")]
    body = {"version": "v1", "name": "s", "resources": amounts | {choice: gpus}, "entrypoint": ["train"]}

    launch = launch_of(EnvSpec.from_dict(body), 1).resized(memory_bytes=16 * 2**30, vcpus=3.0)

    for name in ("A10G", "T4"):
        need = launch.need(Offer(f"aws/{name}", "aws", name, "spot", 8.0, 32.0, gpus=1, gpu_name=name))
        assert (need.requests.cpu, need.requests.memory, need.limits.memory) == (
            "3000m",
            "16384Mi",
            "16384Mi",
        )
        assert need.requests.gpu.type == (name,)
