"""The pods of stages against the Pod Security Standards, field by field.

Source: Kubernetes 1.34, "Pod Security Standards", profiles Baseline and Restricted.
"""

import copy

import attempts
import pytest
from fakes.kubernetes.podsecurity import violations
from unit.backends.kubernetes.test_kubernetes_security import OFFER

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_manifest import render_attempt
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation

LOGIN = StoreLogin({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
VOLUMES = [
    {"name": "raw", "source": "s3://bucket/raw", "mount_path": "/data/raw"},
    {"name": "claim", "source": "pvc://share", "mount_path": "/data/claim"},
]
SPEC = {"name": "s", "base": {"image": "x:1"}, "volumes": VOLUMES, "outputs": {"m": "/output/m"}}


def pod_of(volumes=VOLUMES, **settings):
    """Return the pod of an attempt that uses most of what a spec can have."""
    request = attempts.request(
        store_url="s3://store",
        run_prefix="dep/dag/run/train/-1",
        run_label="dag.train",
        generation=1,
        attempt=1,
        allocation=Allocation(OFFER),
        command=("python", "train.py"),
        spec=SPEC | {"volumes": volumes},
        secret_env={"TOKEN": "x"},
        store_login=LOGIN if "service_account" not in settings else StoreLogin(),
    )
    return render_attempt(request, Settings.read(settings))["job"]["spec"]["template"]


ALL = ("user", "service_account", "store_volume", "queue", "read_only_root")
WITH = {"user": 1000, "service_account": "a", "store_volume": "claim", "queue": "q", "read_only_root": True}


@pytest.mark.parametrize("also", [(), ("service_account",), ("store_volume",), ("read_only_root",), ALL])
def test_a_pod_with_a_user_satisfies_restricted(also):
    """With any setting beside it that says where the store is and how it is reached (D16)."""
    settings = {name: WITH[name] for name in also} | {"user": 1000}

    assert violations(pod_of(**settings), "restricted") == ""


def test_a_pod_of_an_image_of_root_satisfies_baseline():
    """Without a user the image's own counts, and root keeps capabilities that baseline allows (D16)."""
    assert violations(pod_of(), "baseline") == ""
    assert "runAsNonRoot != true" in violations(pod_of(), "restricted")


CONTROLS = [
    ("baseline", "HostProcess", "spec.securityContext.windowsOptions.hostProcess", True),
    ("baseline", "HostProcess", "*.securityContext.windowsOptions.hostProcess", True),
    ("baseline", "Host namespaces", "spec.hostNetwork", True),
    ("baseline", "Host namespaces", "spec.hostPID", True),
    ("baseline", "Host namespaces", "spec.hostIPC", True),
    ("baseline", "Privileged containers", "*.securityContext.privileged", True),
    ("baseline", "Capabilities", "*.securityContext.capabilities.add", ["SYS_ADMIN"]),
    ("baseline", "HostPath volumes", "spec.volumes", [{"name": "x", "hostPath": {"path": "/"}}]),
    ("baseline", "Host ports", "*.ports", [{"containerPort": 1, "hostPort": 1}]),
    ("baseline", "Host probes", "*.livenessProbe.httpGet", {"host": "10.0.0.1", "port": 1}),
    ("baseline", "Host probes", "*.lifecycle.postStart.tcpSocket", {"host": "10.0.0.1", "port": 1}),
    ("baseline", "AppArmor", "spec.securityContext.appArmorProfile.type", "Unconfined"),
    ("baseline", "AppArmor", "*.securityContext.appArmorProfile.type", "Unconfined"),
    ("baseline", "SELinux", "spec.securityContext.seLinuxOptions.type", "spc_t"),
    ("baseline", "SELinux", "*.securityContext.seLinuxOptions.role", "sysadm_r"),
    ("baseline", "/proc mount type", "*.securityContext.procMount", "Unmasked"),
    ("baseline", "Seccomp", "spec.securityContext.seccompProfile.type", "Unconfined"),
    ("baseline", "Seccomp", "*.securityContext.seccompProfile.type", "Unconfined"),
    ("baseline", "Sysctls", "spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ("restricted", "Volume types", "spec.volumes", [{"name": "x", "nfs": {"server": "s", "path": "/"}}]),
    ("restricted", "Privilege escalation", "*.securityContext.allowPrivilegeEscalation", True),
    ("restricted", "Privilege escalation", "*.securityContext.allowPrivilegeEscalation", None),
    ("restricted", "Running as non-root", "spec.securityContext.runAsNonRoot", None),
    ("restricted", "Running as non-root", "*.securityContext.runAsNonRoot", False),
    ("restricted", "Running as non-root user", "spec.securityContext.runAsUser", 0),
    ("restricted", "Running as non-root user", "*.securityContext.runAsUser", 0),
    ("restricted", "Seccomp", "*.securityContext.seccompProfile.type", "Unconfined"),
    ("restricted", "Capabilities", "*.securityContext.capabilities.drop", ["NET_RAW"]),
    ("restricted", "Capabilities", "*.securityContext.capabilities.add", ["CHOWN"]),
]
"""Profile, control, field (``*``: each container's), and a value that the standard forbids."""


def changed(pod, path, value):
    """Return one pod for each place of the field, which has *value* there; None removes it."""
    first, *parts = path.split(".")
    spec = pod["spec"]
    count = 1 if first == "spec" else len(spec["initContainers"]) + len(spec["containers"])
    for index in range(count):
        new = copy.deepcopy(pod)
        here = (
            new["spec"]
            if first == "spec"
            else [*new["spec"]["initContainers"], *new["spec"]["containers"]][index]
        )
        for part in parts[:-1]:
            here = here.setdefault(part, {})
        if value is None:
            here.pop(parts[-1], None)
        elif isinstance(value, list) and parts[-1] == "volumes":
            here[parts[-1]] = [*here[parts[-1]], *value]
        else:
            here[parts[-1]] = value
        yield new


@pytest.mark.parametrize(("profile", "control", "path", "value"), CONTROLS, ids=lambda one: str(one)[:40])
def test_each_field_of_the_standard_is_compared(profile, control, path, value):
    """A pod that differs in that field alone, in any container, is refused; ours is not (D16)."""
    pod = pod_of(user=1000)

    assert violations(pod, profile) == ""
    assert all(violations(other, profile) for other in changed(pod, path, value)), control


def test_what_a_pod_may_not_have_under_restricted_is_what_a_spec_asks_for():
    """Folders of a machine and NFS shares: a claim (``pvc://``) takes their place (D16)."""
    for source in ("hostPath:/data", "nfs://server/data"):
        pod = pod_of(user=1000, volumes=[{"name": "v", "source": source, "mount_path": "/data/v"}])

        assert "olume" in violations(pod, "restricted")


def test_root_is_not_a_user():
    """``user: 0`` would promise what the kubelet then refuses (D16)."""
    with pytest.raises(SpecError, match="user"):
        Settings.read({"user": 0})


def test_the_root_of_a_training_is_read_only_if_the_deployment_says_so():
    """It keeps a ``/tmp`` of its own, which no sidecar shares; sidecar and installer always have it (D16)."""
    pod = pod_of(user=1000, read_only_root=True)["spec"]
    (main,), rest = pod["containers"], pod["initContainers"]

    assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in (main, *rest))
    (own,) = [one["name"] for one in main["volumeMounts"] if one["mountPath"] == "/tmp"]
    assert {"name": own, "emptyDir": {}} in pod["volumes"]
    assert own not in [mount["name"] for one in rest for mount in one["volumeMounts"]]
    assert "readOnlyRootFilesystem" not in pod_of(user=1000)["spec"]["containers"][0]["securityContext"]
