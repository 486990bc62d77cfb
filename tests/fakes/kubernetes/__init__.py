"""A stateful fake of Kubernetes for tests: real HTTP, real controllers' behaviour, no containers needed.

>>> with Cluster(nodes=1, speed=0) as cluster:  # doctest: +SKIP
...     client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig(tmp_path / "config")))
...     cluster.add_node("gpu-1", gpus=8, labels={"karpenter.sh/capacity-type": "spot"})
...     cluster.script(Program(seconds=60, exit_code=3), pod="train-*")
...     cluster.advance(60)
...     cluster.node("gpu-1").vanish()
"""

from fakes.kubernetes.cluster import LATE_PACE, REAL_PACE, Cluster, Pace
from fakes.kubernetes.faults import Fault
from fakes.kubernetes.programs import Program
from fakes.kubernetes.resources import (
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    PRIORITIES,
    QUOTAS,
    SECRETS,
    Resource,
)

__all__ = [
    "CLAIMS",
    "CONFIG_MAPS",
    "EVENTS",
    "JOBS",
    "LATE_PACE",
    "NAMESPACES",
    "NODES",
    "PODS",
    "PRIORITIES",
    "QUOTAS",
    "REAL_PACE",
    "SECRETS",
    "Cluster",
    "Fault",
    "Pace",
    "Program",
    "Resource",
]
