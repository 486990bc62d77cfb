"""GPUs of a cluster's nodes, by the resource that pods request them as."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.backends.kubernetes.cluster_offers import derived_offers
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.scheduling import gpu_resource
from envscaler_airflow.catalog.accelerators import accelerators, resource_of
from envscaler_airflow.catalog.nodes import quantity
from envscaler_airflow.cli import main
from envscaler_airflow.errors import SpecError

A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960"}
MI300 = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
ARC = {"gpu.intel.com/product": "Max_1100", "gpu.intel.com/device-id.0380-0bda.count": "2"}
EIGHT = {"node.kubernetes.io/instance-type": "p4d.24xlarge", "nvidia.com/mig.strategy": "mixed"}


def node(labels, **devices):
    """A machine of 96 CPUs besides a sidecar's tenth of one, with these resources."""
    room = {"cpu": "96100m", "memory": "1152Gi"}
    return {
        "metadata": {"name": "n", "labels": labels},
        "spec": {},
        "status": {
            "allocatable": room | {name: str(count) for name, count in devices.items()},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.mark.parametrize(
    ("labels", "devices", "expected"),
    [
        (A100, {"nvidia.com/gpu.shared": 32}, [("A100-shared", 1, 20.0)]),
        (
            A100 | {"nvidia.com/gpu.count": "8", "nvidia.com/gpu.replicas": "4"},
            {"nvidia.com/gpu.shared": 32},
            [("A100-shared", 1, 10.0)],
        ),
        (A100, {"nvidia.com/mig-1g.5gb": 7}, [("A100-MIG-1g.5gb", 7, 5.0)]),
        (A100, {"nvidia.com/mig-1g.5gb.me": 1}, [("A100-MIG-1g.5gb.me", 1, 5.0)]),
        (
            A100 | {"nvidia.com/mig-3g.20gb.replicas": "2"},
            {"nvidia.com/mig-3g.20gb.shared": 4},
            [("A100-MIG-3g.20gb-shared", 1, 10.0)],
        ),
        (
            A100,
            {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 6, "nvidia.com/mig-1g.5gb": 7},
            [("A100", 6, 40.0), ("A100-MIG-3g.20gb", 2, 20.0), ("A100-MIG-1g.5gb", 7, 5.0)],
        ),
        (MI300, {"amd.com/gpu": 8}, [("MI300X", 8, 192.0)]),
        ({}, {"amd.com/gpu": 2}, [("AMD-GPU", 2, None)]),
        (MI300, {"amd.com/cpx_nps4": 64}, [("MI300X-CPX", 64, 24.0)]),
        (
            MI300 | {"amd.com/gpu.compute-memory-partition": "dpx_nps1"},
            {"amd.com/gpu": 16},
            [("MI300X-DPX", 16, 96.0)],
        ),
        (ARC, {"gpu.intel.com/i915": 2, "gpu.intel.com/i915_monitoring": 1}, [("Intel-Max-1100", 2, None)]),
        (ARC, {"gpu.intel.com/xe": 8}, [("Intel-Max-1100-shared", 1, None)]),
        ({}, {"gpu.intel.com/xe": 1}, [("Intel-GPU", 1, None)]),
        ({}, {"nvidia.com/gpu": 0, "nvidia.com/rdma": 4, "hugepages-1Gi": "2Gi"}, []),
    ],
)
def test_each_resource_is_gpus_of_its_own_name(labels, devices, expected):
    """Whole ones, shares and partitions, of every vendor; a pod gets at most one share (D13)."""
    found = accelerators(labels, devices, lambda text: quantity(str(text)))

    assert [(one.name, one.per_pod, one.memory_gb) for one in found] == expected


def test_a_part_of_a_gpu_costs_its_part_of_the_node():
    """Six whole GPUs, one in sevenths, and six sevenths of the last (D13)."""
    devices = {"nvidia.com/gpu": 6, "nvidia.com/mig-1g.5gb": 7, "nvidia.com/mig-3g.20gb": 2}
    settings = Settings(usd_per_hour={"p4d.24xlarge": 32.0})

    offers = derived_offers([node(A100 | EIGHT, **devices)], settings)

    found = {offer.instance_type: (offer.usd_per_hour, gpu_resource(offer, settings)) for offer in offers}
    total = 6 + 7 / 7 + 2 * 3 / 7
    assert found["p4d.24xlarge:gpu-4"] == (pytest.approx(32 * 4 / total), "nvidia.com/gpu")
    assert found["p4d.24xlarge:mig-1g.5gb-1"] == (pytest.approx(32 / 7 / total), "nvidia.com/mig-1g.5gb")
    assert found["p4d.24xlarge:mig-3g.20gb-2"] == (
        pytest.approx(32 * 6 / 7 / total),
        "nvidia.com/mig-3g.20gb",
    )
    assert len(found) == len(offers)


@pytest.mark.parametrize(
    ("labels", "devices", "resource"),
    [
        (MI300, {"amd.com/gpu": 1}, "amd.com/gpu"),
        ({}, {"amd.com/gpu": 1}, "amd.com/gpu"),
        (MI300, {"amd.com/cpx_nps4": 1}, "amd.com/cpx_nps4"),
        (ARC, {"gpu.intel.com/xe": 1}, "gpu.intel.com/xe"),
        (A100, {"nvidia.com/gpu.shared": 4}, "nvidia.com/gpu.shared"),
    ],
)
def test_a_pod_requests_the_resource_that_its_offer_is_of(labels, devices, resource):
    """The node's name for it, independent of the GPU's name (D13)."""
    [offer] = derived_offers([node(labels, **devices)], Settings())

    assert gpu_resource(offer, Settings()) == resource


def test_a_resource_of_no_gpu_is_refused():
    """A unit that no vendor has, and a node class that names one (D13)."""
    with pytest.raises(ValueError, match="is not a GPU resource"):
        resource_of("rdma", "A100")
    with pytest.raises(SpecError, match="write one of the node's allocatable ones"):
        Settings.read(
            {
                "cluster_prices": [
                    {
                        "name": "a",
                        "vcpus": 1,
                        "memory_gib": 1,
                        "gpu": "T4",
                        "gpus": 1,
                        "gpu_resource": "rdma/hca",
                    }
                ]
            }
        )


def test_a_class_of_nodes_names_the_resource_of_its_gpus():
    """For clusters whose nodes may not be read (D13)."""
    kind = {"name": "mig", "vcpus": 4, "memory_gib": 16, "gpu": "A100-MIG-1g.5gb", "gpus": 1}
    settings = Settings(cluster_prices=[{**kind, "gpu_resource": "nvidia.com/mig-1g.5gb"}])
    single = Settings(cluster_prices=[kind])

    assert gpu_resource(settings.cluster_prices[0].offer(""), settings) == "nvidia.com/mig-1g.5gb"
    assert gpu_resource(single.cluster_prices[0].offer(""), single) == "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("gpu", "labels", "devices", "expected"),
    [
        (
            "count: 1",
            A100,
            {"nvidia.com/gpu.shared": 4},
            "A100-shared is a part of a GPU; write gpu.type: A100-shared",
        ),
        ("count: 1", A100, {"nvidia.com/mig-1g.5gb": 7}, "A100-MIG-1g.5gb is a part of a GPU"),
        ("{type: A100, count: 2}", A100, {"nvidia.com/mig-1g.5gb": 7}, "has A100-MIG-1g.5gb, A100 asked"),
        ("count: 1", ARC, {"gpu.intel.com/xe": 2}, "write gpu.vendor: intel"),
        ("{vendor: nvidia, count: 1}", MI300, {"amd.com/gpu": 8}, "MI300X is of amd, nvidia asked"),
        ("{type: A100-MIG-1g.5gb, count: 2}", A100, {"nvidia.com/mig-1g.5gb": 7}, None),
        ("{type: nvidia-a100-mig-1g.5gb}", A100, {"nvidia.com/mig-1g.5gb": 7}, None),
        ("{type: A100-shared}", A100, {"nvidia.com/gpu.shared": 4}, None),
        ("{vendor: amd, count: 8}", MI300, {"amd.com/gpu": 8}, None),
        ("{vendor: intel, count: 2}", ARC, {"gpu.intel.com/xe": 2}, None),
    ],
)
def test_a_part_of_a_gpu_is_for_those_who_name_it(tmp_path, monkeypatch, gpu, labels, devices, expected):
    """A plan on a node with only parts names them, and uses one where it is requested (D13)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    gpu = gpu if gpu.startswith("{") else f"{{{gpu}}}"
    text = f"{{version: v1, name: x, resources: {{requests: {{gpu: {gpu}}}}}, entrypoint: [a]}}"
    (tmp_path / "s.yaml").write_text(text)
    words = ["plan", "-f", str(tmp_path / "s.yaml"), "--nodes", "-", "--node-price", "*=1"]

    got = CliRunner().invoke(main, words, input=json.dumps({"items": [node(labels, **devices)]}))

    assert (got.exit_code == 0) == (expected is None), got.output
    if expected is not None:
        assert "no offer fits" in got.output
        assert expected in " ".join(got.output.split())
