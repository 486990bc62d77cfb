"""kubectl works with the fake cluster, over HTTPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from fakes.kubernetes import Cluster, Program

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")

JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "train", "labels": {"app": "demo"}},
    "spec": {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "main", "image": "registry.local/train:1"}],
            }
        },
    },
}


@pytest.fixture
def kubectl(tmp_path):
    """Runs kubectl against a cluster whose containers end after a second."""
    with Cluster(tls=True) as cluster:
        cluster.script(Program(seconds=1, prints=((0.0, "hello\n"),)))
        config = cluster.kubeconfig(tmp_path / "config")

        def run(*words, text=None):
            env = {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}
            done = subprocess.run(
                [KUBECTL, *words],
                input=text,
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run


def test_a_job_by_kubectl(kubectl):
    """Apply, wait, list, read, describe, delete: nothing is left."""
    kubectl("apply", "-f", "-", text=json.dumps(JOB))
    kubectl("wait", "--for=condition=complete", "job/train", "--timeout=30s")

    pods = json.loads(kubectl("get", "pods", "-l", "job-name=train", "-o", "json"))["items"]
    said = kubectl("logs", pods[0]["metadata"]["name"])
    described = kubectl("describe", "job", "train")
    kubectl("delete", "job", "train", "--wait=true")
    left = json.loads(kubectl("get", "pods,jobs", "-o", "json"))["items"]

    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded", "Succeeded"]
    assert said == "hello\n"
    assert "Completed" in described
    assert left == []
