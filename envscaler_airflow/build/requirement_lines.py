"""Lines of requirements files as pip reads them, and files of other tools that people name in their place.

Source: pip.pypa.io/en/stable/reference/requirements-file-format, and pip's req_file.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

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
"""Files of other tools, and how pip's is made of them; each tool's own documentation of its export."""


def joined(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; one that ends with a backslash goes on in the next, as pip reads them."""
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
    """The same less comments and empty ones."""
    for _, line in joined(text):
        if kept := without_comment(line):
            yield kept


def without_comment(line: str) -> str:
    """*line* up to its comment, which begins a line or stands behind a space."""
    return _COMMENT.sub("", line).strip()


def without_editable(text: str) -> str:
    """*text* with ``-e git+...#egg=name`` as ``name @ git+...``, which an image and uv can install, too."""
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
    """What to write in place of a file that is another tool's; None for one of pip's."""
    lower = PurePath(name).name.lower()
    if lower in _FOREIGN:
        return f"is not a requirements file of pip; {_FOREIGN[lower]}"
    if text.lstrip().startswith("@EXPLICIT") or "\n@EXPLICIT" in text:
        return "is an explicit list of conda; write package_manager: conda and the names under packages:"
    if lower.endswith((".yml", ".yaml")) or re.search(r"^dependencies:\s*$", text, re.MULTILINE):
        return f"is an environment of conda, and requirements takes a file of pip; {_conda_fix(text)}"
    return None


def _conda_fix(text: str) -> str:
    """The file's own channels and packages, as the spec takes them."""
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
    """Why neither pip nor uv can install what *line* says, and what to write; None when they may.

    Args:
        line: Less comments.
        has_index: True when some other place than PyPI is named.
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
        return None  # a path or a variable, which is looked at elsewhere
    try:
        Requirement(line)
    except InvalidRequirement as err:
        return f"{line!r:.80} is not a requirement ({str(err).splitlines()[0]:.120}); write torch==2.1.0"
    return None


def requirement_of(line: str) -> Requirement | None:
    """The requirement of a line less comments and its own options; None when it is none."""
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
    """System packages by which pip fetches what *line* names: git, and ssh where it goes by that."""
    found = re.match(r"(?:[^@]*@\s*|\s*(?:-e|--editable)[ =]\s*)?(git|hg|svn|bzr)\+([a-z]+)", line)
    if found is None:
        return set()
    return {_PROGRAMS[found[1]], *(["openssh-client"] if found[2] == "ssh" else [])}
