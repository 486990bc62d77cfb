"""Specs from the shell: options of commands on one; ``validate``, ``schema``, ``registry``, ``init``."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from envscaler_airflow.backends import BackendType, all_backends
from envscaler_airflow.cli.common import (
    SPEC_ENDINGS,
    Group,
    default_store_url,
    echo_json,
    echo_result,
    output_option,
)
from envscaler_airflow.envspec import EnvSpec, Loaded, load_with_sources, parse_reference, spec_hash
from envscaler_airflow.envspec.schema import reference_text, schema_text
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.dry_run import missing_on
from envscaler_airflow.images.requirement_files import read_requirements
from envscaler_airflow.images.spec_registry import (
    SpecRegistry,
    check_document,
    split_reference,
)
from envscaler_airflow.launch import batches
from envscaler_airflow.scaling.registry import check_policy
from envscaler_airflow.store.run_store import open_store

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
        if (words := kwargs.get("command")) and words[0].lower().endswith(SPEC_ENDINGS):
            raise click.UsageError(f"{words[0]!r} would be the command of the stage; a spec is -f {words[0]}")
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


@click.command("dry-run")
@spec_options
@click.option("--target", default="local", show_default=True, help="A backend, docker or vm.")
@output_option
def dry_run(source: SpecSource, target: str, *, as_json: bool) -> None:
    """Show what this machine, or the cluster of kubectl's context, lacks for a stage. Exit 0 or 1."""
    tell_missing(source.to_run(target), target, as_json=as_json)


def tell_missing(spec: EnvSpec, target: str, *, as_json: bool) -> None:
    """Print what *target* lacks for *spec*; the command ends with 1 when it lacks anything."""
    missing = missing_on(target, spec, store_url=default_store_url())
    of_backends = [warning for kind in backends_of(target) for warning in kind.warnings(spec)]
    warnings = [*spec.warnings, *of_backends]
    if as_json:
        body = {"name": spec.name, "target": target, "missing": missing}
        echo_json(body | {"warnings": warnings}, indent=2)
    else:
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        for text in missing:
            click.echo(text)
        click.echo(f"{spec.name}: {len(missing) or 'nothing'} missing on {target}", err=True)
    if missing:
        click.get_current_context().exit(1)


def backends_of(target: str | None) -> list[BackendType]:
    """The backend that *target* names; without a target those on this machine, where a spec may run."""
    kinds = all_backends().values()
    return [kind for kind in kinds if (kind.is_here if target is None else kind.name == target)]


@click.command()
@click.option("--markdown", is_flag=True, help="Print the reference of fields instead.")
@output_option
def schema(*, markdown: bool, as_json: bool) -> None:
    """Print the JSON Schema of specs, with which editors complete and check envscaler.yaml."""
    if markdown and as_json:
        echo_json({"markdown": reference_text()})
        return
    click.echo(reference_text() if markdown else schema_text(), nl=False)


@click.command()
@spec_options
@click.option("--target", help="Variant to check; the default is every variant of the spec.")
@output_option
def validate(source: SpecSource, target: str | None, *, as_json: bool) -> None:
    """Check a spec and print every error, with file, line, path, value and what to write. Exit 0 or 2."""
    spec: EnvSpec | None = None
    faults: list[str] = []
    try:
        loaded = source.load(target)
        spec = loaded.spec
        faults += _faults_of(batches, spec) + _faults_of(read_requirements, spec)
        faults += [_placed(fault, loaded.sources) for fault in _faults_of(check_policy, spec)]
        for kind in backends_of(target):
            faults += [_placed(fault, loaded.sources) for fault in kind.faults(spec)]
    except SpecError as err:
        faults = err.faults
    if as_json:
        echo_json(_answer(source.path, spec, faults), indent=2)
    else:
        _print(source.path, spec, faults)
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
    here = [kind for kind in backends_of(spec.target) if kind.is_here]
    found = [f"on {kind.name}: {warning}" for kind in here for warning in kind.warnings(spec)]
    return [*spec.warnings, *found]


def _print(path: str, spec: EnvSpec | None, faults: list[str]) -> None:
    for fault in faults:
        click.echo(fault, err=True)
    for warning in _warnings(spec) if spec is not None else ():
        click.echo(f"warning: {warning}", err=True)
    if spec is not None and not faults:
        click.echo(f"{path}: {spec.name} is valid ({spec_hash(spec)[:12]})")


@click.group(cls=Group)
@click.option(
    "--store",
    "store_url",
    default=default_store_url,
    show_default="the run store",
    help="Store of the registry.",
)
@click.pass_context
def registry(context: click.Context, store_url: str) -> None:
    """Share specs and modules by version; a published version never changes."""
    context.obj = SpecRegistry(lambda: open_store(store_url))


@registry.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("reference", metavar="NAME@VERSION")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A required parameter, for the check."
)
@output_option
@click.pass_obj
def publish(
    found: SpecRegistry, path: Path, reference: str, settings: tuple[str, ...], *, as_json: bool
) -> None:
    """Publish a spec or module under a semantic version."""
    name, version = split_reference(reference)
    if version is None:
        raise SpecError(f"{reference}: has no version; write {name}@1.0.0")
    text = check_document(path, parameters=pairs(settings, "--set"), registry=found)
    entry = found.publish(name, version, text)
    name = f"registry://{entry.name}@{entry.version}"
    body = {"reference": name, "sha256": entry.sha256}
    echo_result(body, f"{name} (sha256 {entry.sha256[:12]})", as_json=as_json)


@registry.command("list")
@click.argument("name", required=False)
@output_option
@click.pass_obj
def list_(found: SpecRegistry, name: str | None, *, as_json: bool) -> None:
    """List names with their versions, oldest first."""
    names = [split_reference(name)[0]] if name else found.names()
    versions = {item: [str(version) for version in found.versions(item)] for item in names}
    if as_json:
        echo_json(versions)
        return
    for item, its_own in versions.items():
        click.echo(f"{item}: {', '.join(its_own) or 'none'}")


@registry.command()
@click.argument("reference")
@output_option
@click.pass_obj
def show(found: SpecRegistry, reference: str, *, as_json: bool) -> None:
    """Print the document of a reference, and who published it."""
    entry = found.find(reference)
    name, by = f"{entry.name}@{entry.version}", {"by": entry.by, "sha256": entry.sha256}
    head = f"# {name} by {entry.by}{entry.published}, sha256 {entry.sha256}"
    body = {"reference": f"registry://{name}", **by, "text": entry.text}
    echo_result(body, f"{head}\n{entry.text}", as_json=as_json)


@registry.command()
@click.argument("reference")
@click.option(
    "--to", "file", type=click.Path(path_type=Path), help="File to write; default: the cached copy."
)
@output_option
@click.pass_obj
def pull(found: SpecRegistry, reference: str, file: Path | None, *, as_json: bool) -> None:
    """Copy a document to the local cache, so that it works offline."""
    path = found.pull(reference)
    if file is not None:
        file.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    name = str(file or path)
    echo_result({"file": name}, name, as_json=as_json)


SUFFIX = ".template"
"""Suffix of every file of a template, so that no tool treats it as a module of the package."""

PYTHON = "@PYTHON@"
"""Placeholder in a template for this machine's Python version, which needs no download."""


def _python() -> str:
    """Version of this Python, limited to those that the module ``envscaler/python`` supports."""
    return f"3.{min(max(sys.version_info.minor, 10), 13)}"


def template_names() -> list[str]:
    """Names of the templates that come with the package."""
    folder = resources.files("envscaler_airflow.images").joinpath("templates")
    return sorted(item.name for item in folder.iterdir() if item.is_dir() and item.name[0] != "_")


def write_template(name: str, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the files of template *name* into *folder*; write nothing if one of them exists.

    Raises:
        SpecError: The template does not exist, or a file exists.
    """
    if name not in template_names():
        raise SpecError(f"template {name!r:.60} is not known; write one of {', '.join(template_names())}")
    source = resources.files("envscaler_airflow.images").joinpath("templates", name)
    files = {
        folder / item.name.removesuffix(SUFFIX): item.read_text(encoding="utf-8").replace(PYTHON, _python())
        for item in source.iterdir()
        if item.name.endswith(SUFFIX)
    }
    existing = [str(path) for path in files if path.exists()]
    if existing and not overwrite:
        raise SpecError(f"{', '.join(sorted(existing))}: exists; use another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return sorted(files)


@click.command()
@click.option("--template", "name", default="python", type=click.Choice(template_names()), show_default=True)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@output_option
def init(name: str, folder: Path, *, force: bool, as_json: bool) -> None:
    """Write a first spec and its code to FOLDER."""
    paths = [str(path) for path in write_template(name, folder, overwrite=force)]
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}, then "
    text = "\n".join([*paths, f"next: {enter}envscaler validate, then envscaler run"])
    echo_result({"files": paths}, text, as_json=as_json)
