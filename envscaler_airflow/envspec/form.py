"""The trigger form: a spec's parameters as JSON schemas.

This module imports neither pydantic nor Jinja2, because DAG files call it.
"""

from __future__ import annotations

import os
from typing import Any

from envscaler_airflow.envspec.compose import Registry, gather, merge
from envscaler_airflow.envspec.documents import Node
from envscaler_airflow.envspec.faults import Faults
from envscaler_airflow.envspec.parameters import declare


def spec_params(
    path: str | os.PathLike[str], *, registry: Registry | None = None
) -> dict[str, dict[str, Any]]:
    """Return each parameter of the spec in *path* as a JSON schema; a required one has no ``default``.

    Raises:
        SpecError: The spec cannot be read, or its parameters are invalid.
    """
    faults = Faults()
    block: Node | None = None
    for document in gather(path, faults, registry=registry).documents:
        node = document.get("parameters")
        if node is not None:
            block = node if block is None else merge(block, node)
    declared = declare(block, faults)
    faults.raise_if_any()
    return {name: parameter.to_json_schema() for name, parameter in declared.items() if parameter is not None}
