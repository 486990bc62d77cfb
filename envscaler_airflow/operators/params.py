"""The trigger form of a spec: its parameters as Airflow params."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from airflow.sdk import Param

from envscaler_airflow.errors import SpecError

RESTART = "restart"
"""DAG param that restarts from the beginning if it is ``fresh``; one form field for all stages of a DAG."""
RESTARTS = ("resume", "fresh")
"""Its allowed values."""


def spec_params(path: str, *, restart: bool = False) -> dict[str, Param]:
    """Return Airflow params for the parameters of the spec at *path*, typed and bounded as in the spec.

    Args:
        path: Relative to the DAG file that calls this, absolute, or a reference to the registry of
            ``[envscaler] store_url``.
        restart: True adds the field ``restart``: ``resume`` (default) or ``fresh``.

    Raises:
        SpecError: The file is missing, its ``parameters`` are wrong, or one has the name of that field.
    """
    from envscaler_airflow.envspec import spec_params as schemas_of  # noqa: PLC0415  (DAG files pay on use)

    caller = sys._getframe(1).f_globals.get("__file__")  # noqa: SLF001  (the documented way to find the caller)
    folder = Path(caller).parent if caller else Path.cwd()
    where = path if "://" in str(path) else folder / path
    params = {name: _param(schema) for name, schema in schemas_of(where, registry=_copy_of).items()}
    if restart and RESTART in params:
        raise SpecError(
            f"{path}: parameter {RESTART!r} has the name of the form's own field: rename it, or leave out "
            "restart=True"
        )
    if restart:
        params[RESTART] = Param(
            "resume",
            type="string",
            enum=list(RESTARTS),
            description="fresh: start from the beginning instead of the last good checkpoint",
        )
    return params


def _copy_of(reference: str) -> Path:
    """Return the path of the spec that *reference* names; called only for specs in the registry."""
    from envscaler_airflow.hooks.settings import store_place  # noqa: PLC0415  (as above)
    from envscaler_airflow.images.spec_registry import SpecRegistry  # noqa: PLC0415  (DAG files pay on use)

    return SpecRegistry(lambda: store_place().open())(reference)


def _param(schema: dict[str, Any]) -> Param:
    rest = {key: value for key, value in schema.items() if key != "default"}
    if "default" not in schema:
        return Param(**rest)
    default = schema["default"]
    if rest.get("type") == "string" and not isinstance(default, str):
        default = str(default)  # a quantity without a unit
    return Param(default, **rest)
