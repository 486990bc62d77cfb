"""Python packages of a runtime as one requirements file, and the user's files that it includes."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import yaml
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envscaler_airflow.envspec.models import EnvSpec, Runtime
from envscaler_airflow.envspec.secret_forms import has_secret_shape, has_userinfo
from envscaler_airflow.errors import SpecError, refuse
from envscaler_airflow.images.artefacts import Artefact
from envscaler_airflow.local_files import read_plain, real_path

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"\s--?[A-Za-z]")
_EDITABLE = re.compile(r"(\s*)(?:-e|--editable)[ =]\s*((?:git|hg|svn|bzr)\+\S+)(.*)", re.DOTALL)
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9._-]+(?:\[[^\]]*\])?)")
_CONDA_PIN = re.compile(r"[A-Za-z0-9_.-]+=[0-9][^=\s]*(=\S+)?\s*\Z")
_INDEX_OPTION = re.compile(r"\s*(?:--index-url|--extra-index-url|--find-links|-i|-f)(?:[ =]\s*|(?=\S))(\S+)")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(?:git|hg|svn|bzr)\+")
_PROGRAMS: Mapping[str, str] = {"git": "git", "hg": "mercurial", "svn": "subversion", "bzr": "breezy"}
_TORCH_INDEX = "https://download.pytorch.org/whl/"

_FOREIGN: Mapping[str, str] = {
    "pyproject.toml": "run `uv pip compile pyproject.toml -o requirements.txt` and name that file",
    "setup.py": "run `uv pip compile setup.py -o requirements.txt` and name that file",
    "setup.cfg": "run `uv pip compile setup.cfg -o requirements.txt` and name that file",
    "poetry.lock": "run `poetry export -o requirements.txt` and name that file",
    "uv.lock": "run `uv export --no-emit-project -o requirements.txt` and name that file",
    "pdm.lock": "run `pdm export -o requirements.txt` and name that file",
    "pylock.toml": "run `uv export --no-emit-project -o requirements.txt` and name that file",
    "pixi.toml": "write its packages under channels: and packages: with package_manager: conda",
    "pipfile": "run `pipenv requirements > requirements.txt` and name that file",
    "pipfile.lock": "run `pipenv requirements > requirements.txt` and name that file",
}
"""Files of other tools, and how to convert them for pip. Source: each tool's documentation of its export."""


def joined(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines with their numbers; as in pip, a trailing backslash continues a line."""
    begun, parts = 1, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        begun = begun if parts else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            parts.append(line.rstrip("\\"))
            continue
        yield begun, "".join([*parts, line])
        parts = []
    if parts:
        yield begun, "".join(parts)


def plain_lines(text: str) -> Iterator[str]:
    """The same lines without comments and empty lines."""
    for _, line in joined(text):
        if kept := without_comment(line):
            yield kept


def without_comment(line: str) -> str:
    """*line* without its comment, which starts at the line's start or after a space."""
    return _COMMENT.sub("", line).strip()


def without_editable(text: str) -> str:
    """Rewrite ``-e git+...#egg=name`` as ``name @ git+...``, which an image and uv can also install."""
    return "".join(map(_without_editable, text.splitlines(keepends=True)))


def _without_editable(line: str) -> str:
    match = _EDITABLE.match(line)
    if match is None:
        return line
    indent, url, rest = match.groups()
    egg = _EGG.search(url)
    if egg is None:
        return f"{indent}{url}{rest}"
    return f"{indent}{egg[1]} @ {_less(url, egg[0])}{rest}"


def _less(url: str, egg: str) -> str:
    """*url* without the part *egg* of its fragment."""
    base, _, fragment = url.partition("#")
    kept = [part for part in fragment.split("&") if part and part != egg[1:]]
    return f"{base}#{'&'.join(kept)}" if kept else base


def foreign_format(name: str, text: str) -> str | None:
    """What to write instead of a file in another tool's format; None for pip's format."""
    lower = PurePath(name).name.lower()
    if lower in _FOREIGN:
        return f"is not a requirements file of pip; {_FOREIGN[lower]}"
    if text.lstrip().startswith("@EXPLICIT") or "\n@EXPLICIT" in text:
        return "is an explicit list of conda; write package_manager: conda and the names under packages:"
    if lower.endswith((".yml", ".yaml")) or re.search(r"^dependencies:\s*$", text, re.MULTILINE):
        return f"is an environment of conda, and requirements takes a file of pip; {_conda_fix(text)}"
    return None


def _conda_fix(text: str) -> str:
    """The channels and packages of the file, in the form of the spec."""
    try:
        body: Any = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        body = None
    listed = body.get("dependencies") if isinstance(body, dict) else None
    if not isinstance(listed, list):
        return "write package_manager: conda, channels: [...] and packages: [...]"
    channels = [str(item) for item in body.get("channels") or [] if item != "defaults"]
    packages = [str(item) for item in listed if isinstance(item, str)]
    python = [item for item in packages if re.match(r"python\s*[=<>!~]", item)]
    packages = [item for item in packages if item not in ("python", "pip") and item not in python]
    pip = [str(line) for item in listed if isinstance(item, dict) for line in item.get("pip") or []]
    version = re.search(r"3\.[0-9]+", python[0]) if python else None
    parts = [
        "package_manager: conda",
        *([f'version: "{version[0]}"'] if version else []),
        *([f"channels: [{', '.join(channels)}]"] if channels else []),
        f"packages: [{', '.join(packages)}]",
    ]
    more = f", and {', '.join(pip[:5])} in a requirements file" if pip else ""
    return f"write {', '.join(parts)}"[:900] + more


def line_fault(line: str, *, has_index: bool) -> str | None:
    """Why neither pip nor uv can install *line*, and what to write instead; None if they may.

    Args:
        line: A line without comments.
        has_index: True when the files name an index other than PyPI.
    """
    if _CONDA_PIN.match(line):
        name, version = line.split("=")[:2]
        return f"{line!r:.80} is a pin of conda's; write {name}=={version}"
    if line.startswith("-") or _ADDRESS.match(line):
        return None
    found = requirement_of(line)
    if found is None:
        return _unreadable(line)
    pins = [item.version for item in found.specifier if item.operator in ("==", "===")]
    if canonicalize_name(found.name) == "pkg-resources" and pins == ["0.0.0"]:
        return "pkg-resources==0.0.0 is what pip freeze of Debian adds, and on no index; delete the line"
    local = pins[0].partition("+")[2] if pins else ""
    if re.fullmatch(r"cu[0-9]+|cpu|rocm[0-9.]+", local) and not has_index:
        return f"{line!r:.80} is not on PyPI; write extra_index_urls: [{_TORCH_INDEX}{local}] in the runtime"
    return None


def _unreadable(line: str) -> str | None:
    words = line.split()
    if words[0] in ("pip", "pip3", "!pip", "%pip", "conda") and len(words) > 2:
        return f"{line!r:.80} is a command; write the packages alone, one on each line"
    if re.search(r"\.(whl|tar\.gz|zip)\b", line) or "/" in words[0] or "\\" in words[0] or "$" in line:
        return None  # a path or a variable, which is checked elsewhere
    try:
        Requirement(line)
    except InvalidRequirement as err:
        return f"{line!r:.80} is not a requirement ({str(err).splitlines()[0]:.120}); write torch==2.1.0"
    return None


def requirement_of(line: str) -> Requirement | None:
    """The requirement of a line without comments and options; None if it is not a requirement."""
    option = _OPTION.search(line)
    try:
        return Requirement(line[: option.start()] if option else line)
    except InvalidRequirement:
        return None


def applies(requirement: Requirement, python: str) -> bool:
    """True when its marker matches Linux with *python* on x86_64."""
    if requirement.marker is None:
        return True
    full = python if python.count(".") > 1 else f"{python}.0"
    environment = {
        **default_environment(), "os_name": "posix", "sys_platform": "linux", "platform_system": "Linux",
        "platform_machine": "x86_64", "platform_python_implementation": "CPython",
        "implementation_name": "cpython", "python_version": ".".join(full.split(".")[:2]),
        "python_full_version": full, "implementation_version": full, "extra": "",
    }  # fmt: skip
    return requirement.marker.evaluate({key: str(value) for key, value in environment.items()})


def index_urls(line: str) -> list[str]:
    """Address that an option of *line* names as an index or a place of wheels."""
    match = _INDEX_OPTION.match(line)
    return [match[1].strip("\"'")] if match else []


def programs_of(line: str) -> set[str]:
    """System packages with which pip fetches what *line* names: git, and ssh if the address uses it."""
    found = re.match(r"(?:[^@]*@\s*|\s*(?:-e|--editable)[ =]\s*)?(git|hg|svn|bzr)\+([a-z]+)", line)
    if found is None:
        return set()
    return {_PROGRAMS[found[1]], *(["openssh-client"] if found[2] == "ssh" else [])}


FOLDER = "requirements"
"""Folder of the user's own requirements files in a rendering."""
MAIN = "requirements.txt"
"""The file that is installed: indexes, the user's file, then ``packages``."""
MAX_BYTES = 1 << 20
"""Largest requirements file read, bytes. Chosen: ten thousand pinned packages with hashes."""
MAX_FILES = 32
"""Most files that a requirements file includes. Chosen."""

_INCLUDE = re.compile(r"\s*(-r|--requirement|-c|--constraint)[ =]?\s*(?P<path>\S.*)")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._+-]+\Z")
"""Names that need no quotes in a requirements file; installers parse quotes differently."""
_INDEX = re.compile(r"\s*(--(extra-)?index-url|--find-links|-f|-i|--no-index|--trusted-host)([ =]|\s*$)")
_LOCAL = re.compile(r"\s*(-e\b|--editable|\.{1,2}/|\.(\[|\s*\Z)|/|file:)")
_OF_CONDA = re.compile(r"\s*([A-Za-z0-9._-]+)\s*@\s*file:")


@dataclass(frozen=True, slots=True)
class Requirements:
    """The packages that a runtime installs.

    Attributes:
        runtime: The runtime; None when the stage has none.
        files: The user's requirements files, path below their folder to text.
        main: Name of the file that the spec names; None without one.
        locked: Text with exact versions and hashes that replaces all files; None when not locked.
    """

    runtime: Runtime | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    main: str | None = None
    locked: str | None = None

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to install."""
        return self.locked is None and self.main is None and not (self.runtime and self.runtime.packages)

    @property
    def needs_installer(self) -> bool:
        """False when no line of any file, and no package of the runtime, names anything to install."""
        texts = list(self.files.values()) if self.locked is None else [self.locked]
        lines = (line.strip() for text in texts for line in text.splitlines())
        return bool(self.runtime and self.runtime.packages) or any(line and line[0] != "#" for line in lines)

    @property
    def has_conda_packages(self) -> bool:
        """True when some packages are conda's, which our locks do not contain."""
        runtime = self.runtime
        return runtime is not None and runtime.package_manager == "conda" and bool(runtime.packages)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of pip's packages that have neither a marker nor an address.

        Files that the user's file includes are skipped, because they may be constraints.
        """
        runtime = self.runtime
        texts = [] if runtime is None or self.has_conda_packages else list(runtime.packages)
        texts += [line for _, line in joined(self.files.get(self.main or "", ""))]
        found = [requirement_of(without_comment(text)) for text in texts]
        plain = (item for item in found if item is not None and item.url is None and item.marker is None)
        return tuple(dict.fromkeys(canonicalize_name(item.name) for item in plain))

    @property
    def lines(self) -> list[str]:
        """Lines of the files and of pip's ``packages``, without comments; with a lock, its lines instead."""
        if self.locked is not None:
            return list(plain_lines(self.locked))
        of_runtime = [] if self.runtime is None or self.has_conda_packages else list(self.runtime.packages)
        return [line for text in self.files.values() for line in plain_lines(text)] + of_runtime

    @property
    def index_urls(self) -> list[str]:
        """Every package source other than PyPI."""
        runtime = self.runtime
        own = [runtime.index_url or "", *runtime.extra_index_urls] if runtime is not None else []
        lines = [line for text in self.files.values() for line in plain_lines(text)]
        return [url for url in (*own, *(url for line in lines for url in index_urls(line))) if url]

    @property
    def programs(self) -> tuple[str, ...]:
        """System packages that fetch requirements from addresses: git, and ssh if an address uses it."""
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
        """``requirements.txt`` and the files that it includes; [] when there is nothing to install."""
        if self.is_empty:
            return []
        if self.locked is not None:
            return [Artefact(MAIN, self.text())]
        copies = [Artefact(f"{FOLDER}/{path}", text) for path, text in sorted(self.files.items())]
        return [Artefact(MAIN, self.text()), *copies]

    def with_lock(self, locked: str) -> Requirements:
        """A copy with exact versions and hashes instead of the written requirements."""
        return replace(self, locked=locked)

    def text(self) -> str:
        """The combined file, which includes the user's file with ``-r``; a lock keeps only the indexes."""
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
    """Check that all ``packages`` of *runtime* are requirements, not options or paths, and return them.

    Raises:
        SpecError: A package is not a valid requirement, or contains a password.
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
                f"runtimes: packages[{index}]: {text!r:.80} is not a valid requirement ({reason}); "
                "write torch==2.1.0"
            )
    refuse(faults)
    return list(runtime.packages)


def read_requirements(spec: EnvSpec) -> Requirements:
    """Read the requirements of *spec*'s Python runtime and its files, relative to the spec's folder.

    Raises:
        SpecError: A file is absent, too large, not UTF-8, or outside the folder, or it names a local package
            or contains a password.
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
    """Raise SpecError with every line that no installer accepts."""
    has_index = bool(found.index_urls)
    faults = [
        f"{name}:{number}: {fault}"
        for name, text in found.files.items()
        for number, line in joined(text)
        if (kept := without_comment(line)) and (fault := line_fault(kept, has_index=has_index))
    ]
    refuse(faults)


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
                f"{where}: contains a user or password; leave it out and write credentials: env:NAME "
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
    """Name of the file after ``-r`` or ``-c``."""
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
