"""Objects that installed packages announce by entry points: backends and clouds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

_log = logging.getLogger(__name__)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def installed(group: str, kind: type[_T]) -> Mapping[str, _T]:
    """Objects of *kind* in the entry points of *group*, by name, sorted.

    This package's objects replace others of the same name. One that fails to load, or is not of that kind
    and name, is skipped with a warning: a broken package must not end a run that does not use it.
    """
    found: dict[str, _T] = {}
    for point in sorted(
        entry_points(group=group), key=lambda one: one.value.startswith("envscaler_airflow.")
    ):
        what = f"{point.name!r} ({point.value})"
        try:
            one = point.load()
        except (Exception, SystemExit) as err:  # noqa: BLE001  (an edge: code of others)
            _log.warning("%s cannot be loaded: %r; it is left out", what, err)
            continue
        if isinstance(one, kind) and one.name == point.name:
            found[one.name] = one
        else:
            _log.warning("%s is not a %s of that name; it is left out", what, kind.__name__)
    return dict(sorted(found.items()))
