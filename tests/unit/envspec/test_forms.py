"""Short forms of other tools, GPU names, and the rules of each block."""

import pytest

from envscaler_airflow.envspec import load_spec
from envscaler_airflow.envspec.gpus import resolve
from envscaler_airflow.envspec.running import Every, MetricRule
from envscaler_airflow.errors import SpecError

HEAD = "version: v1\nname: s\n"


def load(folder, text, **arguments):
    """A spec of *text* below the usual head."""
    path = folder / "spec.yaml"
    path.write_text(HEAD + text)
    return load_spec(path, **arguments)


def faults_of(folder, text, **arguments):
    """Faults of *text* below the usual head, without the folder; its first line is 3."""
    with pytest.raises(SpecError) as caught:
        load(folder, text, **arguments)
    return [fault.replace(f"{folder}/spec.yaml:", "") for fault in caught.value.faults]


def needs(resources):
    """Cores, GiB, GPU types and GPU count of each alternative."""
    return [
        (
            r.requests.cpu_cores,
            r.requests.memory_gib,
            r.requests.gpu.type if r.requests.gpu else (),
            r.requests.gpu_count,
        )
        for r in resources.alternatives
    ]


@pytest.mark.parametrize(
    ("text", "expected", "is_ordered"),
    [
        ("{accelerators: A100:8}", [(None, None, ("A100",), 8)], False),
        ("{accelerators: V100}", [(None, None, ("V100",), 1)], False),
        ("{accelerators: [A100:8, H100:4]}", [(None, None, ("A100",), 8), (None, None, ("H100",), 4)], True),
        ("{accelerators: {A100: 8, H100: 4}}",
         [(None, None, ("A100",), 8), (None, None, ("H100",), 4)], False),
        ("{accelerators: {'A100:8', 'H100:4'}}",
         [(None, None, ("A100",), 8), (None, None, ("H100",), 4)], False),
        ("{cpus: 4+, memory: 32Gi+}", [(4, 32, (), 0)], False),
        ("{cpus: 4.., memory: 32Gi..}", [(4, 32, (), 0)], False),
        ("{gpu: A100:80GB:2}", [(None, None, ("A100-80GB",), 2)], False),
        ("{gpu: {name: [A100, L4], count: 2, memory: 24GB..40GB}}", [(None, None, ("A100", "L4"), 2)], False),
        ("{cpus: 8, any_of: [{accelerators: T4:1}, {memory: 64Gi}]}",
         [(8, None, ("T4",), 1), (8, 64, (), 0)], False),
        ("{requests: {gpu: 2}}", [(None, None, (), 2)], False),
        ("{limits: {gpu: {count: 2}}}", [(None, None, (), 2)], False),
        ("{requests: {gpu: {count: 0}}, limits: {gpu: {count: 0}}}", [(None, None, (), 0)], False),
    ],
)  # fmt: skip
def test_short_forms_become_our_own(tmp_path, text, expected, is_ordered):
    """SkyPilot's and dstack's resources (feature A12)."""
    resources = load(tmp_path, f"resources: {text}\n").resources

    assert needs(resources) == expected
    assert resources.is_ordered is is_ordered


def test_places_spot_and_disk(tmp_path):
    """infra, use_spot, disk_size in GB, disk_tier."""
    spec = load(
        tmp_path,
        "resources: {infra: aws/us-east-1/us-east-1a, use_spot: true, disk_size: 256, disk_tier: high}\n",
    )

    found = spec.resources
    assert (found.cloud, found.region, found.zone) == ("aws", "us-east-1", "us-east-1a")
    assert (spec.capacity, found.disk_bytes, found.disk_tier) == ("spot", 256 << 30, "high")


def test_an_alternative_may_have_its_own_place_and_market(tmp_path):
    """Spot on AWS, or on-demand anywhere."""
    spec = load(tmp_path, "resources: {any_of: [{infra: aws, use_spot: true}, {use_spot: false}]}\n")

    assert [(r.cloud, r.capacity) for r in spec.resources.any_of] == [("aws", "spot"), (None, "on-demand")]


@pytest.mark.parametrize(("text", "bounds"), [("2", (2, 2)), ("1..4", (1, 4)), ('"3"', (3, 3))])
def test_nodes_are_a_number_or_a_range(tmp_path, text, bounds):
    """Scaling's bounds follow."""
    spec = load(tmp_path, f"num_nodes: {text}\nscaling: {{}}\n")

    assert (spec.num_nodes.min, spec.num_nodes.max) == bounds
    assert (spec.scaling.min_nodes, spec.scaling.max_nodes) == bounds


@pytest.mark.parametrize(
    ("text", "every"),
    [("10m", Every(seconds=600)), ("100 steps", Every(steps=100)), ("1 epoch", Every(epochs=1))],
)
def test_checkpoints_are_due_by_time_steps_or_epochs(tmp_path, text, every):
    """In one of the three units."""
    assert load(tmp_path, f"checkpoint: {{every: {text}}}\n").checkpoint.every == every


def test_a_target_utilization_is_short_for_two_rules(tmp_path):
    """A target of 70 scales out above 80 and in below 50."""
    spec = load(tmp_path, "scaling: {policy: threshold, target: {gpu_utilization: 70}}\n")

    assert spec.scaling.all_rules == (
        MetricRule(metric="gpu_utilization", above=80.0),
        MetricRule(metric="gpu_utilization", below=50.0),
    )
    assert [rule.change for rule in spec.scaling.all_rules] == [1, -1]


def test_metric_rules_hold_for_samples_or_a_time(tmp_path):
    """`for` takes both."""
    rules = "[{metric: m, above: 80, for: 3 samples, step: 2}, {metric: m, below: 40, for: 5m}]"

    found = load(tmp_path, f"scaling: {{rules: {rules}}}\n").scaling.rules

    assert [(r.hold.samples, r.hold.seconds, r.change) for r in found] == [(3, None, 2), (None, 300, -1)]


@pytest.mark.parametrize(
    ("name", "memory", "types"),
    [
        ("nvidia-a100", None, ("A100", "A100-80GB")),
        ("nvidia-a100", 80, ("A100-80GB",)),
        ("nvidia-tesla-v100", None, ("V100",)),
        ("V100", 32, ("V100-32GB",)),
        ("a100-80gb", None, ("A100-80GB",)),
        ("NVIDIA H100 80GB HBM3", None, ("H100",)),
        ("Tesla-T4", None, ("T4",)),
        ("H100", 94, ("H100-NVL",)),
        ("Z999", None, ("Z999",)),
    ],
)
def test_gpu_names_are_the_catalogs(name, memory, types):
    """Aliases, either size, the larger sibling; an unknown name stays unchanged."""
    assert resolve(name, memory) == types


def test_a_gpu_that_is_not_in_the_catalog_is_a_warning(tmp_path):
    """New hardware is not a fault; a typo is."""
    spec = load(tmp_path, "resources: {accelerators: Z999:1}\n")

    assert spec.warnings == ("resources: GPU Z999 is not in the catalog",)
    assert faults_of(tmp_path, "resources: {accelerators: A100-80G:1}\n") == [
        "3: resources.accelerators: GPU 'A100-80G' is not known; write A100-80GB"
    ]


def test_processes_that_contradict_the_gpus_are_a_warning(tmp_path):
    """8 processes on 4 nodes of 1 GPU."""
    spec = load(tmp_path, "resources: {gpu: 1}\ndistributed: {world_size: 8, node_count: 4}\n")

    assert spec.processes_per_node == 2
    assert spec.warnings == ("distributed: 2 processes per node on 1 GPUs; world_size 8 counts",)


OWN_DISK = (
    "checkpoint.path: of /ckpt the files of node 0 alone are kept, unless the training has a Session: let "
    "rank 0 save everything, or put the path on a volume that all nodes share, such as nfs://"
)
SHARED = "volumes: [{{name: ck, source: {source}, mount_path: /ckpt{mode}}}]\n"


@pytest.mark.parametrize(
    ("nodes", "volume", "warnings"),
    [
        ("1", "", ()),
        ("2", "", (OWN_DISK,)),
        ("{min: 1, max: 4}", "", (OWN_DISK,)),
        ("2", SHARED.format(source="nfs://server/ck", mode=""), ()),
        ("2", SHARED.format(source="pvc://ck", mode=", access_mode: ReadWriteMany"), ()),
        ("2", SHARED.format(source="pvc://ck", mode=""), (OWN_DISK,)),
    ],
)
def test_a_checkpoint_folder_that_each_node_has_for_itself_is_a_warning(tmp_path, nodes, volume, warnings):
    """Files that ranks of other nodes save there would be lost silently (C, D7)."""
    spec = load(tmp_path, f"num_nodes: {nodes}\ncheckpoint: {{path: /ckpt}}\n{volume}")

    assert spec.warnings == warnings


def test_a_command_line_is_split_before_its_templates_are_filled_in(tmp_path):
    """A value with spaces and quotes stays one word."""
    spec = load(
        tmp_path,
        'parameters: {x: {default: "a \'b; c"}}\n'
        "entrypoint: python 'my train.py' --name={{ parameters.x }}\n",
    )

    assert spec.entrypoint == ("python", "my train.py", "--name=a 'b; c")


def test_scalars_of_env_and_command_are_the_text_that_was_written(tmp_path):
    """`1.10` stays 1.10, `false` is false, a map of env is a list."""
    spec = load(tmp_path, "env: {A: 1.10, B: false, C: 4, D: x}\nentrypoint: [python, 1.10, true, 8]\n")

    assert {item.name: item.value for item in spec.env} == {"A": "1.10", "B": "false", "C": "4", "D": "x"}
    assert spec.entrypoint == ("python", "1.10", "true", "8")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("resources: {cpus: 4..8}",
         "3: resources.cpus: '4..8' has an upper bound, which requests have not; write 4+"),
        ("resources: {memory: 32}", "3: resources.memory: 32 has no unit; write 32Gi or 32Mi"),
        ("resources: {cpus: 4, requests: {cpu: 8}}",
         "3: resources.cpus: is given twice, also as resources.requests.cpu; write one of them"),
        ("resources: {use_spot: true}\ncapacity: on-demand",
         "3: resources.use_spot: says spot where capacity says on-demand; write capacity alone"),
        ("resources: {requests: {memory: 8Gi}, limits: {memory: 4Gi}}",
         "3: resources.limits.memory: 4Gi is below the request of 8Gi; write at least that"),
        ("resources: {requests: {gpu: 2}, limits: {gpu: 1}}",
         "3: resources.limits.gpu: 1, but requests.gpu.count is 2; write the same"),
        ("resources: {gpu: {type: A100, memory: 100GB}}",
         "3: resources.gpu.type: A100 has 80 GB at most; write memory: 80GB, or another type"),
        ("resources: {any_of: [{any_of: [{cpus: 1}]}]}",
         "3: resources.any_of[0].any_of: is a choice within a choice; write all alternatives in one list"),
        ("resource: {cpus: 1}", "3: resource: unknown field; write resources"),
        ("image: x", "3: image: unknown field; write base: {image: ...}"),
        ("command: x", "3: command: unknown field; write entrypoint"),
        ("num_nodes: 4..1", "3: num_nodes: 4..1 runs backwards; write 1..4"),
        ("num_nodes: many", "3: num_nodes: 'many' is not a number of nodes; write 2 or 1..4"),
        ("num_nodes: 0", "3: num_nodes: 0 is not a number of nodes; write 2 or 1..4"),
        ("capacity: spott", "3: capacity: 'spott' is not known here; write 'spot', 'on-demand', 'auto'"),
        ("base: {}", "3: base.image: is missing; write image: python:3.11-slim"),
        ("base: {image: 'x y'}",
         ("3: base.image: 'x y' is not an image name; "
          "write one such as nvidia/cuda:11.8.0-runtime-ubuntu22.04")),
        ("volumes: [{name: d, source: s3://b}]",
         "3: volumes[0].mount_path: is missing; write mount_path: /output/model"),
        ("volumes: [{name: d, source: b, mount_path: /d}]",
         ("3: volumes[0].source: 'b' is not a valid source; write s3://bucket/path, gs://..., pvc://claim, "
         "nfs://host/path, hostPath:/path or {{ inputs.x }}")),
        ("volumes: [{name: d, source: s3://b, mount_path: /d/../e}]",
         "3: volumes[0].mount_path: '/d/../e' has an empty, '.' or '..' part; write the plain absolute path"),
        ("volumes: [{name: d, source: s3://b, mount_path: '/d:ro'}]",
         ("3: volumes[0].mount_path: '/d:ro' has a ':', which container programs take for a separator; "
          "leave it out")),
        ("volumes: [{name: d, source: 'hostPath:/a/../b', mount_path: /d}]",
         "3: volumes[0].source: 'hostPath:/a/../b' has a '..' part; write the plain path"),
        ("volumes: [{name: d, source: file:///b, mount_path: /d, access_mode: ReadWriteMany}]",
         ("3: volumes[0].access_mode: ReadWriteMany, but the source is copied in before the start; "
         "write access_mode: ReadOnly, and what is made under outputs")),
        ("volumes: [{name: d, source: hdfs://n/b, mount_path: /d, access_mode: ReadWriteMany}]",
         ("3: volumes[0].access_mode: ReadWriteMany, but the source is copied in before the start; "
         "write access_mode: ReadOnly, and what is made under outputs")),
        ("volumes: [{name: d, source: pvc://b, mount_path: /d, retain: run}]",
         "3: volumes[0].retain: is of a claim that is made; write source: pvc://name and size: 10Gi"),
        ("volumes: [{name: d, source: s3://b, size: 1Gi, mount_path: /d, storage_class: fast}]",
         "3: volumes[0].storage_class: is of a claim that is made; write source: pvc://name and size: 10Gi"),
        (("volumes: [{name: d, source: pvc://b, size: 1Gi, mount_path: /d, access_mode: ReadOnly, "
         "retain: run}]"),
         "3: volumes[0].retain: is of a claim that is made; write source: pvc://name and size: 10Gi"),
        ("volumes: [{name: d, source: pvc://a, mount_path: /d}, {name: e, source: pvc://b, mount_path: /d}]",
         "3: volumes[1].mount_path: /d is where d is mounted; write another path"),
        ("env: [{name: A, value: 1}, {name: A, value: 2}]",
         "3: env[1]: A stands here twice; write it once"),
        ("env: [{name: A}]",
         '3: env[0].value: has no value; write value: "4" or value_from: secret:NAME/key'),
        ("env: [{name: ENVSCALER_NODE, value: 1}]",
         "3: env[0].name: ENVSCALER_NODE is set by envscaler; write another name"),
        ("env: [{name: A-B, value: 1}]",
         "3: env[0].name: 'A-B' is not a variable name; write letters, digits and '_', such as HF_HOME"),
        ("outputs: {../m: /output/m}",
         ("3: outputs.../m: '../m' is not a valid name; "
          "write letters, digits, '-', '_' and '.', such as model")),
        ("outputs: {m: output/m}",
         "3: outputs.m: 'output/m' is not an absolute path; write one such as /output/model"),
        ("entrypoint: a | b",
         "3: entrypoint: uses a shell's operators; write [bash, -c, '...'] to run it by a shell"),
        ("entrypoint: a 'b", ("3: entrypoint: cannot be split into words (No closing quotation); "
         "write a list: [python, train.py]")),
        ("checkpoint: {every: 10}",
         '3: checkpoint.every: 10 has no unit; write "10m", "100 steps" or "1 epoch"'),
        ("scaling: {min_nodes: 4, max_nodes: 2}",
         "3: scaling.max_nodes: 2 is below min_nodes 4; write at least that"),
        ("scaling: {tolerance: 1.5}", "3: scaling.tolerance: got 1.5; write less than 1.0"),
        ("scaling: {policy: threshold}",
         ("3: scaling.policy: threshold has no rules; write rules: [{metric: gpu_utilization, above: 80}] "
         "or target: {gpu_utilization: 70}")),
        ("metrics: {log_patterns: {step: 'step'}}",
         "3: metrics.log_patterns.step: 'step' has no group for the value; write one such as 'step (\\d+)'"),
        ("metrics: {log_patterns: {step: '(a|b) step (\\d+)'}}",
         ("3: metrics.log_patterns.step: '(a|b) step (\\\\d+)' has 2 groups; keep one for the value, "
         "others as (?:...)")),
        ("metrics: {log_patterns: {step_time_s: 'took (\\S+)'}}",
         ("3: metrics.log_patterns.step_time_s: 'step_time_s' cannot be read from output; write one of step, "
         "total_steps, epoch, epochs, loss, accuracy, samples, tokens")),
        ("metrics: {log_patterns: {setp: 'step (\\d+)'}}", None),
        ("failure: {orphan_after: 30s}",
         "3: failure.orphan_after: 30s is shorter than the lease's own interval of 60 s; write at least 2m"),
        ("distributed: {world_size: 7, node_count: 2}",
         "3: distributed.world_size: 7 processes do not divide over 2 nodes; write a multiple"),
        ("targets: {local: {version: v1}}",
         "3: targets.local.version: cannot differ by target; write it once, outside targets"),
        ("targets: {local: {num_node: 1}}", "3: targets.local.num_node: unknown field; write num_nodes"),
        ("volumes: x", "3: volumes: got 'x'; write a list"),
        ("outputs: [x]", "3: outputs: got a list; write a map, such as {model: /output/model}"),
        ("scaling: {speedup: [{offer: a, relative_to: b, mean: 1.5, stdev: 0.1}]}",
         "3: scaling.speedup[0].source: is missing; write source: ..."),
        ("base: {image: x}\ntargets: {vm: {base: {image: null}}}",
         "4: targets.vm.base.image: is missing; write image: python:3.11-slim"),
        ("warnings: [x]", None),
        ("base_dirs: {workdir: /}", None),
        ("system_packages: ['git; rm -rf /']", None),
        ("runtimes: [{packages: ['--index-url=x']}]", None),
        ("name: x", "3: name: written twice, first in line 2; write it once"),
    ],
)  # fmt: skip
def test_a_wrong_block_is_one_fault_with_what_to_write(tmp_path, text, fault):
    """None: any one fault is fine."""
    found = faults_of(tmp_path, text + "\n")

    assert len(found) == 1
    if fault is not None:
        assert found == [fault]


def test_an_unknown_target_lists_the_known_ones(tmp_path):
    """The spec's own and the built-in ones."""
    faults = faults_of(tmp_path, "targets: {serving: {num_nodes: 1}}\n", target="servng")

    assert faults[0].endswith("no target 'servng'; write one of docker, kubernetes, local, serving, vm")


def test_one_word_for_gpus_replaces_the_one_below_it(tmp_path):
    """T4 as an alternative to eight A100 is one T4."""
    spec = load(tmp_path, "resources: {accelerators: A100:8, any_of: [{accelerators: T4}, {cpus: 4}]}\n")

    assert needs(spec.resources) == [(None, None, ("T4",), 1), (4, None, ("A100",), 8)]


def test_inputs_are_filled_in_when_they_are_known(tmp_path):
    """None leaves the template, {} knows no inputs; an input that no template names is refused (F7)."""
    text = 'volumes: [{name: m, source: "{{ inputs.model }}", mount_path: /m}]\n'
    uri = "file:///store/outputs/g1-a1-c1/model"

    unknown = load(tmp_path, text)
    known = load(tmp_path, text, inputs={"model": uri})

    assert (unknown.volumes[0].source, unknown.volumes[0].kind) == ("{{ inputs.model }}", "input")
    assert unknown.input_names == ("model",)
    assert (known.volumes[0].source, known.volumes[0].kind, known.inputs) == (uri, "file", {"model": uri})
    told = "input 'model' is not known (known: data); hand it over: inputs={...}, or --input"
    unused = (
        "inputs: data: the spec does not use this input (it uses: model); write {{ inputs.data }} where it "
        "belongs, or leave it out"
    )
    assert sorted(faults_of(tmp_path, text, inputs={"data": uri})) == [
        f"3: volumes[0].source: {told}",
        unused,
    ]


def test_declared_inputs_are_asked_for(tmp_path):
    """A misspelt input is found before the run, a missing one at its start."""
    assert (
        "input 'modle' is not known (known: model)"
        in faults_of(tmp_path, 'inputs: [model]\nenv: {M: "{{ inputs.modle }}"}\n')[0]
    )
    assert "input 'model' is missing" in faults_of(tmp_path, "inputs: [model]\n", inputs={})[0]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("RTX 4080", "RTX4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX4080SUPER"),
        ("H20", "H20"),
        ("GB200", "GB200"),
        ("GB300", "GB300"),
        ("H800", "H800"),
        ("A30", "A30"),
        ("Tesla V100S", "V100S"),
        ("RTX4090D", "RTX4090D"),
        ("AMD Instinct MI355X", "MI355X"),
        ("MI300A", "MI300A"),
        ("H100-SXM5", "H100-SXM5"),
        ("L20", "L20"),
    ],
)
def test_a_real_gpu_that_the_catalog_lacks_is_a_note(tmp_path, name, kept):
    """Another number or a vendor's suffix is another model, not a typo (F12)."""
    spec = load(tmp_path, f"resources: {{gpu: {{type: '{name}'}}}}\n")

    assert spec.resources.requests.gpu.type == (kept,)
    assert spec.warnings[0].startswith(f"resources: GPU {kept} is not in the catalog")
    if kept == "RTX4080":
        assert spec.warnings[0].endswith("; write RTX4090 if that was meant")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx_4090", "RTX4090"),
        ("A100 80GB", "A100-80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("nvidia-tesla-t4", "T4"),
    ],
)
def test_a_gpu_is_known_however_its_words_are_separated(name, known):
    """As nvidia-smi, clouds and shops write it (F12)."""
    assert resolve(name) == (known,)


def test_a_misspelt_gpu_is_still_refused():
    """The numbers agree and the letters do not."""
    for name, near in (("A100-80G", "A100-80GB"), ("A10H", "A10"), ("RTX6000Ade", "RTX6000Ada")):
        with pytest.raises(ValueError, match=f"is not known; write {near}$"):
            resolve(name)
