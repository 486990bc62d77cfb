"""Options that every command on a spec file shares."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from envscaler_airflow.cli.common import default_store_url
from envscaler_airflow.envspec import EnvSpec, Loaded, load_with_sources, parse_reference
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.spec_registry import SpecRegistry
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.store.base import open_store

MIN_SECRET_CHARS = 8
"""Shorter values are not looked for. Chosen: they are words that a spec has anyway, such as ``train``."""
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SpecSource:
    """A spec as a command names it.

    Attributes:
        path: File, or ``registry://team/name@1``.
        parameters: Values of ``--set`` by name.
        inputs: URIs of ``--input`` by name; None without any, so that they are not checked.
    """

    path: str
    parameters: dict[str, str]
    inputs: dict[str, str] | None

    def load(self, target: str | None) -> Loaded:
        """The spec for *target*, with the file and line of each value; None checks every target.

        Raises:
            SpecError: It has faults.
        """
        return load_with_sources(
            self.path, parameters=self.parameters, target=target, inputs=self.inputs, registry=spec_registry()
        )

    def to_run(self, target: str) -> EnvSpec:
        """The spec as it would run on *target*, with a scaling policy that is installed here.

        Raises:
            SpecError: It has faults.
        """
        spec = self.load(target).spec
        check_policy(spec)
        return spec


def spec_options(command: _F) -> _F:
    """Add ``-f``, ``--set`` and ``--input``; the command gets them as ``source``."""

    @click.option(
        "-f",
        "--file",
        "path",
        default="envscaler.yaml",
        show_default=True,
        help="Spec file, or registry://team/name@1.",
    )
    @click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the spec.")
    @click.option("--input", "given", multiple=True, metavar="NAME=URI", help="URI of another run's output.")
    @functools.wraps(command)
    def with_spec(
        *args: Any, path: str, settings: tuple[str, ...], given: tuple[str, ...], **kwargs: Any
    ) -> Any:
        source = SpecSource(path, pairs(settings, "--set"), pairs(given, "--input") or None)
        return command(*args, source=source, **kwargs)

    return cast("_F", with_spec)


def spec_registry() -> SpecRegistry:
    """The registry on the default store, opened when a spec refers to it."""
    return SpecRegistry(lambda: open_store(default_store_url()))


def pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict.

    Raises:
        SpecError: One has no ``=``.
    """
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise SpecError(f"{option} {text!r}: write {option} NAME=VALUE")
        found[name] = value
    return found


def environment_secret(reference: str) -> str:
    """Value of ``env:NAME``; outside Airflow and a cluster there is no other place for secrets.

    Raises:
        SpecError: Another kind of reference, or the variable is not set.
    """
    found = parse_reference(reference)
    if found.kind != "env":
        raise SpecError(
            f"{reference}: from a shell only env:NAME can be resolved; export it and write env:NAME"
        )
    value = os.environ.get(found.name)
    if value is None:
        raise SpecError(f"{reference}: the variable {found.name} is not set; export it")
    return value


def refuse_own_secrets(spec: EnvSpec) -> None:
    """Refuse what was given with ``--set`` or written when it is the value of one of the spec's references.

    It would be stored with the run. Airflow's masker does this for the operator; a shell has none.

    Raises:
        SpecError: A value of the spec contains the value of such a variable; it is not repeated.
    """
    values = {
        str(item.reference): os.environ.get(item.reference.name, "")
        for item in spec.env
        if item.is_secret and item.reference is not None and item.reference.kind == "env"
    }
    text = json.dumps(spec.to_dict(), ensure_ascii=False)
    for reference, value in values.items():
        if len(value) >= MIN_SECRET_CHARS and json.dumps(value, ensure_ascii=False)[1:-1] in text:
            raise SpecError(
                f"a value of the spec contains the secret of {reference}; leave it to that reference"
            )
