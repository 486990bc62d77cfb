"""Volumes on this machine: an unavailable one is reported before anything starts."""

import attempts
import pytest

from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.machine import Machine
from envscaler_airflow.backends.local.node_plan import host_source, volume_faults
from envscaler_airflow.envspec.models import Volume
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.offers import Allocation, Offer

OFFER = Offer("local", "", "cpu-1", "on-demand", vcpus=1, memory_gib=1.0)


def volume(source, path="/data"):
    """Return one volume."""
    return Volume(name="v", source=source, mount_path=path)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("pvc://claim", "pvc://claim is a claim of Kubernetes; write another source under targets"),
        ("nfs://filer/x", "nfs://filer/x is not mounted at /data; mount it first"),
        ("hostPath:/gone", "/gone does not exist here; make it, or name another folder under targets"),
        ("hostPath:///here", None),
        ("s3://bucket/x", None),
        ("file:///gone", None),
    ],
)
def test_faults_of_volumes(source, fault):
    """The sidecar checks copied volumes, since it waits for a store that does not answer."""
    got = volume_faults([volume(source)], has_path=lambda path: path == "/here", is_mounted=lambda _: False)

    assert got == ([] if fault is None else [f"volumes: v: {fault}"])


def test_a_mounted_export_is_had():
    """The machine's own mount counts, at the spec's path."""
    assert volume_faults([volume("nfs://filer/x")], is_mounted=lambda path: path == "/data") == []
    assert host_source(volume("nfs://filer/x")) == "hostPath:/data"
    assert host_source(volume("s3://b/x")) == "s3://b/x"


def test_an_attempt_with_a_claim_is_refused_and_leaves_nothing(tmp_path):
    """Never available here: no retry."""
    backend = LocalBackend(tmp_path / "root", machine=Machine(cpus=(0,), memory_bytes=2 << 30))
    request = attempts.request(
        store_url="file:///s", run_prefix="d/g/r/t/-1", run_label="g.t", generation=1, attempt=1,
        allocation=Allocation(OFFER), command=("true",), spec={"volumes": [volume("pvc://claim").model_dump()]},
    )  # fmt: skip

    with pytest.raises(SpecError, match="claim of Kubernetes"):
        backend.submit(request)

    assert not (tmp_path / "root").exists()
