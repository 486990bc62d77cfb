"""The environment spec: one YAML document per stage.

Names are loaded on first use: ``spec_params``, which DAG files call, needs neither pydantic nor Jinja2.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envscaler_airflow.envspec.loading import Loaded, load_spec, load_with_sources, spec_hash
    from envscaler_airflow.envspec.models import EnvSpec
    from envscaler_airflow.envspec.parameters import spec_params
    from envscaler_airflow.envspec.secrets import parse_reference

_HOMES = {
    "EnvSpec": "models",
    "Loaded": "loading",
    "load_spec": "loading",
    "load_with_sources": "loading",
    "parse_reference": "secrets",
    "spec_hash": "loading",
    "spec_params": "parameters",
}

__all__ = [
    "EnvSpec",
    "Loaded",
    "load_spec",
    "load_with_sources",
    "parse_reference",
    "spec_hash",
    "spec_params",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
