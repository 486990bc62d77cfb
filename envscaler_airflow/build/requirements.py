"""Python packages of a runtime as one requirements file, and the files of the user that it names."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envscaler_airflow.build.artefacts import Artefact
from envscaler_airflow.build.plain import read_plain, real_path
from envscaler_airflow.build.requirement_lines import (
    applies,
    foreign_format,
    index_urls,
    joined,
    line_fault,
    plain_lines,
    programs_of,
    requirement_of,
    without_comment,
    without_editable,
)
from envscaler_airflow.errors import SpecError
from envscaler_airflow.spec.literals import has_secret_shape, has_userinfo
from envscaler_airflow.spec.models import EnvSpec, Runtime

FOLDER = "requirements"
"""Folder of the user's own requirements files in a rendering."""
MAIN = "requirements.txt"
"""The file that is installed: indexes, the user's file, then ``packages``."""
MAX_BYTES = 1 << 20
"""Largest requirements file read, bytes. Chosen: ten thousand pinned packages with hashes."""
MAX_FILES = 32
"""Most files that one names. Chosen."""

_INCLUDE = re.compile(r"\s*(-r|--requirement|-c|--constraint)[ =]?\s*(?P<path>\S.*)")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._+-]+\Z")
"""Names that a requirements file can hold without quotes, which installers read in different ways."""
_INDEX = re.compile(r"\s*(--(extra-)?index-url|--find-links|-f|-i|--no-index|--trusted-host)([ =]|\s*$)")
_LOCAL = re.compile(r"\s*(-e\b|--editable|\.{1,2}/|\.(\[|\s*\Z)|/|file:)")
_OF_CONDA = re.compile(r"\s*([A-Za-z0-9._-]+)\s*@\s*file:")


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a runtime installs.

    Attributes:
        runtime: The runtime; None when the stage has none.
        files: The user's requirements files, path below their folder to text.
        main: Which of them the spec names; None without.
        locked: Text with exact versions and hashes that replaces them all; None when not locked.
    """

    runtime: Runtime | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    main: str | None = None
    locked: str | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing is to be installed."""
        return self.locked is None and self.main is None and not (self.runtime and self.runtime.packages)

    @property
    def needs_installer(self) -> bool:
        """False when no line of any file, and no package of the runtime, names anything to install."""
        texts = list(self.files.values()) if self.locked is None else [self.locked]
        lines = (line.strip() for text in texts for line in text.splitlines())
        return bool(self.runtime and self.runtime.packages) or any(line and line[0] != "#" for line in lines)

    @property
    def has_conda_packages(self) -> bool:
        """True when some are conda's, which no lock of ours holds."""
        runtime = self.runtime
        return runtime is not None and runtime.package_manager == "conda" and bool(runtime.packages)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of pip's packages that are written without a marker and without an address.

        Those of files that the user's file includes are left out: they may be constraints.
        """
        runtime = self.runtime
        texts = [] if runtime is None or self.has_conda_packages else list(runtime.packages)
        texts += [line for _, line in joined(self.files.get(self.main or "", ""))]
        found = [requirement_of(without_comment(text)) for text in texts]
        plain = (item for item in found if item is not None and item.url is None and item.marker is None)
        return tuple(dict.fromkeys(canonicalize_name(item.name) for item in plain))

    @property
    def lines(self) -> list[str]:
        """What the files and ``packages`` of pip say, less comments; a lock in their place."""
        if self.locked is not None:
            return list(plain_lines(self.locked))
        of_runtime = [] if self.runtime is None or self.has_conda_packages else list(self.runtime.packages)
        return [line for text in self.files.values() for line in plain_lines(text)] + of_runtime

    @property
    def index_urls(self) -> list[str]:
        """Every place beside PyPI that packages come from."""
        runtime = self.runtime
        own = [runtime.index_url or "", *runtime.extra_index_urls] if runtime is not None else []
        lines = [line for text in self.files.values() for line in plain_lines(text)]
        return [url for url in (*own, *(url for line in lines for url in index_urls(line))) if url]

    @property
    def programs(self) -> tuple[str, ...]:
        """System packages that fetch what is named by an address: git, and ssh where it goes by that."""
        return tuple(sorted({name for line in self.lines for name in programs_of(line)}))

    def pinned(self, name: str, python: str) -> Requirement | None:
        """How *name* is pinned on Linux for *python*: by ``==`` or an address; None when it is not."""
        for line in self.lines:
            found = requirement_of(line)
            if found is None or canonicalize_name(found.name) != name or not applies(found, python):
                continue
            if found.url is not None or any(item.operator in ("==", "===") for item in found.specifier):
                return found
        return None

    def artefacts(self) -> list[Artefact]:
        """``requirements.txt`` and the files that it names; [] when nothing is to be installed."""
        if self.is_empty:
            return []
        if self.locked is not None:
            return [Artefact(MAIN, self.text())]
        copies = [Artefact(f"{FOLDER}/{path}", text) for path, text in sorted(self.files.items())]
        return [Artefact(MAIN, self.text()), *copies]

    def with_lock(self, locked: str) -> Requirements:
        """The same, with exact versions and hashes in place of what was written."""
        return replace(self, locked=locked)

    def text(self) -> str:
        """The combined file, which names the user's by ``-r``; a lock keeps only where packages come from."""
        runtime = self.runtime
        if runtime is None:
            return self.locked or ""
        lines = [f"--index-url {runtime.index_url}"] if runtime.index_url else []
        lines += [f"--extra-index-url {url}" for url in runtime.extra_index_urls]
        if self.locked is not None:
            written = [line for text in self.files.values() for line in text.splitlines()]
            lines += [line.strip() for line in written if _INDEX.match(line)]
            return "".join(f"{line}\n" for line in lines) + self.locked
        lines += [f"-r {FOLDER}/{self.main}"] if self.main else []
        lines += check_packages(runtime)
        return "".join(f"{line}\n" for line in lines)


def check_packages(runtime: Runtime) -> list[str]:
    """``packages`` of *runtime*, each read as a requirement, so that none is an option or a path.

    Raises:
        SpecError: One is no requirement, or holds a password.
    """
    if runtime.package_manager == "conda":
        return list(runtime.packages)
    faults = []
    for index, text in enumerate(runtime.packages):
        try:
            Requirement(text)
        except InvalidRequirement as err:
            reason = str(err).splitlines()[0]
            faults.append(
                f"runtimes: packages[{index}]: {text!r:.80} is no requirement ({reason}); write torch==2.1.0"
            )
    if faults:
        raise SpecError("\n".join(faults), faults=faults)
    return list(runtime.packages)


def read_requirements(spec: EnvSpec) -> Requirements:
    """The requirements of *spec*'s Python runtime with its files, read from where the spec was loaded.

    Raises:
        SpecError: A file is absent, too large, no UTF-8, outside the folder, names a local package, or
            holds a password.
    """
    for index, runtime in enumerate(spec.runtimes):
        path = spec.resolve_path(f"runtimes[{index}].requirements")
        if path is None:
            return Requirements(runtime)
        if not _PLAIN_NAME.match(path.name):
            raise SpecError(
                f"runtimes: requirements: {path.name!r:.100} has characters that installers take apart; "
                "rename it, such as to requirements.txt"
            )
        files: dict[str, str] = {}
        _read(path.parent, path.name, files, by="runtimes: requirements")
        found = Requirements(runtime, files, path.name)
        _check_lines(found)
        return found
    return Requirements()


def _check_lines(found: Requirements) -> None:
    """Raise SpecError with every line that no installer can take."""
    has_index = bool(found.index_urls)
    faults = [
        f"{name}:{number}: {fault}"
        for name, text in found.files.items()
        for number, line in joined(text)
        if (kept := without_comment(line)) and (fault := line_fault(kept, has_index=has_index))
    ]
    if faults:
        raise SpecError("\n".join(faults), faults=faults)


def _read(folder: Path, name: str, files: dict[str, str], *, by: str) -> None:
    if name in files:
        return
    if len(files) >= MAX_FILES:
        raise SpecError(f"{by}: more than {MAX_FILES} requirements files; write fewer")
    text = files[name] = without_editable(_text(folder, name, by))
    if foreign := foreign_format(name, text):
        raise SpecError(f"{by}: {name} {foreign}")
    for number, line in joined(text):
        where = f"{name}:{number}"
        if has_userinfo(line) or has_secret_shape(line):
            raise SpecError(
                f"{where}: holds a user or password; leave it out and write credentials: env:NAME "
                "in the runtime"
            )
        if built := _OF_CONDA.match(line):
            raise SpecError(
                f"{where}: {built[1]} is a file of this machine, as pip freeze writes it in conda's "
                f"environments; write {built[1]}==VERSION, as `pip list --format=freeze` does"
            )
        if _LOCAL.match(line):
            raise SpecError(
                f"{where}: installs from this machine, which an image does not see; "
                "publish it as a package, or ship it with workdir"
            )
        if match := _INCLUDE.match(line):
            nested = _included(match["path"], where)
            if "://" not in nested:
                place = posixpath.normpath(posixpath.join(posixpath.dirname(name), nested))
                _read(folder, place, files, by=where)


def _included(text: str, where: str) -> str:
    """Name of the file that ``-r`` or ``-c`` is followed by."""
    try:
        return shlex.split(text, comments=True)[0]
    except (ValueError, IndexError) as err:
        raise SpecError(f"{where}: {text!r:.80} names no file ({err}); write -r other.txt") from err


def _text(folder: Path, name: str, by: str) -> str:
    path = folder / name
    try:
        if not real_path(path).is_relative_to(real_path(folder)):
            raise SpecError(f"{by}: {name!r:.100} leads out of its folder; keep it beside the first file")
        return read_plain(path, MAX_BYTES)
    except (OSError, ValueError) as err:
        raise SpecError(f"{by}: {path} cannot be read ({err}); write the path of a UTF-8 text file") from err
