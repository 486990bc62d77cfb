"""``validate``: every fault of a spec at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import click

from envscaler_airflow.backends.local.volumes import mount_faults, mount_warnings
from envscaler_airflow.build.distributed import batches
from envscaler_airflow.build.needs import local_source_faults
from envscaler_airflow.build.requirements import read_requirements
from envscaler_airflow.cli.check import speedup_warnings
from envscaler_airflow.cli.common import output_option
from envscaler_airflow.cli.specs import spec_options, spec_registry
from envscaler_airflow.errors import SpecError
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.spec import EnvSpec, spec_hash
from envscaler_airflow.spec.loading import load_with_sources


@click.command()
@spec_options
@click.option("--target", help="Variant to check; without it every variant of the spec is.")
@output_option
def validate(
    path: str, parameters: dict[str, str], inputs: dict[str, str] | None, target: str | None, *, as_json: bool
) -> None:
    """Check a spec: every fault, each with file, line, path, what was got and what to write. Exit 0 or 2."""
    spec: EnvSpec | None = None
    faults: list[str] = []
    try:
        loaded = load_with_sources(
            path, parameters=parameters, target=target, inputs=inputs, registry=spec_registry()
        )
        spec = loaded.spec
        faults += _faults_of(batches, spec) + _faults_of(read_requirements, spec)
        faults += [_placed(fault, loaded.sources) for fault in _faults_of(check_policy, spec)]
        if target in (None, "local"):
            faults += [_placed(fault, loaded.sources) for fault in local_source_faults(spec)]
        if target == "local":
            here = mount_faults(spec.to_dict(), spec.entrypoint)
            faults += [_placed(fault, loaded.sources) for fault in here]
    except SpecError as err:
        faults = err.faults
    if as_json:
        click.echo(json.dumps(_answer(path, spec, faults), indent=2))
    else:
        _print(path, spec, faults)
    if faults:
        click.get_current_context().exit(2)


def _placed(fault: str, sources: Mapping[str, str]) -> str:
    """*fault*, which begins with a path, behind the file and line of that path."""
    where = sources.get(fault.partition(": ")[0])
    return fault if where is None else f"{where}: {fault}"


def _faults_of(check: Callable[[EnvSpec], object], spec: EnvSpec) -> list[str]:
    try:
        check(spec)
    except SpecError as err:
        return err.faults
    return []


def _answer(path: str, spec: EnvSpec | None, faults: list[str]) -> dict[str, object]:
    found: dict[str, object] = {"file": path, "valid": not faults, "faults": faults}
    if spec is not None:
        found |= {"name": spec.name, "warnings": _warnings(spec)}
    if spec is not None and not faults:
        found["spec_hash"] = spec_hash(spec)
    return found


def _warnings(spec: EnvSpec) -> list[str]:
    """What stops nothing; also what this machine lacks where the spec may run on it."""
    if spec.target not in (None, "local"):
        return list(spec.warnings)
    here = [*mount_warnings(spec.to_dict()), *speedup_warnings(spec, "local")]
    return [*spec.warnings, *(f"on local: {warning}" for warning in here)]


def _print(path: str, spec: EnvSpec | None, faults: list[str]) -> None:
    for fault in faults:
        click.echo(fault, err=True)
    for warning in _warnings(spec) if spec is not None else ():
        click.echo(f"warning: {warning}", err=True)
    if spec is not None and not faults:
        click.echo(f"{path}: {spec.name} is valid ({spec_hash(spec)[:12]})")
