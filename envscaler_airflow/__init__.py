"""Right-sized, resumable machine-learning stages for Apache Airflow.

Python imports each public name on first use, so that a DAG file pays only for what it names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envscaler_agent import __version__ as __version__

if TYPE_CHECKING:
    from envscaler_airflow.hooks.checkpoint import CheckpointHook as CheckpointHook
    from envscaler_airflow.hooks.pricing import CloudPricingHook as CloudPricingHook
    from envscaler_airflow.operators.clean_up import PruneOperator as PruneOperator
    from envscaler_airflow.operators.clean_up import ReapOperator as ReapOperator
    from envscaler_airflow.operators.params import spec_params as spec_params
    from envscaler_airflow.operators.stage import EnvStageOperator as EnvStageOperator
    from envscaler_airflow.sensors.scaling import ScalingSensor as ScalingSensor

__all__ = [
    "CheckpointHook",
    "CloudPricingHook",
    "EnvStageOperator",
    "PruneOperator",
    "ReapOperator",
    "ScalingSensor",
    "__version__",
    "get_provider_info",
    "spec_params",
]

_HOMES = {
    "CheckpointHook": "envscaler_airflow.hooks.checkpoint",
    "CloudPricingHook": "envscaler_airflow.hooks.pricing",
    "EnvStageOperator": "envscaler_airflow.operators.stage",
    "PruneOperator": "envscaler_airflow.operators.clean_up",
    "ReapOperator": "envscaler_airflow.operators.clean_up",
    "ScalingSensor": "envscaler_airflow.sensors.scaling",
    "spec_params": "envscaler_airflow.operators.params",
}


def __getattr__(name: str) -> Any:
    """Import *name* from where it lives.

    Raises:
        AttributeError: No such public name.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'envscaler_airflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})


def get_provider_info() -> dict[str, Any]:
    """What Airflow shows of this provider: operators, hooks, the connection form and the settings."""
    name = "envscaler"
    return {
        "package-name": "envscaler-airflow",
        "name": name,
        "description": "Machine-learning stages from one environment spec, right-sized and resumable.",
        "integrations": [{"integration-name": name, "tags": ["software"]}],
        "operators": _modules(name, "operators.stage", "operators.clean_up"),
        "sensors": _modules(name, "sensors.scaling"),
        "triggers": _modules(name, "triggers.stage_trigger", "triggers.scaling_trigger"),
        "hooks": _modules(name, "hooks.checkpoint", "hooks.pricing", "hooks.prometheus"),
        "connection-types": [_store_connection()],
        "extra-links": ["envscaler_airflow.operators.stage.RunStoreLink"],
        "config": {name: {"description": "Settings of envscaler-airflow.", "options": _settings()}},
    }


def _modules(name: str, *modules: str) -> list[dict[str, Any]]:
    return [{"integration-name": name, "python-modules": [f"{__name__}.{module}" for module in modules]}]


def _settings() -> dict[str, Any]:
    return {
        "store_url": _option(
            "URL of the run store, as operators, triggerer, API server and machines all see "
            "it: an absolute path, file://, s3:// or another fsspec URL.",
            "s3://ml-runs/envscaler",
        ),
        "deployment": _option(
            "Name of this Airflow within the store. Required for a store that several "
            "deployments can reach; a file store without one gets a generated name.",
            "production",
        ),
        "local_root": _option(
            "Folder for attempts of the local backend; /var/tmp/envscaler-<uid> when empty.",
            "/scratch/envscaler",
        ),
        "kubernetes": _option(
            "Settings of the Kubernetes backend, JSON; those of a connection go over them.",
            '{"namespace": "training"}',
        ),
        "prometheus_url": _option(
            "URL of the Prometheus server that scaling rules with a query ask, as the triggerer sees it; "
            "prometheus_conn_id of a ScalingSensor goes over it.",
            "http://prometheus.monitoring:9090",
        ),
    }


def _option(description: str, example: str) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": "string",
        "example": example,
        "default": "",
    }


def _store_connection() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    return {
        "connection-type": "envscaler_store",
        "hook-class-name": "envscaler_airflow.hooks.checkpoint.CheckpointHook",
        "hook-name": "envscaler run store",
        "conn-fields": {
            "region_name": {"label": "Region", "schema": text, "description": "S3 only"},
            "endpoint_url": {
                "label": "Endpoint URL",
                "schema": text,
                "description": "S3-compatible stores only; empty for AWS",
            },
        },
        "ui-field-behaviour": {
            "hidden-fields": ["schema", "port"],
            "relabeling": {"host": "Store URL", "login": "Access key id", "password": "Secret access key"},
            "placeholders": {
                "host": "s3://bucket/prefix, file:///path or another fsspec URL",
                "login": "empty: the machine's own identity",
            },
        },
    }
