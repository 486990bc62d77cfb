"""``submit``, ``reap`` and ``kubernetes rbac`` as a user types them, on the fake cluster."""

import copy
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import yaml
from click.testing import CliRunner
from fakes.kubernetes import JOBS, NAMESPACES, PODS, Cluster
from fakes.kubernetes.processes import Processes
from kubernetes_validate import validate
from kubernetes_validate.utils import latest_version

from envscaler_airflow.backends.kubernetes import client, job_reader
from envscaler_airflow.cli import main
from envscaler_airflow.cli.run_commands import SAMPLE

SPEC = """
version: v1
name: hello
base: {image: "python:3"}
resources: {requests: {cpu: 200m, memory: 128Mi}}
entrypoint: [python3, -c, "print('hello from the pod', flush=True)"]
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A shell with a kubeconfig, a store that the pods reach, and a spec."""
    if os.geteuid() != 0:
        pytest.skip("containers need mount namespaces")
    store = tmp_path / "store"
    store.mkdir()
    config = tmp_path / "settings.yaml"
    settings = {"store_volume": {"hostPath": {"path": str(store)}}, "store_mount": str(store)}
    config.write_text(yaml.safe_dump({**settings, "sidecar_image": "agent:1", "wait_for_node_s": 0}))
    (tmp_path / "hello.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSCALER_STORE_URL", f"file://{store}")
    with Cluster(nodes=1, executor=Processes(tmp_path / "state")) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "config")))

        def run(*words):
            return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)

        run.cluster = cluster
        yield run
        job_reader.close_views()


def test_a_stage_is_submitted_shown_and_adopted(shell, monkeypatch):
    """The same name again continues the run; others read it by name.

    One watch replaces a query each second (D16), and of the store's volume the pod sees only
    the folder of its own run.
    """
    started = []
    real = job_reader.View.start
    monkeypatch.setattr(job_reader.View, "start", lambda view: (started.append(view), real(view)))
    words = (
        "submit",
        "-f",
        "hello.yaml",
        "--cluster",
        "fake",
        "--name",
        "first",
        "--config",
        "settings.yaml",
    )

    result = shell(*words)

    assert result.exit_code == 0, result.output
    assert "hello from the pod" in result.output
    assert "first/hello" in result.output
    assert "hello from the pod" in shell("logs", "first").output
    assert "succeeded" in shell("status", "first").output
    assert len(shell.cluster.list(JOBS, "default")) == 1
    assert len(started) == 1


def test_render_shows_what_submit_sends(shell, monkeypatch):
    """Job and ConfigMap are equal for a run of that name, except for the chosen node's type (A6)."""
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "shell")
    sent = {}
    create = client.Cluster.create

    def kept(cluster, path, body):
        sent.setdefault(body["kind"], copy.deepcopy(body))
        return create(cluster, path, body)

    monkeypatch.setattr(client.Cluster, "create", kept)

    shown = shell("render", "-f", "hello.yaml", "--target", "kubernetes", "--config", "settings.yaml")
    done = shell("submit", "-f", "hello.yaml", "--name", SAMPLE, "--config", "settings.yaml")

    assert (shown.exit_code, done.exit_code) == (0, 0), shown.output + done.output
    sent["ConfigMap"]["metadata"].pop("ownerReferences")  # the Job's uid is known once it exists
    found = {body["kind"]: body for body in yaml.safe_load_all(shown.output)}
    any_node, chosen = (conditions_on_nodes(documents["Job"]) for documents in (found, sent))
    assert found == sent
    assert [one for one in chosen if one not in any_node] == [
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}
    ]


def conditions_on_nodes(job):
    """Remove the conditions of *job* on its nodes, which submit chooses, and return them."""
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    required = affinity.pop("requiredDuringSchedulingIgnoredDuringExecution")
    return [one for term in required["nodeSelectorTerms"] for one in term["matchExpressions"]]


def test_a_name_that_another_process_holds_is_taken_over(shell, tmp_path):
    """The first shell ends and reports why; the pod keeps running; any shell can follow and stop it."""
    forever = "import time; print('hello from the pod', flush=True); time.sleep(600)"
    (tmp_path / "hello.yaml").write_text(SPEC.replace("print('hello from the pod', flush=True)", forever))
    words = ("submit", "-f", "hello.yaml", "--name", "first", "--config", "settings.yaml")
    with ExitStack() as stack:
        first = started(stack, *words)
        until(lambda: "hello from the pod" in shell("logs", "first").output if names_of(shell) else False)
        [pod] = shell.cluster.list(PODS, "default")

        second = started(stack, *words)
        follower = started(stack, "logs", "-f", "first")
        said = first.communicate(timeout=60)[1]
        shell("cancel", "first")
        end = second.communicate(timeout=90)[1]

        assert (first.returncode, second.returncode) == (2, 87)
        assert "another process was started with this name" in said
        assert "stopped" in end
        assert [one["metadata"]["uid"] for one in shell.cluster.list(PODS, "default")] in (
            [],
            [pod["metadata"]["uid"]],
        )
        assert len(shell.cluster.list(JOBS, "default")) == 1
        assert follower.communicate(timeout=30)[0].count("hello from the pod") == 1


def test_a_run_whose_process_was_killed_is_stopped_on_its_own_cluster(shell, tmp_path, monkeypatch):
    """Not on the cluster of the shell's usual context, nor in its usual namespace (D6)."""
    shell.cluster.create(NAMESPACES, {"metadata": {"name": "ml"}})
    own = (tmp_path / "config").rename(tmp_path / "own-config")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    (tmp_path / "hello.yaml").write_text(
        SPEC.replace("flush=True)", "flush=True); import time; time.sleep(600)")
    )
    where = ("--kubeconfig", own.name, "--cluster", "fake", "--namespace", "ml", "--config", "settings.yaml")
    with ExitStack() as stack:
        first = started(stack, "submit", "-f", "hello.yaml", "--name", "first", *where)
        until(lambda: shell.cluster.list(PODS, "ml") and "hello from" in shell("logs", "first").output)
        first.kill()
        first.wait(10)

    result = shell("cancel", "first", "--wait")

    assert result.exit_code == 0, result.output
    assert "no owner watches it" in result.output
    assert "first/hello/-1: stopped" in result.output
    [job] = shell.cluster.list(JOBS, "ml")
    assert "stopped" in shell("status", "first").output
    assert job["status"].get("active", 0) == 0


def started(stack, *words):
    """A process of its own, which ends with the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "envscaler_airflow.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait, 10)
    stack.callback(process.stdout.close)
    stack.callback(process.stderr.close)
    stack.callback(process.kill)
    return process


def until(claim, *, seconds=60):
    """Wait for it."""
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.3)


def names_of(shell):
    """Existing Jobs."""
    return [job["metadata"]["name"] for job in shell.cluster.list(JOBS, "default")]


def test_an_offer_whose_node_does_not_come_is_followed_by_the_next(shell, tmp_path):
    """The cheapest first; after its time the attempt is abandoned as not started (feature B6)."""
    settings = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    settings["wait_for_node_s"] = 8
    settings["cluster_prices"] = [
        {"name": "ghost", "vcpus": 64, "memory_gib": 64, "usd_per_hour": 0.01},
        {"name": "small", "vcpus": 1, "memory_gib": 1, "usd_per_hour": 1.0},
    ]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "hello.yaml").write_text(SPEC.replace("cpu: 200m, ", "").replace("memory: 128Mi", ""))

    result = shell("submit", "-f", "hello.yaml", "--name", "first", "--config", "settings.yaml")

    assert result.exit_code == 0, result.output
    assert "no machine is available: 0/1 nodes are available" in result.output
    assert "hello from the pod" in result.output


def test_a_context_that_does_not_exist_is_named(shell):
    """And no Job is created."""
    result = shell("submit", "-f", "hello.yaml", "--cluster", "elsewhere", "--config", "settings.yaml")

    assert result.exit_code == 2
    assert "elsewhere" in result.output
    assert shell.cluster.list(JOBS, "default") == []


def test_reap_leaves_what_is_young_and_what_is_of_another_store(shell):
    """An attempt that ended a moment ago keeps everything."""
    shell("submit", "-f", "hello.yaml", "--name", "first", "--config", "settings.yaml")

    result = shell("reap", "--config", "settings.yaml")

    assert result.exit_code == 0, result.output
    assert result.output == "0 gone\n"
    assert len(shell.cluster.list(JOBS, "default")) == 1


@pytest.mark.parametrize("grace", ["nan", "-3", "inf"])
def test_a_grace_that_is_no_time_is_refused(grace):
    """The error comes before any request to a cluster."""
    result = CliRunner().invoke(main, ["reap", "--grace", grace])

    assert result.exit_code == 2
    assert "--grace" in result.output


def test_the_rights_are_printed_for_kubectl():
    """For a namespace and an account; valid, and without nodes if the Role may not read them."""
    words = ["kubernetes", "rbac", "--namespace", "ml", "--account", "runner"]

    whole, less = (CliRunner().invoke(main, [*words, *more]).output for more in ([], ["--no-nodes"]))

    documents = list(yaml.safe_load_all(whole))
    for document in documents:
        validate(document, latest_version(), strict=True)
    assert [one["kind"] for one in documents] == [
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
    ]
    subjects = [subject for one in documents for subject in one.get("subjects", ())]
    assert {(one["name"], one["namespace"]) for one in subjects} == {("runner", "ml")}
    assert "nodes" not in less


def test_the_right_to_list_all_pods_is_printed_when_asked_for():
    """Only a cluster that adds no nodes needs it (D16)."""
    usual, more = (
        list(yaml.safe_load_all(CliRunner().invoke(main, ["kubernetes", "rbac", *words]).output))
        for words in ([], ["--all-pods"])
    )

    added = [one for one in more if one not in usual]
    assert [(one["kind"], one["metadata"]["name"]) for one in added] == [
        ("ClusterRole", "envscaler-all-pods"),
        ("ClusterRoleBinding", "envscaler-all-pods-default"),
    ]
    assert added[0]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    for document in added:
        validate(document, latest_version(), strict=True)
