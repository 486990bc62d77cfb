"""One object per backend, and the registry that finds them by entry point in all installed packages.

A backend is a folder with a :class:`BackendType` and an entry point that names it. Its SDK is imported only
when the backend is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from envscaler_airflow.errors import SpecError
from envscaler_airflow.installed import installed

if TYPE_CHECKING:  # every process of a node imports this package: its start must not import pydantic
    from envscaler_airflow.backends.base import Backend
    from envscaler_airflow.clouds import Access
    from envscaler_airflow.envspec.models import EnvSpec

GROUP = "envscaler_airflow.backends"
"""Entry points of :class:`BackendType` objects."""


class ShellOption(NamedTuple):
    """An option of `envscaler submit` and `envscaler reap` that gives one setting of a backend.

    Attributes:
        flags: As the user types them, ``("-n", "--namespace")``; () for a setting with a variable only.
        setting: Name of the setting.
        help: Text of ``--help``.
        metavar: The value in ``--help``.
        variable: Environment variable that gives the setting if the option is not given; None for none.
    """

    flags: tuple[str, ...]
    setting: str
    help: str = ""
    metavar: str | None = None
    variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendType:
    """What the rest of the package knows of a backend without opening it.

    Attributes:
        name: Value of ``compute`` and ``--backend``, target of its specs, and ``cloud`` of its offers.
        create: Creates the backend from its settings (JSON) and a connection's access, without a request.
            Raises SpecError for a setting that it cannot use.
        conn_type: Type of the Airflow connections that it accepts; "" if it accepts none.
        options: Settings with an option of their own in ``[envscaler]``, and in the shell's environment:
            ``{"root": "local_root"}``. All others are in the option of the backend's name, as JSON.
        shell_options: Options of `envscaler submit` and `reap`.
        mounted_secrets: Kinds of secret references that its machines resolve; their values never reach us.
        is_here: True if its machines are this one, so that a shell checks a spec for it by default.
        uses_image: False if stages run in an environment of the machine, about which a spec says nothing.
        shares_nodes: True if a node also runs what is not ours, so that each stage gets a memory limit.
        faults: What it never accepts in a spec, one fault each, for `envscaler validate`.
        warnings: What a spec probably does not intend there, for `validate` and `dry-run`.
        missing: What it lacks for a spec with a run store, one sentence each with the fix, for `dry-run`.
            Raises BackendError if it does not answer.
    """

    name: str
    create: Callable[[Mapping[str, Any], Access | None], Backend]
    conn_type: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    shell_options: tuple[ShellOption, ...] = ()
    mounted_secrets: frozenset[str] = frozenset()
    is_here: bool = False
    uses_image: bool = True
    shares_nodes: bool = False
    faults: Callable[[EnvSpec], list[str]] = lambda _spec: []
    warnings: Callable[[EnvSpec], list[str]] = lambda _spec: []
    missing: Callable[[EnvSpec, str | None], list[str]] = lambda _spec, _store_url: []

    def resolver(self, resolve: Callable[[str], str]) -> Callable[[str], str]:
        """*resolve*, except that a reference that the machines resolve gives ""."""

        def resolved(reference: str) -> str:
            is_mounted = reference.partition(":")[0] in self.mounted_secrets
            return "" if is_mounted else resolve(reference)

        return resolved


def backend_names() -> tuple[str, ...]:
    """Names of the installed backends, sorted; none is loaded."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


@cache
def all_backends() -> Mapping[str, BackendType]:
    """Installed backends by name, sorted; read once. See :func:`~envscaler_airflow.installed.installed`."""
    return installed(GROUP, BackendType)


def backend_type(name: str) -> BackendType:
    """The backend of that name.

    Raises:
        SpecError: No such backend is installed.
    """
    known = all_backends()
    if name not in known:
        raise SpecError(
            f"compute={name!r:.60}: no such backend is installed; write one of {', '.join(known)}, or "
            "install the package that has it"
        )
    return known[name]


def has_image(cloud: str) -> bool:
    """False if offers of *cloud* are of a backend that runs stages in the machine's own environment."""
    kind = all_backends().get(cloud)
    return kind is None or kind.uses_image


def shares_nodes(cloud: str) -> bool:
    """True if offers of *cloud* are of a backend whose nodes also run what is not ours."""
    kind = all_backends().get(cloud)
    return kind is not None and kind.shares_nodes
