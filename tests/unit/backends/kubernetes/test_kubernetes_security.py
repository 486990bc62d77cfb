"""The permissions of each container of a pod, and which container has credentials."""

import json
import os

import attempts
import pytest

from envscaler_agent.spool import Spool
from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.kubernetes import pod_sidecar
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_manifest import render_attempt
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.sidecar.context import load_store_keys

OFFER = Offer("kubernetes", "", "small", "on-demand", 2, 4)
MOUNT = "/var/lib/envscaler-store"
IDENTITY = {"/var/run/secrets/kubernetes.io/serviceaccount", "/etc/envscaler-store-keys", MOUNT}


def pod_of(settings=None, *, spec=None, **fields):
    """Return the pod of one attempt, its spec and metadata."""
    request = attempts.request(
        store_url=fields.pop("store_url", "s3://store"),
        run_prefix="dep/dag/run/train/-1",
        run_label="dag.train",
        generation=1,
        attempt=1,
        allocation=Allocation(OFFER),
        command=("python", "train.py"),
        spec={"name": "s", "base": {"image": "x:1"}, **(spec or {})},
        **fields,
    )
    return render_attempt(request, Settings.read(settings or {}))["job"]["spec"]["template"]


def containers_of(pod):
    """Return containers by name."""
    return {one["name"]: one for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])}


def mounts_of(pod, name):
    """Return the mounts of a container, by path."""
    return {one["mountPath"]: one for one in containers_of(pod)[name]["volumeMounts"]}


def test_the_token_of_the_service_account_is_the_sidecars_alone():
    """Kubernetes mounts none by default, and neither training nor installer gets one (B2)."""
    pod = pod_of({"service_account": "trainer"})

    assert pod["spec"]["automountServiceAccountToken"] is False
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    holders = [name for name in containers_of(pod) if path in mounts_of(pod, name)]
    assert holders == ["sidecar"]
    volume = next(one for one in pod["spec"]["volumes"] if one["name"] == "token")
    assert volume["projected"]["sources"][0]["serviceAccountToken"]["path"] == "token"


def test_webhooks_of_clouds_leave_the_training_without_the_identity():
    """IRSA, EKS Pod Identity and Azure inject into the sidecar alone (B2)."""
    marks = pod_of({"service_account": "trainer"})["metadata"]["annotations"]

    assert marks == {
        "eks.amazonaws.com/skip-containers": "main,install",
        "azure.workload.identity/skip-containers": "main;install",
    }


def test_a_pod_override_gives_the_training_the_identity_back():
    """The user requests it explicitly (B2)."""
    mark = {"eks.amazonaws.com/skip-containers": "install"}
    settings = {"service_account": "trainer", "pod_override": {"metadata": {"annotations": mark}}}

    assert pod_of(settings)["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"] == "install"


def test_keys_of_the_store_are_files_of_the_sidecar():
    """In no environment, and in no other container (B1)."""
    pod = pod_of({"store_secret": "store-login"})

    assert all("envFrom" not in one for one in containers_of(pod).values())
    holders = [name for name in containers_of(pod) if "/etc/envscaler-store-keys" in mounts_of(pod, name)]
    assert holders == ["sidecar"]
    variables = {one["name"]: one.get("value") for one in containers_of(pod)["sidecar"]["env"]}
    assert variables["ENVSCALER_STORE_KEYS"] == "/etc/envscaler-store-keys"


def keys_of(pod):
    """Return the volume of the store's keys; None without one."""
    return next((one["secret"] for one in pod["spec"]["volumes"] if one["name"] == "store-keys"), None)


def test_keys_of_the_store_s_connection_are_files_of_the_sidecar():
    """They are in the attempt's own Secret, of which the sidecar sees nothing else."""
    login = StoreLogin({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "canary"})
    pod = pod_of(store_login=login, secret_env={"AWS_ACCESS_KEY_ID": "of-the-training"})

    holders = [name for name in containers_of(pod) if "/etc/envscaler-store-keys" in mounts_of(pod, name)]
    assert holders == ["sidecar"]
    assert [(one["key"], one["path"]) for one in keys_of(pod)["items"]] == [
        ("store.AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ("store.AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
    ]
    assert "canary" not in json.dumps(pod)
    names = [one["name"] for one in containers_of(pod)["sidecar"]["env"]]
    assert "ENVSCALER_STORE_KEYS" in names


@pytest.mark.parametrize(
    "login",
    [
        StoreLogin({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}),
        StoreLogin(refusal="connection 'store' assumes a role"),
        StoreLogin(profile="team"),
    ],
)
def test_pods_with_an_identity_of_their_own_get_no_credentials_of_a_connection(login):
    """The pods' own identity may be limited to what a machine needs."""
    own = keys_of(pod_of({"store_secret": "store-login"}, store_login=login))

    assert own == {"secretName": "store-login", "defaultMode": 0o400}
    assert keys_of(pod_of({"service_account": "trainer"}, store_login=login)) is None


@pytest.mark.parametrize(
    ("login", "words"),
    [
        (StoreLogin(refusal="connection 'store' assumes a role"), "connection 'store' assumes a role: "),
        (StoreLogin(profile="team"), "profile_name 'team' names files that a pod does not have: "),
    ],
)
def test_a_login_that_a_pod_could_not_use_is_refused(login, words):
    """The message has the reason, and what to set instead."""
    with pytest.raises(SpecError, match=f"{words}set service_account or store_secret"):
        pod_of(store_login=login)


def test_keys_in_files_become_variables_of_this_process(tmp_path, monkeypatch):
    """As a mounted Secret has them: links, beside folders of Kubernetes' own (B1)."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026/AWS_SECRET_ACCESS_KEY").write_text("canary")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").symlink_to("..data/AWS_SECRET_ACCESS_KEY")
    (tmp_path / "not-a-variable").write_text("x")
    monkeypatch.setenv("ENVSCALER_STORE_KEYS", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))

    load_store_keys()

    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "canary"
    assert "not-a-variable" not in os.environ


def test_without_a_user_the_pod_is_as_narrow_as_images_allow():
    """Seccomp for all; capabilities over files and users, and one more for the sidecar (D16, B1)."""
    pod = pod_of()

    assert pod["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    found = {name: one["securityContext"] for name, one in containers_of(pod).items()}
    assert all(one["allowPrivilegeEscalation"] is False for one in found.values())
    assert {name: one["capabilities"] for name, one in found.items()} == {
        "install": {"drop": ["ALL"]},
        "sidecar": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
        "main": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]},
    }


def test_with_a_user_no_container_has_any_capability():
    """As the restricted pod security standard requires (D16)."""
    pod = pod_of({"user": 1000})

    for container in containers_of(pod).values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("url", [f"file://{MOUNT}/runs", f"{MOUNT}/runs"])
def test_of_a_volume_with_the_store_a_pod_gets_its_own_run(url):
    """And nothing of other runs (D16)."""
    pod = pod_of({"store_volume": "claim"}, store_url=url)

    below = "runs/dep/dag/run/train/-1"
    expected = {"name": "store", "mountPath": f"{MOUNT}/{below}", "subPath": below}
    found = [one for path, one in mounts_of(pod, "sidecar").items() if path.startswith(MOUNT)]
    assert found == [expected]
    assert not [path for path in mounts_of(pod, "main") if path.startswith(MOUNT)]


def test_what_a_stage_reads_of_other_runs_is_mounted_for_reading():
    """An input of an earlier stage, and the checkpoint that it begins from (D16)."""
    store = f"file://{MOUNT}"
    volumes = [
        {
            "name": "model",
            "source": f"{store}/dep/dag/run/prepare/-1/outputs/g1-a1-c1/data",
            "mount_path": "/m",
        },
        {"name": "raw", "source": "s3://bucket/raw", "mount_path": "/raw"},
    ]
    origin = f"{store}/dep/dag/old/train/-1/checkpoints/g1-step-00000100-a1"
    pod = pod_of({"store_volume": "claim"}, store_url=store, spec={"volumes": volumes}, restore_from=origin)

    found = {
        one["subPath"]: one.get("readOnly", False)
        for path, one in mounts_of(pod, "sidecar").items()
        if path.startswith(MOUNT)
    }
    assert found == {
        "dep/dag/run/train/-1": False,
        "dep/dag/run/prepare/-1/outputs/g1-a1-c1/data": True,
        "dep/dag/old/train/-1/checkpoints/g1-step-00000100-a1": True,
    }


def test_a_store_that_lies_elsewhere_leaves_the_volume_whole():
    """The URL does not reveal the store's path within the volume (D16)."""
    pod = pod_of({"store_volume": "claim"}, store_url="file:///elsewhere")

    assert mounts_of(pod, "sidecar")[MOUNT] == {"name": "store", "mountPath": MOUNT}


def test_a_sidecar_that_restarts_opens_no_folder_that_the_training_links_to(tmp_path):
    """The container makes the folders of chunks writable for every user, and nothing else (B1)."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    spool = Spool(tmp_path / "spool")
    pod_sidecar.prepare(spool, 0)
    spool.logs.rmdir()
    spool.logs.symlink_to(own)

    pod_sidecar.prepare(spool, 0)

    assert own.stat().st_mode & 0o777 == 0o700
    assert spool.metrics.stat().st_mode & 0o777 == 0o777
    assert json.loads((spool.root / "node.json").read_bytes())["node"] == 0
