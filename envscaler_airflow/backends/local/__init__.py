"""Attempts as processes of this machine; each node in its own session and cgroup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends import BackendType
from envscaler_airflow.errors import SpecError

if TYPE_CHECKING:
    from envscaler_airflow.backends.local.local_backend import LocalBackend
    from envscaler_airflow.clouds import Access
    from envscaler_airflow.envspec.models import EnvSpec

_SETTINGS: Mapping[str, type] = {"root": str, "prices": Mapping}


def _create(settings: Mapping[str, Any], _access: Access | None) -> LocalBackend:
    """The settings are *root*, a path, and *prices*, USD per hour by share."""
    from envscaler_airflow.backends.local.local_backend import LocalBackend  # noqa: PLC0415  # only to open it

    for name, value in settings.items():
        if not isinstance(value, _SETTINGS.get(name, ())):
            raise SpecError(
                f"local: {name}: got {value!r:.80}; the settings are root, a path, and prices, USD per hour "
                "by share"
            )
    return LocalBackend(**settings)


def _faults(spec: EnvSpec) -> list[str]:
    """Sources that this machine cannot open, and for a spec of this target paths that it cannot mount."""
    from envscaler_airflow.backends.local.node_plan import mount_faults  # noqa: PLC0415  # only to check
    from envscaler_airflow.images.dry_run import local_source_faults  # noqa: PLC0415  # as above
    from envscaler_airflow.launch import Paths  # noqa: PLC0415  # as above

    found = local_source_faults(spec)
    return found if spec.target is None else [*found, *mount_faults(Paths.of(spec), spec.entrypoint)]


def _warnings(spec: EnvSpec) -> list[str]:
    """Paths that this machine cannot mount, and speed-ups for shares that it does not have."""
    from envscaler_airflow.backends.local.local_backend import LocalBackend  # noqa: PLC0415  # only to check
    from envscaler_airflow.backends.local.node_plan import mount_warnings  # noqa: PLC0415  # as above
    from envscaler_airflow.launch import Paths  # noqa: PLC0415  # as above
    from envscaler_airflow.scaling.from_spec import speedup_warning  # noqa: PLC0415  # as above

    has_speedup = spec.scaling is not None and spec.scaling.speedup
    speedup = speedup_warning(spec, LocalBackend().offers()) if has_speedup else None
    return [*mount_warnings(Paths.of(spec)), *([] if speedup is None else [speedup])]


def _missing(spec: EnvSpec, store_url: str | None) -> list[str]:
    from envscaler_airflow.images.dry_run import missing_here  # noqa: PLC0415  # only to check

    return missing_here(spec, store_url=store_url)


BACKEND = BackendType(
    name="local",
    create=_create,
    options={"root": "local_root"},
    is_here=True,
    uses_image=False,
    faults=_faults,
    warnings=_warnings,
    missing=_missing,
)
