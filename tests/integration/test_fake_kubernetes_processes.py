"""The fake cluster runs containers for real: files, signals, exit codes, no process left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from fakes.kubernetes import CONFIG_MAPS, JOBS, PODS, Cluster
from fakes.kubernetes.processes import Processes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs mount namespaces")


@pytest.fixture
def cluster(tmp_path):
    """One node that runs commands."""
    with Cluster(executor=Processes(tmp_path / "state")) as cluster:
        yield cluster


def wait_for(what, seconds=20.0):
    """Check until *what* is true; its value."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def pod(name, *containers, volumes=(), init=(), **spec):
    """A pod that ends by itself."""
    whole = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": list(containers)}
    more = {"volumes": list(volumes), "initContainers": list(init)}
    return {
        "metadata": {"name": name},
        "spec": {**whole, **{key: value for key, value in more.items() if value}, **spec},
    }


def container(script, name="main", **more):
    """A container of a shell script."""
    return {"name": name, "image": "registry.local/any:1", "command": ["sh", "-c", script], **more}


def over(cluster, name):
    """The pod once it has ended, else None."""
    found = cluster.get(PODS, name)
    return found if found and found["status"]["phase"] in {"Succeeded", "Failed"} else None


def test_init_container_and_volumes_reach_the_main_container(cluster):
    """A file of an init container and one of a ConfigMap, both where the containers want them."""
    cluster.create(CONFIG_MAPS, {"metadata": {"name": "settings"}, "data": {"lr": "0.1"}})
    shared = {"name": "shared", "mountPath": "/envscaler-test/shared"}
    settings = {"name": "settings", "mountPath": "/etc/envscaler-test", "readOnly": True}
    body = pod(
        "p",
        container(
            "cat /envscaler-test/shared/made /etc/envscaler-test/lr; pwd", volumeMounts=[shared, settings]
        ),
        init=[container("echo by-init > /envscaler-test/shared/made", "prep", volumeMounts=[shared])],
        volumes=[{"name": "shared", "emptyDir": {}}, {"name": "settings", "configMap": {"name": "settings"}}],
    )

    cluster.create(PODS, body)
    done = wait_for(lambda: over(cluster, "p"))

    assert done["status"]["phase"] == "Succeeded"
    assert cluster.log("p") == "by-init\n0.1/\n"
    assert not Path("/envscaler-test").exists()
    assert not Path("/etc/envscaler-test").exists()


def test_signals_and_exit_codes_are_those_of_a_container(cluster):
    """A handler sets its own code; PID 1 without one is killed after the grace period."""
    cluster.create(PODS, pod("polite", container("trap 'exit 9' TERM; echo up; while :; do sleep 0.1; done")))
    cluster.create(PODS, pod("deaf", container("echo up; sleep 60; true"), terminationGracePeriodSeconds=1))
    wait_for(lambda: cluster.log("polite") and cluster.log("deaf"))
    ends = {}

    def note(change):
        for one in (
            change.item["status"].get("containerStatuses") or () if change.resource.plural == "pods" else ()
        ):
            if "terminated" in one["state"]:
                ends[change.item["metadata"]["name"]] = one["state"]["terminated"]["exitCode"]

    cluster.do(lambda: cluster.store.listeners.append(note))
    cluster.pod("polite").delete()
    cluster.pod("deaf").delete()

    wait_for(lambda: not cluster.list(PODS, "default"))
    assert ends == {"polite": 9, "deaf": 137}


def test_memory_beyond_the_limit_is_an_oom_kill(cluster):
    """A container that takes 200 MiB with a limit of 64 MiB ends as OOMKilled."""
    hungry = {
        "name": "main",
        "image": "registry.local/any:1",
        "command": ["python3", "-c", "import time; x = bytearray(200 << 20); time.sleep(60)"],
        "resources": {"limits": {"memory": "64Mi"}},
    }
    cluster.create(PODS, pod("hungry", hungry))

    done = wait_for(lambda: over(cluster, "hungry"))

    ended = done["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_a_sidecar_ends_after_the_main_container(cluster):
    """It gets SIGTERM when the main one has ended, and the pod's phase is the main one's."""
    side = container(
        "trap 'echo bye; exit 0' TERM; while :; do sleep 0.1; done", "side", restartPolicy="Always"
    )

    cluster.create(PODS, pod("p", container("sleep 0.3; exit 3"), init=[side]))
    done = wait_for(lambda: over(cluster, "p"))

    assert done["status"]["phase"] == "Failed"
    assert cluster.log("p", "side") == "bye\n"


def test_an_indexed_job_knows_its_index_and_address(cluster):
    """Each pod prints its own index, its host name and its own loopback address."""
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    one = container("echo $JOB_COMPLETION_INDEX $(hostname) $IP", env=[address])
    template = {
        "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [one]}
    }
    spec = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": template}

    cluster.create(JOBS, {"metadata": {"name": "train"}, "spec": spec})
    wait_for(lambda: cluster.get(JOBS, "train")["status"].get("completedIndexes") == "0,1")

    said = [cluster.log(item["metadata"]["name"]).split() for item in cluster.list(PODS)]
    assert [words[:2] for words in said] == [["0", "train-0"], ["1", "train-1"]]
    assert len({words[2] for words in said}) == 2


def test_nothing_runs_on_after_the_cluster(tmp_path):
    """Also processes that a container put into sessions of its own."""
    with Cluster(executor=Processes(tmp_path / "state")) as cluster:
        cluster.create(PODS, pod("p", container("setsid sleep 987654 & echo up; sleep 987654")))
        wait_for(lambda: cluster.log("p"))

    left = [
        one for one in psutil.process_iter(["cmdline"]) if "987654" in " ".join(one.info["cmdline"] or [])
    ]
    assert left == []
