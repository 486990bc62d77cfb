"""Build a stage's image only if its content changed, layer by layer, with a log; and the sidecar image."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import envscaler_airflow
from envscaler_airflow.agent_files import copy_agent, package_root
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.builders import Access, Builder, Image, Order
from envscaler_airflow.images.dockerfile import CA, CREDENTIALS, ImageOptions
from envscaler_airflow.images.programs import (
    Output,
    certificates,
    find_program,
    netrc,
    private_file,
    resolved,
    run_program,
)
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.targets import render, slug
from envscaler_airflow.local_files import cache_folder
from envscaler_airflow.store.archive import pack_workdir, unpack

EPOCH = 946684800
"""Time of every file, 2000-01-01: a layer depends on content alone. Chosen: old, and legal in a zip."""


@dataclass(frozen=True, slots=True)
class Context:
    """A build context.

    Attributes:
        folder: Where it lies.
        content: 64 hex digits over every name, mode and byte of it.
    """

    folder: Path
    content: str


def assemble(
    spec: EnvSpec, requirements: Requirements, folder: Path, options: ImageOptions | None = None
) -> Context:
    """Write the build context of *spec* to the empty *folder*.

    The code comes from ``workdir`` as runs ship it: what ``.gitignore`` leaves out is left out here too.

    Raises:
        SpecError: The code cannot be packed, or the spec cannot be an image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workdir = spec.resolve_path("workdir")
    if workdir is not None:
        archive = pack_workdir(workdir)
        try:
            (folder / "work").mkdir()
            unpack(archive.path, folder / "work", sha256=archive.sha256)
        finally:
            archive.path.unlink(missing_ok=True)
    agent = copy_agent(folder)
    agent.rename(folder / "envscaler")
    options = replace(options or ImageOptions(), has_agent=True, has_workdir=workdir is not None)
    for item in render("dockerfile", spec, requirements, options=options):
        item.write(folder)
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)
    settle(folder)
    return Context(folder, _hash(folder))


def settle(folder: Path) -> None:
    """Set modes and times that depend on content alone; every user may read the files."""
    for here, folders, files in os.walk(folder):
        for name in files:
            path = Path(here, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        for name in (*files, *folders):
            os.utime(Path(here, name), (EPOCH, EPOCH), follow_symlinks=False)
        for name in folders:
            if not Path(here, name).is_symlink():
                Path(here, name).chmod(0o755)


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            digest.update(f"link {name} {path.readlink()}\0".encode())
        elif path.is_file():
            mode = "x" if path.stat().st_mode & 0o100 else "-"
            digest.update(f"file {name} {mode} {path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


CONTENT = "io.envscaler.content"
"""Label with the hash of the build context: an image that has it needs no build."""
TAIL = 30
"""Lines of the log in the message of a failed build. Chosen: a compiler's error fits."""

_STEP = re.compile(
    r"(?:\[\d+/\d+\] )?STEP (\d+)/(\d+): (.*)"
    r"|#\d+ \[(?:[\w.-]+ )?(\d+)/(\d+)\] (.*)"
)
"""A step in the output of buildah or docker's BuildKit: its number, the number of all, the instruction."""
_IMAGE_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][\w.-]{0,127})?"
)


def default_logs() -> Path:
    """``~/.cache/envscaler/builds``, or below XDG_CACHE_HOME."""
    return cache_folder() / "builds"


def mirrors() -> dict[str, str]:
    """Build arguments that name the installers' images: ENVSCALER_UV_IMAGE and ENVSCALER_MICROMAMBA_IMAGE."""
    names = ("UV_IMAGE", "MICROMAMBA_IMAGE")
    return {name: value for name in names if (value := os.environ.get(f"ENVSCALER_{name}"))}


def configured_bases() -> tuple[str, ...]:
    """Globs of ENVSCALER_ALLOWED_BASES, which apply to every build on this machine."""
    return tuple(
        part.strip() for part in os.environ.get("ENVSCALER_ALLOWED_BASES", "").split(",") if part.strip()
    )


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an image is built.

    Attributes:
        name: Name with or without tag; None for the stage's. Without tag the content's hash is the tag.
        is_shared: Also look for the image in its registry, because it should be there.
        pull: Pull a newer base even if one is on this machine.
        cache: Repository for shared layers.
        ca_file: Additional certificates to trust, such as those of a proxy.
        tls_verify: False for a registry without TLS.
        args: Build arguments, such as UV_IMAGE.
        allowed_bases: The base must match one of these globs; () allows all.
        base_digest: The base's digest from a lock; None to use the image on this machine or in its registry.
        logs: Folder of logs.
    """

    name: str | None = None
    is_shared: bool = False
    pull: bool = False
    cache: str | None = None
    ca_file: Path | None = None
    tls_verify: bool = True
    args: Mapping[str, str] = field(default_factory=mirrors)
    allowed_bases: tuple[str, ...] = field(default_factory=configured_bases)
    base_digest: str | None = None
    logs: Path = field(default_factory=default_logs)


@dataclass(frozen=True, slots=True)
class Built:
    """An image of a stage.

    Attributes:
        name: Full name of the image.
        image: What the builder reports of it.
        content: Hash of its context.
        base: Name of the base.
        base_digest: Digest of the base; None for one that was never in a registry.
        is_new: False when nothing had to be built.
        digest: Digest in its registry; None when it was not pushed.
        log: File of the build's output; None when nothing was built.
        seconds: Time of the build.
    """

    name: str
    image: Image
    content: str
    base: str
    base_digest: str | None
    is_new: bool
    digest: str | None = None
    log: Path | None = None
    seconds: float = 0.0


def build_image(
    spec: EnvSpec,
    requirements: Requirements,
    builder: Builder,
    options: BuildOptions,
    *,
    say: Callable[[str], None],
    resolve_secret: Callable[[str], str] | None = None,
) -> Built:
    """Build the image of *spec*, unless its input is unchanged.

    *say* is called with one line for each step. *resolve_secret* turns a reference (``env:NAME``) into its
    value, which private indexes and bases need.

    Raises:
        SpecError: The base is not allowed or not available, or a step fails; the message has the end of the
            log.
        BackendError: The image was built but is missing.
    """
    check_options(spec, options)
    with tempfile.TemporaryDirectory(prefix="envscaler-build-") as name:
        kit = _Kit.of(spec, requirements, Path(name), options, resolve_secret)
        base, digest = _bring_base(spec, builder, options, kit.access)
        pinned = _pinned(base, digest) if digest is not None and _is_remote(base) else base
        how = ImageOptions(base=pinned, has_ca=kit.has_ca)
        context = assemble(spec, requirements, Path(name, "context"), how)
        whole = _name(spec, options, context)
        image = _existing(builder, whole, context.content, options, kit.access)
        if image is not None:
            say(f"{whole}: unchanged, nothing to build")
            return Built(whole, image, context.content, base, digest, is_new=False)
        order = Order(
            context.folder, whole, labels={CONTENT: context.content}, args=options.args,
            secrets=kit.files, cache=options.cache,
        )  # fmt: skip
        log = options.logs / f"{context.content[:16]}.log"
        seconds = carry_out(builder, order, kit.access, log=log, say=say, mask=kit.mask)
        made = builder.inspect(whole)
    if made is None:
        raise BackendError(f"{whole} was built and is not there; its log is {log}")
    return Built(whole, made, context.content, base, digest, is_new=True, log=log, seconds=seconds)


def push_image(builder: Builder, built: Built, options: BuildOptions) -> Built:
    """Push *built* to its registry; return it with its digest.

    Raises:
        BackendError: The push failed.
    """
    with tempfile.TemporaryDirectory() as name:
        access = Access(env=certificates(options.ca_file, Path(name)), tls_verify=options.tls_verify)
        return replace(built, digest=builder.push(built.name, access))


@dataclass(frozen=True, slots=True)
class _Kit:
    """Files of one build that are neither in a context nor in a layer."""

    files: Mapping[str, Path]
    access: Access
    hidden: tuple[str, ...]

    @property
    def has_ca(self) -> bool:
        return CA in self.files

    @classmethod
    def of(
        cls,
        spec: EnvSpec,
        requirements: Requirements,
        scratch: Path,
        options: BuildOptions,
        resolve_secret: Callable[[str], str] | None,
    ) -> _Kit:
        files: dict[str, Path] = {}
        hidden: list[str] = []
        runtime = requirements.runtime
        if runtime is not None and runtime.credentials is not None:
            value = resolved(runtime.credentials, resolve_secret)
            hidden += [value, value.partition(":")[2]]
            files[CREDENTIALS] = private_file(scratch / "netrc", netrc(requirements, value))
        env = certificates(options.ca_file, scratch)
        if env:
            files[CA] = Path(env["SSL_CERT_FILE"])
        auth = None
        if spec.base is not None and spec.base.credentials is not None:
            value = resolved(spec.base.credentials, resolve_secret)
            hidden += [value, value.partition(":")[2]]
            auth = scratch / "auth"
            auth.mkdir()
            private_file(auth / "config.json", _auth_text(facts(spec.base).image, value))
        access = Access(env=env, auth=auth, tls_verify=options.tls_verify)
        return cls(files, access, tuple(text for text in hidden if len(text) > 3))

    def mask(self, line: str) -> str:
        for text in self.hidden:
            line = line.replace(text, "***")
        return line


def check_base(spec: EnvSpec, allowed: tuple[str, ...]) -> None:
    """Raise if no glob of *allowed* matches the base; () allows all.

    Raises:
        SpecError: The base is not allowed.
    """
    image = facts(spec.base).image
    if allowed and not any(fnmatch.fnmatchcase(image, pattern) for pattern in allowed):
        raise SpecError(
            f"base.image: {image} is not allowed here; write one that matches {', '.join(allowed)}"
        )


def check_options(spec: EnvSpec, options: BuildOptions) -> None:
    """Raise for options that cannot be built, before anything is fetched.

    Raises:
        SpecError: The base is not allowed; the name of the image or of the layer repository is invalid; or
            the image should be pushed but its name has no registry.
    """
    check_base(spec, options.allowed_bases)
    for option, name in (("-t", options.name), ("--cache", options.cache)):
        if name is not None:
            check_name(option, name)
    name = options.name or "localhost/"
    if options.is_shared and not (_has_registry(name) and _is_remote(name)):
        told = f"-t {options.name} is in no registry" if options.name else "there is no -t"
        raise SpecError(f"--push: {told}; write -t registry.example.com/team/name")


def check_name(option: str, name: str) -> None:
    """Refuse what no builder takes as an image's name.

    Raises:
        SpecError: *name* is not a valid one; the message names *option*.
    """
    if not _IMAGE_NAME.fullmatch(name):
        raise SpecError(
            f"{option} {name!r:.100} is not an image name; write registry.example.com/team/name or add :tag"
        )


def _auth_text(image: str, value: str) -> str:
    user, colon, _ = value.partition(":")
    pair = value if colon else f"token:{user}"
    host = image.partition("/")[0] if _has_registry(image) else "https://index.docker.io/v1/"
    return json.dumps({"auths": {host: {"auth": base64.b64encode(pair.encode()).decode()}}})


def qualified(image: str) -> str:
    """*image* with its registry, because builders without a daemon do not know short names."""
    if _has_registry(image):
        return image
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def _has_registry(image: str) -> bool:
    first, slash, _ = image.partition("/")
    return bool(slash) and (first == "localhost" or "." in first or ":" in first)


def _is_remote(image: str) -> bool:
    return not image.startswith("localhost/")


def _pinned(image: str, digest: str) -> str:
    """Replace the tag with the digest, because not every builder accepts both."""
    if "@" in image:
        return image
    name, colon, tag = image.rpartition(":")
    return f"{name if colon and '/' not in tag else image}@{digest}"


def _bring_base(
    spec: EnvSpec, builder: Builder, options: BuildOptions, access: Access
) -> tuple[str, str | None]:
    """Make the base available on this machine; return its name and digest."""
    base = qualified(facts(spec.base).image)
    if options.base_digest is not None and _is_remote(base):
        base = _pinned(base, options.base_digest)
    image = None if options.pull and _is_remote(base) else builder.inspect(base)
    if image is None:
        words = builder.pull(base, access)
        image = builder.inspect(base)
        if image is None:
            raise SpecError(
                f"base.image: {base} is not available here: {words or 'it is not on this machine'}; check "
                "its name and the way to its registry, or write an image that is on this machine"
            )
    return base, options.base_digest or image.digest


def _name(spec: EnvSpec, options: BuildOptions, context: Context) -> str:
    name = options.name or f"localhost/{slug(spec.name)}"
    if not _has_registry(name):
        name = f"localhost/{name}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:{context.content[:16]}"


def _existing(
    builder: Builder, name: str, content: str, options: BuildOptions, access: Access
) -> Image | None:
    """The image with this content, on this machine or (if it belongs there) in its registry."""
    image = builder.inspect(name)
    if image is None and options.is_shared and _is_remote(name) and builder.pull(name, access) is None:
        image = builder.inspect(name)
    return image if image is not None and image.labels.get(CONTENT) == content else None


def carry_out(
    builder: Builder,
    order: Order,
    access: Access,
    *,
    log: Path,
    say: Callable[[str], None],
    mask: Callable[[str], str] = str,
) -> float:
    """Build *order*, telling *say* each step; seconds that it took. *mask* hides secrets in a line.

    Raises:
        SpecError: A step fails; the end of the log is in the message.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun, tail = time.monotonic(), [""]
    with log.open("w", encoding="utf-8") as file:

        def on_line(line: str) -> None:
            shown = mask(line)
            file.write(f"{time.monotonic() - begun:8.1f}  {shown}\n")
            tail[:] = [*tail, shown][-TAIL:]
            if step := step_of(shown):
                say(step)

        say(f"building {order.name} with {builder.name} (log: {log})")
        code = builder.build(order, access, on_line)
    if code != 0:
        shown = "\n".join(f"  {line}" for line in tail if line)
        raise SpecError(f"{order.name} cannot be built (exit code {code}); the whole log is {log}:\n{shown}")
    return time.monotonic() - begun


def step_of(line: str) -> str | None:
    """``[3/12] RUN apt-get ...`` of a builder's output line; None for any other line."""
    match = _STEP.match(line)
    if match is None:
        is_cached = line.startswith("--> Using cache") or re.fullmatch(r"#\d+ CACHED", line)
        return "     from cache" if is_cached else None
    number, of, what = (part for part in match.groups() if part is not None)
    plain = re.sub(r"--mount=\S+ ", "", what)
    return f"[{number}/{of}] {plain[:100]}"


SEVERITIES = ("low", "medium", "high", "critical")
"""Severities in ascending order, as both scanners name them."""
TIMEOUT_S = 1800.0
"""Longest scan, seconds. Chosen: the scanner downloads its vulnerability database first."""


def find_scanner() -> str:
    """Path of trivy or grype.

    Raises:
        SpecError: Neither is installed. An unscanned image never passes.
    """
    program = find_program("trivy", "grype")
    if program is None:
        raise SpecError("--scan: neither trivy nor grype is installed; install one, or leave --scan out")
    return program


def scan_image(builder: Builder, image: str, *, severity: str = "high") -> str:
    """Return the scanner's report if it found nothing of *severity* or above.

    Raises:
        SpecError: The scanner found something, or no scanner is installed.
        BackendError: The scanner failed.
    """
    program = find_scanner()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        builder.save(image, archive)
        done = run_program(_words(program, archive, severity), timeout_s=TIMEOUT_S)
    report = (done.out or done.err).strip()
    if done.code == 0:
        return report
    if _has_findings(Path(program).name, done):
        raise SpecError(f"{image} has vulnerabilities of severity {severity} or above:\n{report}")
    raise BackendError(f"{program} failed (exit code {done.code}): {done.err.strip() or report}")


_TRIVY_FOUND = 10
"""Exit code that we pass to trivy for findings."""
_GRYPE_FOUND = "discovered vulnerabilities at or above the severity threshold"
"""What grype prints for findings; its exit code differs by version. Source: anchore/grype,
grype/grypeerr/errors.go.
"""


def _has_findings(program: str, done: Output) -> bool:
    if program == "trivy":
        return done.code == _TRIVY_FOUND
    return _GRYPE_FOUND in done.err + done.out


def _words(program: str, archive: Path, severity: str) -> list[str]:
    if Path(program).name == "grype":
        return [program, f"docker-archive:{archive}", "--fail-on", severity, "--quiet"]
    names = ",".join(name.upper() for name in SEVERITIES[SEVERITIES.index(severity) :])
    options = ["--severity", names, "--quiet", "--exit-code", str(_TRIVY_FOUND)]
    return [program, "image", "--input", str(archive), *options]


REQUIREMENTS = Path(__file__).with_name("sidecar-requirements.txt")
"""The distributions that the sidecar imports and theirs, each with its version and its files' hashes."""
DISTRIBUTION = "envscaler-airflow"
_DOCKERFILE = "sidecar.Dockerfile"
_METADATA = ("METADATA", "entry_points.txt")


def sidecar_image_name(repository: str) -> str:
    """*repository* with its registry and, unless it names a tag, the version of this package.

    Raises:
        SpecError: It is not a valid image name.
    """
    check_name("--push", repository)
    name = qualified(repository)
    return name if ":" in name.rpartition("/")[2] else f"{name}:{envscaler_airflow.__version__}"


def build_sidecar_image(
    builder: Builder, name: str, *, args: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Build the image *name*; *args* are arguments of the Dockerfile, such as BASE.

    Raises:
        SpecError: A step fails; the end of the log is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="envscaler-sidecar-") as scratch:
        folder = Path(scratch, "context")
        write_context(folder)
        labels = {"org.opencontainers.image.version": envscaler_airflow.__version__}
        log = default_logs() / f"sidecar-{envscaler_airflow.__version__}.log"
        carry_out(builder, Order(folder, name, labels=labels, args=args), Access(), log=log, say=say)


def write_context(folder: Path) -> None:
    """Write Dockerfile, requirements and the files of both packages into the new *folder*."""
    packages = folder / "packages"
    for source in (Path(envscaler_airflow.__file__).parent, package_root() / "envscaler_agent"):
        shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    _write_metadata(packages)
    shutil.copyfile(Path(__file__).with_name(_DOCKERFILE), folder / "Dockerfile")
    shutil.copyfile(REQUIREMENTS, folder / "requirements.txt")
    settle(folder)


def _write_metadata(packages: Path) -> None:
    """Write what entry points are found by; a package that is only on the path has none."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return
    folder = packages / f"envscaler_airflow-{installed.version}.dist-info"
    folder.mkdir()
    for name in _METADATA:
        (folder / name).write_text(installed.read_text(name) or "", encoding="utf-8")
