"""Unit tests of rendered attempts: golden files, and the schemas of three Kubernetes versions."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import attempts
import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from kubernetes_validate.utils import all_versions

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_manifest import (
    escaped,
    merge_pod,
    render_attempt,
    secret_object,
)
from envscaler_airflow.backends.kubernetes.mounts import mounts_of
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes_attempts"
VERSIONS = list(dict.fromkeys(all_versions()))[-3:]
CPU = Offer("kubernetes", "", "node:cpu-2", "on-demand", vcpus=2.0, memory_gib=4.0)
GPU = Offer(
    *("kubernetes", "eks", "p4d.24xlarge:gpu-2", "spot"),
    vcpus=20.0,
    memory_gib=200.0,
    zone="us-east-1a",
    gpu_name="A100",
    gpus=2,
    arch="x86_64",
)
SPEC = {
    "name": "train",
    "base": {"image": "python:3.11-slim", "credentials": "secret:registry/auth"},
    "resources": {"requests": {"cpu": "1500m", "memory": "2Gi"}, "limits": {"memory": "3Gi"}},
    "volumes": [
        {"name": "Data.set", "source": "pvc://glue", "mount_path": "/data", "access_mode": "ReadOnly"},
        {"name": "raw", "source": "s3://b/raw", "mount_path": "/raw", "access_mode": "ReadOnly"},
        {"name": "home", "source": "nfs://10.0.0.9/exports/h", "mount_path": "/nfs"},
        {
            "name": "scratch",
            "source": "pvc://scratch",
            "size": "20Gi",
            "storage_class": "fast",
            "retain": "run",
            "access_mode": "ReadWriteMany",
            "mount_path": "/scratch",
        },
        {"name": "kept", "source": "pvc://kept", "size": "5Gi", "mount_path": "/kept"},
        {"name": "out", "source": "s3://b/out", "mount_path": "/out", "access_mode": "ReadWriteMany"},
    ],
    "env": [
        {"name": "WANDB_API_KEY", "value_from": "secret:wandb/api-key"},
        {"name": "TOKEN", "value_from": "env:TOKEN"},
    ],
    "outputs": {"my-model": "/output/model", "report": "/output/report.json"},
    "checkpoint": {"path": "/output/checkpoints"},
    "inputs": {"raw": "s3://b/raw", "base": "s3://b/base"},
}
GPU_SPEC = {
    "name": "big",
    "base": {"image": "nvidia/cuda:12.4.1-runtime-ubuntu22.04"},
    "resources": {"requests": {"gpu": {"count": 2, "type": ["A100"]}}, "disk_size": "50Gi"},
}
MIXED = Allocation(replace(GPU, capacity_type="on-demand"), nodes=4, rest=GPU, rest_nodes=3)
CASES = {
    "plain": ({"spec": SPEC, "deadline_s": 3600.5}, {}),
    "gpus": (
        {"spec": GPU_SPEC, "allocation": Allocation(GPU, nodes=4), "secret_env": {}, "grace_s": 90.0},
        {"provider": "karpenter", "cluster_spread": "zone", "priority_class": "training"},
    ),
    "mixed": (
        {
            "spec": GPU_SPEC,
            "allocation": MIXED,
            "secret_env": {},
        },
        {"provider": "eks"},
    ),
    "bound": (
        {"spec": {**GPU_SPEC, "base": {"image": "x:1"}}, "allocation": Allocation(GPU)},
        {
            "namespace": "ml",
            "queue": "team",
            "user": 1000,
            "service_account": "trainer",
            "store_volume": "runs",
            "store_secret": "store-login",
            "pod_override": {
                "metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
                "spec": {
                    "hostNetwork": True,
                    "containers": [{"name": "base", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
                    "volumes": [{"name": "extra", "emptyDir": {}}],
                },
            },
        },
    ),
}


def request_for(**changes):
    """Return a request on two CPUs; *changes* are fields."""
    fields = {
        "store_url": "s3://store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 3,
        "allocation": Allocation(CPU),
        "command": ("python", "train.py", "--data=/data", "echo $(date) $$HOME"),
        "env": {"CACHE": "/tmp/$(x)"},
        "secret_env": {"WANDB_API_KEY": "canary-1", "TOKEN": "canary-2"},
        "spec": SPEC,
    }
    return attempts.request(**(fields | changes))


def rendered_case(name):
    """Return what a case is rendered to."""
    changes, settings = CASES[name]
    return render_attempt(request_for(**changes), Settings.read(settings))


def documents(rendered):
    """Return every object, with the values that are added when it is sent."""
    found = []
    for part in rendered.get("parts", [rendered]):
        secret = secret_object(part, dict.fromkeys(part["secret_keys"], "value"))
        found += [part["job"], part["config_map"], *part.get("claims", ()), *([secret] if secret else [])]
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_attempt_as_it_is_sent(name):
    """Golden: Job and ConfigMap."""
    path = GOLDEN / f"{name}.yaml"
    rendered = rendered_case(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(yaml.safe_dump(rendered, sort_keys=False, width=110))

    assert yaml.safe_load(path.read_text()) == rendered, f"rewrite {path} when the change is meant"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid_and_has_no_unknown_field(name, version):
    """The strict schemas, which refuse misspelt fields."""
    for document in documents(rendered_case(name)):
        validate(document, version, strict=True)


def test_the_parts_of_a_mixed_attempt_count_their_nodes_on():
    """One node on demand, then three on spot: two Jobs of one attempt, with nodes 0 to 3."""
    parts = rendered_case("mixed")["parts"]

    jobs = [part["job"] for part in parts]
    pods = [job["spec"]["template"]["spec"] for job in jobs]
    assert [
        (job["spec"]["completions"], job["metadata"]["labels"].get(names.FIRST_NODE)) for job in jobs
    ] == [
        (1, None),
        (3, "1"),
    ]
    assert jobs[1]["metadata"]["name"] == jobs[0]["metadata"]["name"] + "-p1"
    assert [pod["volumes"][-2]["configMap"]["name"] for pod in pods] == [
        job["metadata"]["name"] for job in jobs
    ]
    told = [{one["name"]: one.get("value") for one in pod["containers"][0]["env"]} for pod in pods]
    assert [env["ENVSCALER_NODES"] for env in told] == ["4", "4"]
    sidecars = [pod["initContainers"][1]["command"] for pod in pods]
    assert [("--nodes", "4") in pairwise(words) for words in sidecars] == [True, True]
    assert [("--first-node", "1") in pairwise(words) for words in sidecars] == [False, True]


def test_the_name_of_a_part_leaves_room_for_the_number_of_its_pods():
    """A host name is a DNS label of at most 63 characters, and includes the number of the pod."""
    request = request_for(run_label="a" * 300, allocation=MIXED)

    longest = max(len(part["name"]) for part in render_attempt(request, Settings())["parts"])

    assert longest + len("-9999999") <= 63


def test_the_schemas_do_refuse_what_is_wrong():
    """They find a misspelt field, so that the test above means something."""
    job = rendered_case("plain")["job"]
    job["spec"]["template"]["spec"]["restartPolicies"] = "Never"

    with pytest.raises(ValidationError):
        validate(job, VERSIONS[-1], strict=True)


def test_no_secret_is_rendered_and_only_its_own_object_holds_it():
    """Values of the cluster's own Secrets stay references; others are in a Secret of the attempt."""
    request = request_for()
    rendered = render_attempt(request, Settings())

    secret = secret_object(rendered, request.secret_env)

    assert "canary" not in json.dumps(rendered)
    assert secret["stringData"] == {"TOKEN": "canary-2"}
    [main] = rendered["job"]["spec"]["template"]["spec"]["containers"]
    sources = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in main["env"] if "valueFrom" in one}
    assert sources == {
        "TOKEN": {"name": rendered["name"], "key": "TOKEN"},
        "WANDB_API_KEY": {"name": "wandb", "key": "api-key"},
    }


@pytest.mark.parametrize(
    ("text", "becomes"),
    [("plain", "plain"), ("$(A)", "$$(A)"), ("$$(A)", "$$$$(A)"), ("$HOME", "$$HOME"), ("a$", "a$$")],
)
def test_a_dollar_reaches_the_command_as_it_was_written(text, becomes):
    """Kubernetes expands $(NAME) and halves $$."""
    assert escaped(text) == becomes


def test_requests_stay_within_the_slice_and_a_raised_limit_counts():
    """A limit of three GiB in a share of four; nine are cut to the share."""

    def memory(limit):
        spec = {**SPEC, "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": limit}}}
        job = render_attempt(request_for(spec=spec), Settings())["job"]
        return job["spec"]["template"]["spec"]["containers"][0]["resources"]

    assert memory("3Gi") == {"requests": {"cpu": "2000m", "memory": "2048Mi"}, "limits": {"memory": "3072Mi"}}
    assert memory("9Gi")["limits"] == {"memory": "4096Mi"}


def test_outputs_get_a_folder_that_may_be_replaced():
    """Two outputs and the checkpoints share /output; an output in the image's folder gets its own."""
    spec = {
        "outputs": {"model": "/output/model", "other": "/workspace/out"},
        "checkpoint": {"path": "/output/c"},
    }

    paths = [mount["mountPath"] for mount in mounts_of(attempts.paths(**spec)).training]

    assert paths == ["/envscaler", "/output", "/workspace/out"]


def test_what_may_only_be_read_is_mounted_so_and_what_may_be_written_is_brought_back():
    """The training's mounts of a claim and of a copy; the sidecar writes one object store's mount back."""
    part = rendered_case("plain")

    [main] = part["job"]["spec"]["template"]["spec"]["containers"]
    read_only = {mount["mountPath"] for mount in main["volumeMounts"] if mount.get("readOnly")}
    layout = json.loads(part["config_map"]["data"]["layout.json"])
    assert read_only == {"/data", "/raw"}
    assert {mount["name"]: mount["read_only"] for mount in layout["mounts"]} == {"raw": True, "out": False}


def test_a_bucket_is_kept_on_the_machine_where_the_deployment_says_so():
    """Only a read-only bucket; the sidecar writes it and the training reads it, in every attempt."""
    settings = Settings(cache_path="/var/cache/envscaler")

    parts = [render_attempt(request_for(attempt=number), settings) for number in (1, 2)]

    layouts = [json.loads(part["config_map"]["data"]["layout.json"])["mounts"] for part in parts]
    pod = parts[0]["job"]["spec"]["template"]["spec"]
    [training] = [one for one in pod["containers"][0]["volumeMounts"] if one["mountPath"] == "/raw"]
    sidecar = [one for one in pod["initContainers"][1]["volumeMounts"] if one["name"] == "cache"]
    assert layouts[0] == layouts[1]
    assert {one["name"]: "index" in one for one in layouts[0]} == {"raw": True, "out": False}
    assert training["readOnly"] is True
    assert [one.get("readOnly", False) for one in sidecar] == [False, False]
    assert {one["mountPath"]: one["subPath"] for one in sidecar}["/raw"] == training["subPath"]
    for document in documents(parts[0]):
        validate(document, VERSIONS[-1], strict=True)


def test_an_output_inside_a_volume_needs_nothing_of_its_own():
    """It is on the claim, which the sidecar mounts too."""
    spec = {
        "volumes": [{"name": "d", "source": "pvc://d", "mount_path": "/data"}],
        "outputs": {"model": "/data/model"},
    }

    found = mounts_of(attempts.paths(**spec))

    assert [mount["mountPath"] for mount in found.training] == ["/envscaler", "/data"]
    assert [mount["mountPath"] for mount in found.sidecar] == ["/envscaler", "/data"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"outputs": {"r": "/app/report.json"}}, "is in a folder of the image"),
        ({"volumes": [{"name": "h", "source": "hdfs://n/x", "mount_path": "/h"}]}, "write pvc://claim"),
    ],
)
def test_what_no_pod_can_have_is_refused_with_what_to_write(spec, words):
    """The message names the field and an alternative."""
    with pytest.raises(SpecError, match=words):
        mounts_of(attempts.paths(**spec))


def test_a_layout_over_a_megabyte_is_refused():
    """A ConfigMap cannot be larger."""
    request = request_for(store_options={"endpoint_url": "x" * 1_100_000})

    with pytest.raises(SpecError, match="a ConfigMap can have at most 1000000"):
        render_attempt(request, Settings())


def test_a_stage_without_an_image_is_refused():
    """There is nothing to run."""
    with pytest.raises(SpecError, match="needs an image"):
        render_attempt(request_for(spec={}), Settings())


def test_settings_with_a_fault_name_it():
    """All errors, at once."""
    with pytest.raises(SpecError) as caught:
        Settings.read({"namespace": "Not.A.Label", "ttl_s": 1, "colour": "red"})

    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), (90, 90), ("never", "never"), (0, 0)])
def test_how_long_a_failed_pod_stays_is_a_time(text, seconds):
    """In the format of every other time, or in seconds."""
    assert Settings.read({"keep": text}).keep == seconds
    with pytest.raises(SpecError, match="keep"):
        Settings.read({"keep": "a while"})


def test_one_node_fails_its_job_and_of_several_one_may_go_alone():
    """A node that drained on request ends only its index; any other failure ends the Job."""
    one = rendered_case("plain")["job"]["spec"]
    four = rendered_case("gpus")["job"]["spec"]

    assert (one["backoffLimit"], "backoffLimitPerIndex" in one) == (0, False)
    assert four["backoffLimitPerIndex"] == 0
    assert [rule["action"] for rule in four["podFailurePolicy"]["rules"]] == [
        "Ignore",
        "FailIndex",
        "FailJob",
        "FailJob",
    ]


def test_an_override_appends_lists_and_replaces_fields():
    """As in Airflow: env is appended, an image replaced, an init container added."""
    base = {
        "metadata": {"labels": {"a": "1"}},
        "spec": {"containers": [{"name": "main", "image": "x", "env": [{"name": "A", "value": "1"}]}]},
    }
    override = {
        "metadata": {"labels": {"b": "2"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "initContainers": [{"name": "first", "image": "i"}],
            "containers": [{"name": "base", "image": "y", "env": [{"name": "B", "value": "2"}]}],
        },
    }

    assert merge_pod(base, override, keep_name="main") == {
        "metadata": {"labels": {"a": "1", "b": "2"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "initContainers": [{"name": "first", "image": "i"}],
            "containers": [
                {
                    "name": "main",
                    "image": "y",
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                }
            ],
        },
    }


def test_spot_is_read_from_any_convention_unless_one_is_named():
    """Karpenter, EKS, GKE (3), AKS and our own label are alternatives; on-demand excludes them all."""

    def terms(offer, **settings):
        job = render_attempt(
            request_for(allocation=Allocation(offer), spec=GPU_SPEC), Settings.read(settings)
        )["job"]
        affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        return affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    assert len(terms(GPU)) == 7
    [named] = terms(GPU, provider="gke")
    assert {"key": "cloud.google.com/gke-spot", "operator": "In", "values": ["true"]} in named[
        "matchExpressions"
    ]
    [on_demand] = terms(replace(GPU, capacity_type="on-demand"))
    assert sum(one["operator"] == "NotIn" for one in on_demand["matchExpressions"]) == 7


@pytest.mark.parametrize(
    ("capacity", "provider", "asked", "grace"),
    [
        ("on-demand", None, 10.0, 30),
        ("on-demand", "gke", 600.5, 601),
        ("spot", "eks", 45.2, 46),
        ("spot", "eks", 600.0, 120),
        ("spot", "gke", 600.0, 30),
        ("spot", None, 600.0, 120),
        ("spot", "aks", 5.0, 30),
    ],
)
def test_the_grace_is_as_asked_within_the_clouds_notice(capacity, provider, asked, grace):
    """At least Kubernetes' 30 s; two minutes on AWS, 30 s on Google and Azure; no limit on demand."""
    request = request_for(allocation=Allocation(replace(GPU, capacity_type=capacity)), grace_s=asked)

    pod = render_attempt(request, Settings(provider=provider))["job"]["spec"]["template"]["spec"]

    assert pod["terminationGracePeriodSeconds"] == grace
    told = dict(pairwise(pod["containers"][0]["args"]))["--grace"]
    assert float(told) < grace


def test_every_job_has_a_deadline_and_goes_by_itself():
    """30 days by default, and deleted a day after its end together with the objects that it owns."""
    spec = render_attempt(request_for(), Settings())["job"]["spec"]

    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (30 * 86400, 86400)


@pytest.mark.parametrize(
    ("asked_s", "longest_s", "pod_s", "job_s"), [(600.0, 9000.0, 600, 4200), (3600.0, 600.0, 600, 600)]
)
def test_a_pod_ends_when_its_money_is_spent(asked_s, longest_s, pod_s, job_s):
    """Its time counts from its binding to a node, that of its Job from before the wait for a node (A6)."""
    settings = Settings.read({"longest_s": longest_s})
    job = render_attempt(request_for(deadline_s=asked_s), settings)["job"]

    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == pod_s
    assert job["spec"]["activeDeadlineSeconds"] == job_s


def test_a_limit_of_cpu_without_a_request_bounds_the_request():
    """The API server refuses a request above its limit."""
    spec = {**SPEC, "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}}

    rendered = render_attempt(request_for(spec=spec), Settings())

    resources = rendered["job"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("500m", "500m")


def test_an_init_container_that_fails_on_one_of_several_nodes_ends_the_job():
    """Otherwise the other nodes would wait for it: only its index would fail."""
    override = {"spec": {"initContainers": [{"name": "warm-up", "image": "w:1"}]}}
    rendered = render_attempt(
        request_for(spec=GPU_SPEC, allocation=Allocation(GPU, nodes=2), secret_env={}),
        Settings.read({"pod_override": override}),
    )

    rules = rendered["job"]["spec"]["podFailurePolicy"]["rules"]

    assert {"containerName": "install", "operator": "NotIn", "values": [0]} in [
        rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"
    ]
    assert {"containerName": "warm-up", "operator": "NotIn", "values": [0]} in [
        rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"
    ]
