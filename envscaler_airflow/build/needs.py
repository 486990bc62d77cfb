"""What ``run`` needs on this machine beside its sizes: code, programs, an installer, packages of extras."""

from __future__ import annotations

import importlib.util
import re
from difflib import get_close_matches
from pathlib import Path

from envscaler_airflow.build.machine import Here
from envscaler_airflow.build.requirements import Requirements
from envscaler_airflow.build.venv import python_version
from envscaler_airflow.errors import SpecError
from envscaler_airflow.spec.models import EnvSpec
from envscaler_airflow.store.base import open_store

_PROGRAMS = {"openssh-client": "ssh", "mercurial": "hg", "subversion": "svn", "breezy": "bzr"}
"""Program of each system package that fetches requirements, where it has another name."""
INSTALL_UV = "run `pip install 'envscaler-airflow[build]'`, or install uv"
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "az", "oss", "hdfs")
"""Schemes of volumes that a package of an extra, or of the user's, opens."""


def lacking_code(spec: EnvSpec) -> list[str]:
    """A workdir or a script that is not there, one sentence each with what to write."""
    if not spec.entrypoint:
        return ["entrypoint: is empty; write entrypoint: [python, train.py]"]
    folder = spec.resolve_path("workdir")
    if folder is not None and not Path(folder).is_dir():
        return [f"workdir: {folder} is not a folder; name the folder of the code, such as workdir: ."]
    script = _script(spec.entrypoint)
    if script is None:
        return []
    if script.is_absolute():  # a volume, or a folder of the image, may bring it
        is_brought = any(script.is_relative_to(volume.mount_path) for volume in spec.volumes)
        return [] if is_brought or script.is_file() else [_absent(script)]
    if folder is None:
        return [f"entrypoint: {script} is not shipped: the spec has no workdir; write workdir: ."]
    if not Path(folder, script).is_file():
        return [f"entrypoint: {script} is not in the workdir {folder}; {_instead(script, Path(folder))}"]
    return []


def _instead(script: Path, folder: Path) -> str:
    words = str(script).split()
    if len(words) > 1:
        return f"write each word apart: [{', '.join(words)}]"
    near = get_close_matches(str(script), [path.name for path in folder.glob("*.py")], n=1)
    return f"write {near[0]}" if near else "write its path below that folder"


def _absent(script: Path) -> str:
    return (
        f"entrypoint: {script} is not on this machine; write a path below the workdir, such as {script.name}"
    )


def lacking_program(spec: EnvSpec, requirements: Requirements, machine: Here) -> list[str]:
    """A command that is not here and looks misspelt; [] where packages or code of the stage may bring it."""
    program = spec.entrypoint[0] if spec.entrypoint else "python"
    is_brought = "/" in program or program.endswith(".py") or not requirements.is_empty
    if is_brought or _PYTHON.fullmatch(program) or machine.has_program(program):
        return []
    near = get_close_matches(program, ("python", "bash", "torchrun", "accelerate"), n=1)
    return [f"entrypoint: there is no command {program!r:.80} on this machine; write {name}" for name in near]


def lacking_inputs(spec: EnvSpec) -> list[str]:
    """Inputs that the spec uses and that were not given."""
    return [
        f"inputs: {name} is not given; add --input {name}=URI, as an earlier stage prints it"
        for name in spec.input_names
        if name not in spec.inputs
    ]


def _script(entrypoint: tuple[str, ...]) -> Path | None:
    """The Python file that is run; None where another thing is."""
    program, *words = entrypoint
    if program.endswith(".py"):
        return Path(program)
    if _PYTHON.fullmatch(Path(program).name) is None:
        return None
    while words and words[0] in ("-u", "-O", "-B", "-E", "-s", "-I"):
        words.pop(0)
    return Path(words[0]) if words and words[0].endswith(".py") else None


def lacking_tools(spec: EnvSpec, requirements: Requirements, machine: Here) -> list[str]:
    """What makes the stage's own environment and is not here: uv, or the Python."""
    if requirements.runtime is None:
        return []
    if requirements.runtime.package_manager == "conda":
        return ["runtimes: package_manager: conda is for images; write pip or uv under targets.local"]
    absent = [name for name in requirements.programs if not machine.has_program(_PROGRAMS.get(name, name))]
    if absent:
        return [f"runtimes: requirements are fetched by {', '.join(absent)}, not installed here; install it"]
    if machine.has_uv():
        return []
    if requirements.needs_installer:
        return [f"runtimes: uv installs the packages, and it is not installed; {INSTALL_UV}"]
    version = python_version(spec)
    if machine.python_of(version) is not None:
        return []
    return [f"runtimes: Python {version} is not here, and uv, which brings it, is not either; {INSTALL_UV}"]


def local_source_faults(spec: EnvSpec) -> list[str]:
    """Volumes of a scheme that this machine cannot open, one fault each; known without asking any store.

    Object stores of the extras are left to ``dry-run``: another machine may have the extra.
    """
    if (spec.target or "local") != "local":
        return []
    found = []
    for index, volume in enumerate(spec.volumes):
        if volume.kind == "hdfs" and not _has_module("pyarrow"):
            found.append(
                f"volumes[{index}].source: {volume.source} is HDFS, which a stage on local opens by pyarrow "
                "and a Hadoop client, and pyarrow is not installed; pip install pyarrow, write another "
                "source such as s3://bucket/path, or one for local under targets"
            )
    return found


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def lacking_extras(spec: EnvSpec, store_url: str | None) -> list[str]:
    """Packages that open the run store or a volume and are not installed."""
    urls = {} if store_url is None else {"store": store_url}
    for volume in spec.volumes:
        scheme, separator, _ = str(volume.source).partition("://")
        if separator and scheme in _OBJECT_STORES:
            urls[f"volumes: {volume.name}"] = str(volume.source)
    found = []
    for name, url in urls.items():
        try:
            open_store(url)
        except SpecError as err:
            found.append(f"{name}: {err}")
    return found
