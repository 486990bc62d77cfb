"""Options that every command on a spec file shares."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from envscaler_airflow.cli.common import default_store_url
from envscaler_airflow.envspec import EnvSpec, load_spec, parse_reference
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.spec_registry import SpecRegistry
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.store.base import open_store

MIN_SECRET_CHARS = 8
"""Shorter values are not looked for. Chosen: they are words that a spec has anyway, such as ``train``."""
_F = TypeVar("_F", bound=Callable[..., Any])


def spec_options(command: _F) -> _F:
    """Add ``-f``, ``--set`` and ``--input``; the command gets ``path``, ``parameters`` and ``inputs``."""

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
    def with_spec(*args: Any, settings: tuple[str, ...], given: tuple[str, ...], **kwargs: Any) -> Any:
        inputs = pairs(given, "--input") or None
        return command(*args, parameters=pairs(settings, "--set"), inputs=inputs, **kwargs)

    return cast("_F", with_spec)


def spec_registry() -> SpecRegistry:
    """The registry on the default store, opened when a spec refers to it."""
    return SpecRegistry(lambda: open_store(default_store_url()))


def spec_to_run(
    path: str, *, parameters: dict[str, str], inputs: dict[str, str] | None, target: str
) -> EnvSpec:
    """The spec as it would run on *target*, with a scaling policy that is installed here.

    Raises:
        SpecError: It has faults.
    """
    spec = load_spec(path, parameters=parameters, inputs=inputs, target=target, registry=spec_registry())
    check_policy(spec)
    return spec


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


def write_artefact(folder: Path, name: str, text: str, *, is_executable: bool) -> Path:
    """Write one file of a rendering below *folder*."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if is_executable:
        path.chmod(path.stat().st_mode | 0o111 & ~_umask())
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
