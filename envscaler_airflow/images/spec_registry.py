"""The registry of shared specs and modules: versioned, immutable, stored on a run store's URL, cached.

``registry.v1/<name>/<version>.json`` contains one document. It is created exclusively and never rewritten. So
a version never changes, and exactly one of two publishers wins.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import total_ordering
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from envscaler_agent.messages import SCHEMA, check_schema
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import ProtocolError, SpecError, StoreError, refuse
from envscaler_airflow.local_files import cache_folder, read_plain, user_name, write_atomic
from envscaler_airflow.store.run_store import Store

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?\Z")
_PART = re.compile(
    rf"(\^|~|>=|<=|>|<|=)?\s*{_NUMBER}(?:\.{_NUMBER})?(?:\.{_NUMBER})?(?:-([0-9A-Za-z.-]+))?\Z"
)


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """``1.2.3`` or ``1.2.3-rc.1``; build metadata is rejected, because it does not affect the order.

    Source: Semantic Versioning 2.0.0, sections 2, 9 and 11.
    """

    major: int
    minor: int
    patch: int
    pre: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse *text*.

        Raises:
            SpecError: *text* is not a valid version.
        """
        match = _VERSION.match(text)
        if match is None:
            raise SpecError(f"version {text!r:.60} is not a semantic version; write 1.2.0 or 1.2.0-rc.1")
        pre = tuple(match[4].split(".")) if match[4] else ()
        return cls(int(match[1]), int(match[2]), int(match[3]), pre)

    def __str__(self) -> str:
        """``1.2.3-rc.1``."""
        text = f"{self.major}.{self.minor}.{self.patch}"
        return f"{text}-{'.'.join(self.pre)}" if self.pre else text

    def __lt__(self, other: Version) -> bool:
        """Compare as in semantic versioning: a pre-release precedes its release, numbers precede text."""
        return self._key() < other._key()

    def _key(self) -> tuple[tuple[int, int, int], bool, tuple[tuple[bool, int, str], ...]]:
        parts = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in self.pre)
        return (self.core, not self.pre, parts)

    @property
    def core(self) -> tuple[int, int, int]:
        """Major, minor and patch."""
        return (self.major, self.minor, self.patch)


def newest(found: Iterable[Version], wanted: str | None) -> Version | None:
    """The newest of *found* within the range *wanted*; None if there is none.

    ``1.2`` is 1.2.x, ``1`` is 1.x, ``^1.2`` up to the next major, ``~1.2.3`` up to the next minor,
    ``>=1.2,<2`` means both, ``*`` or None any version. A pre-release counts only when the range names one.

    Raises:
        SpecError: *wanted* is not a valid range.
    """
    checks = _checks(wanted)
    has_pre = wanted is not None and "-" in wanted
    fitting = [version for version in found if all(check(version) for check in checks)]
    return max((version for version in fitting if has_pre or not version.pre), default=None)


def exact(wanted: str | None) -> Version | None:
    """The version if *wanted* names exactly one, otherwise None."""
    return Version.parse(wanted) if wanted is not None and _VERSION.match(wanted) else None


def _checks(wanted: str | None) -> list[Callable[[Version], bool]]:
    if wanted is None or wanted.strip() in ("", "*"):
        return []
    return [check for part in wanted.split(",") for check in _check(part.strip(), wanted)]


def _check(part: str, whole: str) -> list[Callable[[Version], bool]]:
    match = _PART.match(part)
    if match is None:
        raise SpecError(f"range {whole!r:.60} is not understood; write 1.2, ^1.2, ~1.2.3 or >=1.2,<2")
    sign, numbers = match[1] or "", [int(group) for group in match.groups()[1:4] if group is not None]
    major, minor, patch = [*numbers, 0, 0][:3]
    low = Version(major, minor, patch, tuple(match[5].split(".")) if match[5] else ())
    if sign == ">=":
        return [lambda version: version >= low]
    if sign == "<":
        return [lambda version: version < low]
    above, is_full = _above(sign, numbers), len(numbers) == 3
    if sign == "<=":
        return [lambda version: version <= low if is_full else version.core < above]
    if sign == ">":
        return [lambda version: version > low if is_full else version.core >= above]
    if is_full and sign in ("", "="):
        return [lambda version: version == low]
    return [lambda version: version >= low, lambda version: version.core < above]


def _above(sign: str, numbers: list[int]) -> tuple[int, int, int]:
    """The first version after the range of a part."""
    major, minor, patch = [*numbers, 0, 0][:3]
    if sign == "^":
        if major or len(numbers) == 1:
            return (major + 1, 0, 0)
        return (0, minor + 1, 0) if minor or len(numbers) < 3 else (0, 0, patch + 1)
    if len(numbers) == 1:
        return (major + 1, 0, 0)
    if sign == "~" or len(numbers) == 2:
        return (major, minor + 1, 0)
    return (major, minor, patch + 1)


FOLDER = "registry.v1"
"""Folder in the store. No run's folder has a dot in its name."""
MAX_BYTES = 1 << 20
"""Largest document, bytes. Chosen: a spec is some kilobytes."""
SHIPPED = "envscaler"
"""Team of the modules that come with the package; publishing there is refused."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9._-]*){1,3}\Z")
_REFERENCE = re.compile(r"(?:registry://)?(?P<name>[^@]+)(?:@(?P<wanted>.+))?\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """One published document.

    Attributes:
        name: ``team/pytorch``.
        version: Its version.
        text: The YAML document.
        sha256: Hash of the text.
        by: User who published it, as reported by the user's machine.
        at: Time of publication by that machine's clock, seconds since the epoch; None for shipped modules.
        writer: uuid of this publication.
    """

    name: str
    version: Version
    text: str
    sha256: str
    by: str
    at: float | None
    writer: str

    @property
    def published(self) -> str:
        """When it was published, as part of a sentence; empty for shipped modules."""
        return "" if self.at is None else time.strftime(" on %Y-%m-%d %H:%M UTC", time.gmtime(self.at))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": SCHEMA, "name": self.name, "version": str(self.version), "text": self.text,
            "sha256": self.sha256, "by": self.by, "at": self.at, "writer": self.writer,
        }  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Entry:
        """Read what :meth:`to_dict` returned.

        Raises:
            ProtocolError: The entry is torn or of another version, or its text does not match its hash.
        """
        try:
            body = json.loads(data)
            check_schema(body["schema"], where=where)
            at = body["at"]
            entry = cls(
                str(body["name"]), Version.parse(body["version"]), str(body["text"]), str(body["sha256"]),
                str(body["by"]), None if at is None else float(at), str(body["writer"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError, SpecError) as err:
            raise ProtocolError(f"{where} is not an entry of a registry: {err!r}") from err
        if hashlib.sha256(entry.text.encode()).hexdigest() != entry.sha256:
            raise ProtocolError(f"{where}: its text is not what its sha256 says; pull it again")
        return entry


def split_reference(reference: str) -> tuple[str, str | None]:
    """Split ``registry://team/name@1.2`` into name and range (the scheme is optional).

    Raises:
        SpecError: *reference* does not have this form.
    """
    match = _REFERENCE.match(reference)
    if match is None or not _NAME.match(match["name"]) or ".." in match["name"]:
        raise SpecError(f"{reference!r:.100} is not a registry reference; write registry://team/name@1.2")
    return match["name"], match["wanted"]


def default_cache() -> Path:
    """``~/.cache/envscaler/registry``, or below XDG_CACHE_HOME."""
    return cache_folder() / "registry"


class SpecRegistry:
    """Publishes and finds documents. Calling it with a reference returns the path of a local copy."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        cache: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the store that *open_store* opens on first use, and copies in *cache*."""
        self._open_store = open_store
        self._store: Store | None = None
        self._cache = cache or default_cache()
        self._clock = clock

    @property
    def store(self) -> Store:
        """The store, opened on first use."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def publish(self, name: str, version: str, text: str, *, by: str | None = None) -> Entry:
        """Publish *text*; publishing the same text again succeeds.

        Raises:
            SpecError: The name or version is invalid, or the version exists with other text.
            StoreError: It is unknown whether the document was published.
        """
        checked, wanted = split_reference(name)
        if wanted is not None or checked.startswith(f"{SHIPPED}/"):
            raise SpecError(
                f"{name!r:.100} cannot be published; write a name of your team, such as team/pytorch"
            )
        if len(text.encode()) > MAX_BYTES:
            raise SpecError(f"{name}: {len(text.encode())} bytes, at most {MAX_BYTES} are published")
        digest = hashlib.sha256(text.encode()).hexdigest()
        entry = Entry(
            checked, Version.parse(version), text, digest, by or user_name(), self._clock(), uuid.uuid4().hex
        )
        path = _path(checked, entry.version)
        try:
            is_new = self.store.create(path, json.dumps(entry.to_dict()).encode())
        except StoreError as err:
            return self._settle(entry, path, f": {err}")
        return entry if is_new else self._settle(entry, path)

    def _settle(self, entry: Entry, path: str, why: str = "") -> Entry:
        """Read back which publisher won."""
        there = self._read(path)
        if there is None:
            uri = self.store.uri(path)
            raise StoreError(f"{uri}: it is unknown whether it was published; try again{why}")
        if there.sha256 != entry.sha256:
            following = replace(entry.version, patch=entry.version.patch + 1, pre=())
            raise SpecError(
                f"{entry.name}@{entry.version} was published by {there.by}{there.published} with other "
                f"content, and stays; write a new version, such as {following}"
            )
        return there

    def names(self) -> list[str]:
        """Every name, the shipped ones first.

        Raises:
            StoreError: The store cannot be read.
        """
        published = [child.replace("%2F", "/") for child in self.store.children(FOLDER)]
        return [*shipped_names(), *sorted(name for name in published if _NAME.match(name))]

    def versions(self, name: str) -> list[Version]:
        """Every version of *name*, oldest first."""
        if name.startswith(f"{SHIPPED}/"):
            return [entry.version for entry in _shipped() if entry.name == name]
        return sorted(_versions(self.store.children(f"{FOLDER}/{_folder(name)}")))

    def find(self, reference: str) -> Entry:
        """The newest entry that *reference* allows; from the cache if that is enough, or the store fails.

        Raises:
            SpecError: No version matches; the message names the available ones.
            StoreError: The store cannot be read and the cache has no match.
        """
        name, wanted = split_reference(reference)
        if name.startswith(f"{SHIPPED}/"):
            known = {entry.version: entry for entry in _shipped() if entry.name == name}
            version = newest(known, wanted) if known else None
            if version is None:
                listed = ", ".join(shipped_names())
                raise SpecError(f"{reference}: not shipped; write one of {listed}")
            return known[version]
        one = exact(wanted)
        if one is not None and (entry := self._cached(name, one)) is not None:
            return entry
        try:
            known_versions = self.versions(name)
        except StoreError as err:
            entry = self._kept(name, wanted)
            if entry is None:
                raise StoreError(f"{reference}: the cache has no such version, and {err}") from err
            return entry
        version = newest(known_versions, wanted)
        if version is None:
            listed = ", ".join(str(item) for item in known_versions)
            fix = f"write one of {listed}" if listed else "`envscaler registry list` lists what is published"
            raise SpecError(f"{reference}: no such version in {self.store.url}; {fix}")
        return self._cached(name, version) or self._fetch(name, version)

    def pull(self, reference: str) -> Path:
        """Path of a local copy of the document *reference*, for :func:`spec.load_spec`.

        Raises:
            SpecError: As :meth:`find`, or the store cannot be read.
        """
        try:
            entry = self.find(reference)
        except StoreError as err:
            told = str(err).removeprefix(f"{reference}: ")
            raise SpecError(f"{reference}: {told}; and no copy is in {self._cache}") from err
        path = self._copy(entry.name, entry.version).with_suffix(".yaml")
        if not path.is_file() or path.read_text(encoding="utf-8") != entry.text:
            _write(path, entry.text)
        return path

    __call__ = pull

    def _kept(self, name: str, wanted: str | None) -> Entry | None:
        """The newest matching entry of the cache, used when the store is unavailable."""
        folder = self._copy(name, Version(0, 0, 0)).parent
        cached = _versions(path.name for path in folder.glob("*.json")) if folder.is_dir() else []
        version = newest(cached, wanted)
        return self._cached(name, version) if version is not None else None

    def _fetch(self, name: str, version: Version) -> Entry:
        entry = self._read(_path(name, version))
        if entry is None or entry.name != name or entry.version != version:
            raise StoreError(f"{name}@{version}: its entry in {self.store.url} is gone or another's")
        _write(self._copy(name, version), json.dumps(entry.to_dict()))
        return entry

    def _read(self, path: str) -> Entry | None:
        data = self.store.read(path, max_bytes=4 * MAX_BYTES)
        return None if data is None else Entry.from_bytes(data, self.store.uri(path))

    def _cached(self, name: str, version: Version) -> Entry | None:
        path = self._copy(name, version)
        try:
            return Entry.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError):
            path.unlink(missing_ok=True)
            return None

    def _copy(self, name: str, version: Version) -> Path:
        """Path in a folder for each store, because another store may have another document of this name."""
        is_shipped = name.startswith(f"{SHIPPED}/")
        place = SHIPPED if is_shipped else hashlib.sha256(self.store.url.encode()).hexdigest()[:16]
        return self._cache / place / _folder(name) / f"{version}.json"


def shipped_names() -> list[str]:
    """Names of the modules that come with the package."""
    return sorted({entry.name for entry in _shipped()})


def _shipped() -> list[Entry]:
    """``modules/<name>@<version>.yaml`` of the package."""
    found = []
    for item in resources.files("envscaler_airflow.images").joinpath("modules").iterdir():
        name, _, version = item.name.removesuffix(".yaml").partition("@")
        if item.name.endswith(".yaml"):
            text = item.read_text(encoding="utf-8")
            digest = hashlib.sha256(text.encode()).hexdigest()
            found.append(
                Entry(f"{SHIPPED}/{name}", Version.parse(version), text, digest, "envscaler", None, "")
            )
    return found


def _folder(name: str) -> str:
    return name.replace("/", "%2F")


def _path(name: str, version: Version) -> str:
    return f"{FOLDER}/{_folder(name)}/{version}.json"


def _versions(files: Iterable[str]) -> list[Version]:
    names = [file.removesuffix(".json") for file in files if file.endswith(".json")]
    return [version for name in names if (version := exact(name))]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


_WRAPPER = "version: v1\nname: check\nextends: [./document.yaml]\n"


def check_document(
    path: Path, *, parameters: Mapping[str, str], registry: Callable[[str], str | Path]
) -> str:
    """Return the text of the spec or module in *path* if it may be published.

    The document is loaded as the base of an empty spec, so that a module without a name is checked too.

    Raises:
        SpecError: The document has faults, or it refers to files, which the registry does not store.
    """
    try:
        text = read_plain(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as err:
        raise SpecError(f"{path}: cannot be read ({err}); write the path of a spec or module") from err
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "document.yaml").write_text(text, encoding="utf-8")
        Path(folder, "envscaler.yaml").write_text(_WRAPPER, encoding="utf-8")
        refuse(_files_named(text, str(path)))
        try:
            load_spec(Path(folder, "envscaler.yaml"), parameters=parameters, registry=registry)
        except SpecError as err:
            own = [fault.replace(f"{folder}/document.yaml", str(path)) for fault in err.faults]
            raise SpecError("\n".join(own), faults=own) from err
    return text


def _files_named(text: str, where: str) -> list[str]:
    """References to local files, which other users do not have. The loader reports broken YAML."""
    try:
        body = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    if not isinstance(body, dict):
        return []
    named = [
        f"{name}: {item!r:.100} is a file; publish it and write registry://..."
        for name in ("extends", "modules")
        for item in _listed(body.get(name))
        if isinstance(item, str) and not item.startswith("registry:")
    ]
    if isinstance(body.get("workdir"), str):
        named.append("workdir: is a folder, which the registry does not hold; leave it to the spec")
    named += [
        "runtimes: requirements: is a file; write packages: [...]"
        for runtime in _listed(body.get("runtimes"))
        if isinstance(runtime, dict) and isinstance(runtime.get("requirements"), str)
    ]
    return [f"{where}: {text}" for text in named]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
