"""Loading complete documents: their meaning, and the errors of invalid ones."""

import json
from pathlib import Path

import pytest

from envscaler_airflow.envspec import EnvSpec, load_spec, spec_hash
from envscaler_airflow.errors import SpecError

DATA = Path(__file__).parents[1] / "data"
HEAD = "version: v1\nname: s\n"


def write(folder, text, name="spec.yaml"):
    """*text* as a file in *folder*."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def faults_of(path, **arguments):
    """Faults from loading *path*, without the folder."""
    with pytest.raises(SpecError) as caught:
        load_spec(path, **arguments)
    return [fault.replace(f"{path.parent}/", "") for fault in caught.value.faults]


@pytest.mark.parametrize("name", ["short.yaml", "long.yaml", "design.yaml"])
def test_a_frozen_spec_is_read_back_equal_and_hashes_alike(name):
    """to_dict is JSON, from_dict returns the same spec, and the hash is 64 hex digits."""
    spec = load_spec(DATA / name)

    again = EnvSpec.from_dict(json.loads(json.dumps(spec.to_dict())))

    assert again == spec
    assert spec_hash(again) == spec_hash(spec)
    assert len(spec_hash(spec)) == 64


def test_the_hash_is_of_what_runs_and_not_of_where_it_lies(tmp_path):
    """Another folder or description is the same stage; another argument or input is not."""
    text = HEAD + "workdir: .\nvolumes: [{name: d, source: '{{ inputs.d }}', mount_path: /d}]\nentrypoint: "
    inputs = {"d": "s3://b/1"}
    spec = load_spec(write(tmp_path / "a", text + "[python, a.py]"), inputs=inputs)
    moved = write(tmp_path / "b", text + "[python, a.py]\ndescription: The same.")
    changed = write(tmp_path / "c", text + "[python, b.py]")

    assert spec_hash(load_spec(moved, inputs=inputs)) == spec_hash(spec)
    assert spec_hash(load_spec(changed, inputs=inputs)) != spec_hash(spec)
    assert spec_hash(load_spec(moved, inputs={"d": "s3://b/2"})) != spec_hash(spec)


def test_the_short_layout_keeps_its_meaning():
    """Bare numbers in env are text, nvidia-a100 is either size, volumes keep their modes."""
    spec = load_spec(DATA / "short.yaml")

    assert spec.version == "v1"
    assert spec.resources.requests.cpu_cores == 8
    assert spec.resources.requests.memory_bytes == 32 << 30
    assert spec.resources.limits.memory_bytes == 64 << 30
    assert spec.resources.requests.gpu.count == 2
    assert spec.resources.requests.gpu.type == ("A100", "A100-80GB")
    assert [(v.name, v.kind, v.location, v.access_mode) for v in spec.volumes] == [
        ("training-data", "s3", "example-bucket/datasets/glue", "ReadOnly"),
        ("model-checkpoints", "pvc", "model-output", "ReadWriteMany"),
    ]
    assert {item.name: item.value for item in spec.env} == {
        "HF_HOME": "/cache/huggingface",
        "OMP_NUM_THREADS": "4",
    }
    assert spec.runtimes[0].extra_index_urls == ("https://wheels.example.com/simple",)
    assert spec.entrypoint == ("python", "train.py")


def test_the_long_layout_keeps_its_meaning():
    """Parameters fill in, `false` is text, a secret gets its key, 4 nodes of 2 processes (feature A1)."""
    spec = load_spec(DATA / "long.yaml")

    assert spec.resources.requests.gpu.type == ("V100",)
    assert spec.resources.requests.gpu.count == spec.resources.limits.gpu.count == 2
    assert (spec.num_nodes.min, spec.num_nodes.max, spec.processes_per_node) == (4, 4, 2)
    assert {item.name: item.value or item.value_from for item in spec.env} == {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "/workspace",
        "WANDB_API_KEY": "secret:wandb-secret/api-key",
    }
    assert spec.volumes[0].kind == "hostPath"
    assert spec.volumes[0].location == "/srv/code/text-classifier"
    assert spec.warnings == ()


def test_a_parameter_sets_the_field_that_names_it():
    """--set gpu_count=4 gives text, the field requires a number, request and limit follow."""
    spec = load_spec(DATA / "design.yaml", parameters={"gpu_count": "4"})

    assert spec.resources.requests.gpu.count == 4
    assert spec.parameters == {"gpu_count": 4}


def test_a_target_removes_what_its_overlay_sets_to_null():
    """targets.local has `gpu: null`: no GPU there, and one elsewhere."""
    assert load_spec(DATA / "design.yaml", target="local").resources.requests.gpu is None
    assert load_spec(DATA / "design.yaml", target="vm").resources.requests.gpu.count == 1


def test_every_fault_is_told_at_once_with_file_line_path_and_fix(tmp_path):
    """Five mistakes in one file are five faults, in the order of lines."""
    path = write(
        tmp_path,
        "version: v1\n"
        "name: s\n"
        "resources:\n"
        "  requests:\n"
        "    memory: 4096\n"
        "    cpus_: 4\n"
        "  limits: {memory: 512m}\n"
        "chekpoint: {path: /out}\n"
        "runtimes: [{type: python, version: 3.10}]\n"
        "stall: {min: 300}\n",
    )

    assert faults_of(path) == [
        "spec.yaml:5: resources.requests.memory: 4096 has no unit; write 4096Mi or 4Gi",
        "spec.yaml:6: resources.requests.cpus_: unknown field; write cpu",
        "spec.yaml:7: resources.limits.memory: '512m' is 512 thousandths of a byte; write 512Mi",
        "spec.yaml:8: chekpoint: unknown field; write checkpoint",
        'spec.yaml:9: runtimes[0].version: got 3.10, which is not a string; write it in quotes: "3.10"',
        'spec.yaml:10: stall.min: 300 is not a duration; write it with a unit in quotes: "300s", "10m"',
    ]
