"""Ten specs from their YAML to what a backend starts and to the ``start.json`` of the training.

Each is processed as by the owner: loaded, frozen in a store, turned into the request for an attempt, and
rendered by both backends. The sidecar then writes ``start.json`` from the frozen spec, the control and the
layout.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from golden.files import DATA, json_text, replaced

from envscaler_agent.protocol import Control, Manifest, Status, control_name, status_name
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_manifest import (
    render_attempt as render_for_kubernetes,
)
from envscaler_airflow.backends.local import mount_main
from envscaler_airflow.backends.local.node_plan import Programs
from envscaler_airflow.backends.local.node_plan import attempt_name as local_name
from envscaler_airflow.backends.local.node_plan import (
    render_attempt as render_for_local,
)
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.owner.freeze import attempt_request, freeze, write
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import AttemptState
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.setup import lay_out
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Spool
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.manifests import upload, walk, write_manifest
from envscaler_airflow.store.run import Run, spec_name

SPECS = DATA / "specs"
STORE_URL = "s3://runs"
ROOT = PurePosixPath("/golden/attempts")
"""Where the local backend would store attempts."""
OUTPUT = "s3://runs/golden/dag/run/train/-1/outputs/g1-a1-c1/model"
GIB = 1 << 30
HEAD = "10.0.0.1:29400"
"""Address of the rendezvous of several nodes."""

CPU = Offer("kubernetes", "", "node:cpu-2", "on-demand", vcpus=2.0, memory_gib=4.0)


def gpu_offer(kind: str, gpu: str, gpus: int, *, capacity: str = "on-demand", **more: Any) -> Offer:
    """Nodes of a cluster with GPUs."""
    size = {"vcpus": 24.0, "memory_gib": 200.0} | more
    return Offer("kubernetes", "us-east-1", kind, capacity, gpu_name=gpu, gpus=gpus, **size)


A100 = gpu_offer("p4de.24xlarge:gpu-2", "A100-80GB", 2, capacity="spot", zone="us-east-1a", arch="x86_64")
H100 = gpu_offer("a3-highgpu-8g", "H100", 8, vcpus=208.0, memory_gib=1872.0)
MIG = {
    "name": "a100-mig",
    "vcpus": 4,
    "memory_gib": 16,
    "gpu": "A100-1g.5gb",
    "gpus": 1,
    "gpu_memory_gb": 5,
    "gpu_resource": "nvidia.com/mig-1g.5gb",
    "capacity_type": "spot",
    "zone": "b",
    "arch": "arm64",
    "usd_per_hour": 0.6,
    "node_selector": {"pool": "mig"},
    "tolerations": [{"key": "mig", "operator": "Equal", "value": "1g", "effect": "NoSchedule"}],
}
"""A node class with every field."""
POD = {
    "metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
    "spec": {
        "nodeSelector": {"disk": "nvme"},
        "initContainers": [{"name": "warm-up", "image": "w:1"}],
        "containers": [{"name": "base", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        "volumes": [{"name": "extra", "emptyDir": {}}],
    },
}


@dataclass(frozen=True)
class Case:
    """One spec with its allocation; the fields are those of the attempt and of the deployment."""

    allocation: Allocation
    settings: dict[str, Any] = field(default_factory=dict)
    attempt: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] | None = None
    drivers: frozenset[str] = frozenset()
    number: int = 1
    saved_step: int | None = None


CASES = {
    "prepare": Case(Allocation(CPU), {"namespace": "ml", "sidecar_image": "registry.example.com/sidecar:1"}),
    "torchrun": Case(
        Allocation(A100, nodes=4),
        {"provider": "eks", "cluster_spread": "zone", "priority_class": "training", "ttl_s": 3600},
        request={"grace_s": 90.0, "deadline_s": 7200.5},
        control={"checkpoint_every_s": 120.0},
        number=3,
        saved_step=40,
    ),
    "elastic": Case(
        Allocation(gpu_offer("g6.12xlarge", "L4", 2, zone="us-east-1b"), nodes=2),
        {"provider": "karpenter", "node_selector": {"pool": "gpu"}, "longest_s": 86400},
        control={"checkpoint_every_s": 120.0},
    ),
    "mixed": Case(
        Allocation(replace(A100, capacity_type="on-demand"), nodes=4, rest=A100, rest_nodes=3),
        {"cluster_spread": "host"},
        attempt={"checkpoint_every_s": 90.0},
        control={"checkpoint_every_s": 90.0},
    ),
    "deepspeed": Case(
        Allocation(H100, nodes=2),
        {"provider": "gke", "queue": "team", "drain_s": 600, "region": "us-central1"},
        drivers=frozenset({"gcsfuse.csi.storage.gke.io"}),
    ),
    "mig": Case(
        Allocation(Settings.read({"cluster_prices": [MIG]}).cluster_prices[0].offer("eu-1")),
        {"provider": "plain", "cluster_prices": [MIG], "keep": "30m"},
    ),
    "score": Case(
        Allocation(replace(CPU, region="us-east-1")),
        {
            "cache_path": "/var/cache/envscaler",
            "store_volume": {"nfs": {"server": "10.0.0.9", "path": "/runs"}},
            "store_mount": "/var/lib/runs",
            "store_secret": "store-login",
        },
        request={"store_url": "file:///var/lib/runs", "store_options": {"endpoint_url": "http://s3.test"}},
        inputs={"model": OUTPUT, "base": "s3://bucket/base"},
    ),
    "claims": Case(
        Allocation(replace(CPU, zone="us-east-1a")),
        {
            "namespace": "team",
            "user": 1000,
            "service_account": "trainer",
            "pull_secrets": ["mirror"],
            "pod_override": POD,
            "store_volume": "runs",
        },
        request={
            "store_url": "file:///var/lib/envscaler-store",
            "restore_from": "file:///var/lib/envscaler-store/golden/dag/old/train/-1/checkpoints/g1-step-00000040-a1",
        },
    ),
    "alternatives": Case(
        Allocation(gpu_offer("node:gpu-4", "MI300X", 4, memory_gib=48.0)),
        {"image": "registry.example.com/alternatives:env-1", "keep": "on-failure"},
        attempt={"memory_bytes": 40 * GIB, "vcpus": 6.0},
        number=2,
    ),
    "shell": Case(Allocation(replace(CPU, capacity_type="spot"), nodes=2), {"provider": "aks"}),
}


def golden_files(case: str, folder: Path) -> dict[str, str]:
    """Every golden file of *case* by name; *folder* is empty and gets a store and the spools of its nodes."""
    launched = _Launched(case, folder)
    return {f"launches/{case}/{name}": text for name, text in launched.files().items()}


class _Launched:
    """One case from the YAML to both backends."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.case, self.folder = name, CASES[name], folder
        self.key = RunKey("golden", "dag", "run", name)
        self.spec = load_spec(SPECS / f"{name}.yaml", inputs=self.case.inputs)
        (folder / "store").mkdir(parents=True)
        store = FileStore(folder / "store")
        frozen = freeze(self.spec, store)
        write(Run(store, self.key), frozen)
        frozen.discard()
        self.hash, self.document = frozen.spec_hash, dict(frozen.document)
        self.store = Run(store, self.key)
        self.request = self._request(store)

    def _request(self, store):
        case = self.case
        live = AttemptState(1, case.number, case.allocation, **case.attempt)
        stage = Stage(spec=None, spec_source="", resolve_secret=lambda reference: f"value of {reference}")
        found = attempt_request(
            Run(store, self.key), stage, self.spec, live, spec_hash=self.hash, grace_s=30.0
        )
        return replace(found, **{"store_url": STORE_URL, **case.request})

    def files(self) -> dict[str, str]:
        """The frozen spec, what each backend starts, and what the training reads of it."""
        pods = render_for_kubernetes(
            self.request, Settings.read(self.case.settings), drivers=self.case.drivers
        )
        local = self._local()
        parts = pods.get("parts", [pods])
        layouts = [_opened(part["config_map"]["data"]) for part in parts]
        last = self.case.allocation.nodes - 1
        found = {
            "spec.json": self.document,
            "kubernetes.json": pods,
            "local.json": local,
            "start-kubernetes.json": self._start(layouts[0], "kubernetes", node=0),
            "start-local.json": self._start(local["nodes"][0]["layout"], "local", node=0),
        }
        if last:
            found["start-kubernetes-last.json"] = self._start(layouts[-1], "kubernetes", node=last)
        return {name: self._text(body) for name, body in found.items()}

    def _local(self):
        request = self.request
        offer = replace(request.allocation.offer, cloud="local", region="", instance_type="cpu-2", zone=None)
        request = replace(request, allocation=Allocation(offer, request.allocation.nodes))
        return render_for_local(request, ROOT / local_name(request), Programs())

    def _start(self, layout, backend: str, *, node: int):
        """``start.json`` of one node; paths of the layout are below a folder of this test's.

        Volumes are left out: copying them in does not change the file.
        """
        root = self.folder / f"{backend}-{node}"
        root.mkdir()
        case, spool = self.case, Spool(root / "spool")
        context = SidecarContext(
            spool=spool,
            run=self.store,
            who=AttemptNode(1, case.number, node, case.allocation.nodes),
            layout=Layout.model_validate(_below(layout, root)),
            memory=Memory(spool),
            uid=f"pod-{node}",
            address=HEAD if node == 0 and case.allocation.nodes > 1 else None,
            patience_s=0,
        )
        candidates = () if case.saved_step is None else (self._saved(case.saved_step),)
        control = Control(candidates=candidates, **case.control)
        self.store.write(control_name(1, case.number), control.to_json())
        lay_out(context)
        if node == 0:
            self._publish(context)
        return json.loads(replaced(spool.start.read_text(), {str(root): ""}))

    def _publish(self, context: SidecarContext) -> None:
        """The status of node 0, from which the others take its checkpoint and its address."""
        state = context.memory.state
        status = Status(
            attempt=self.case.number,
            start_step=state.start_step,
            restored_from=state.restored_from,
            restored_claim=state.restored_claim,
            address=context.address,
        )
        self.store.write(status_name(1, self.case.number, 0), status.to_json())

    def _saved(self, step: int) -> str:
        """A checkpoint of the previous attempt; returns its name."""
        name = f"g1-step-{step:08d}-a1"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_bytes(b"weights")
        files = upload(self.store, f"checkpoints/{name}", walk(folder))
        manifest = Manifest(files=files, step=step, generation=1, attempt=1)
        write_manifest(self.store, f"checkpoints/{name}", manifest, name="manifest-c1.json")
        return name

    def _text(self, body) -> str:
        """Golden text of *body*: hashes cover every default, and paths are this machine's."""
        names = {
            spec_name(self.hash): "spec-SPEC-HASH.json",
            str(SPECS): "/specs",
            sys.executable: "/bin/python",
            mount_main.__file__: "/package/backends/local/mounted.py",
        }
        if archive := self.document.get("workdir_archive"):
            names[archive] = "workdir-SHA256.tar.zst"
        return replaced(json_text(body), names)


def _opened(data: dict[str, Any]) -> dict[str, Any]:
    """Replace the text of the layout in *data* by the layout itself, a field per line; returns it."""
    text = data["layout.json"]
    data["layout.json"] = json.loads(text)
    if json.dumps(data["layout.json"], sort_keys=True) != text:
        raise ValueError("layout.json: expected sorted keys and json's own separators")
    return data["layout.json"]


def _below(layout: dict[str, Any], root: Path) -> dict[str, Any]:
    """*layout* with every folder below *root*, without volumes."""
    moved = dict(layout, mounts=[], private_folder=None, training_paths={})
    for name in ("work", "checkpoint_path"):
        moved[name] = f"{root}{layout[name]}" if layout.get(name) else None
    moved["outputs"] = {name: f"{root}{path}" for name, path in layout["outputs"].items()}
    return moved
