"""The programs that build, move and run images, behind one seam: buildah and docker."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.images.programs import (
    Output,
    find_program,
    run_program,
    stream_program,
)

TRANSFER_S = 3600.0
"""Longest pull, push or save, seconds. Chosen: 20 GB at 6 MB/s."""

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_ENV_FILE_LINE = 60_000
"""Longest value in an env file, bytes: docker reads its lines by Go's bufio.Scanner, which ends at 64 KiB."""
_ENTER = 'exec >/run/secrets/output 2>&1; set -a; . /run/secrets/variables; set +a; exec "$@"'
"""What a container of buildah begins with. Its output goes past buildah, which on a busy machine leaves out
the last of it: seen with version 1.28.2 and chroot isolation, in 2 of 960 runs."""


@dataclass(frozen=True, slots=True)
class Access:
    """How registries are reached.

    Attributes:
        env: Added to the builder's own environment, such as SSL_CERT_FILE.
        auth: Folder with a ``config.json`` of credentials; None for the builder's own.
        tls_verify: False for a registry without TLS.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    auth: Path | None = None
    tls_verify: bool = True


@dataclass(frozen=True, slots=True)
class Order:
    """One build.

    Attributes:
        folder: The context.
        name: Name of the image.
        labels: Labels beside those of the Dockerfile.
        args: Build arguments.
        secrets: Build secret to the file that contains it.
        cache: Repository that layers are taken from and put into; None for this machine's alone.
    """

    folder: Path
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    cache: str | None = None

    def options(self) -> list[str]:
        """Labels, arguments and secrets as both programs take them."""
        words: list[str] = []
        for name, value in sorted(self.labels.items()):
            words += ["--label", f"{name}={value}"]
        for name, value in sorted(self.args.items()):
            words += ["--build-arg", f"{name}={value}"]
        for name, path in sorted(self.secrets.items()):
            words += ["--secret", f"id={name},src={path}"]
        return words


@dataclass(frozen=True, slots=True)
class Image:
    """What a builder says of an image.

    Attributes:
        id: Its id on this machine.
        digest: Digest in the registry that it came from; None for one that was never in one.
        labels: Its labels.
        layers: Digest of each unpacked layer, lowest first.
        command: Its entrypoint and default arguments.
    """

    id: str
    digest: str | None
    labels: Mapping[str, str]
    layers: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """How a command is run in an image.

    Attributes:
        env: Variables, secrets among them: they never stand on a command line.
        mounts: Path on the host, path inside, and whether it is read-only.
        cpus: Cores; None for all.
        memory_bytes: Bytes; None for all.
        shm_bytes: Size of ``/dev/shm``; None for the program's default.
        gpus: Number of GPUs.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, bool], ...] = ()
    cpus: float | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    gpus: int = 0


class Builder(Protocol):
    """Builds, moves and runs images."""

    name: str

    def inspect(self, image: str) -> Image | None:
        """*image* on this machine; None when it is not here."""

    def build(self, order: Order, access: Access, on_line: Callable[[str], None]) -> int:
        """Build, handing over each line of output as it comes; the exit code."""

    def pull(self, image: str, access: Access) -> str | None:
        """Bring *image* here. None; the program's words when it cannot."""

    def push(self, image: str, access: Access) -> str | None:
        """Send *image* to its registry. Its digest there, None when the program does not tell.

        Raises:
            BackendError: It cannot be pushed.
        """

    def save(self, image: str, path: Path) -> None:
        """Write *image* as an archive that scanners read."""

    def run(
        self, image: str, words: Sequence[str], container: Container, on_line: Callable[[str], None]
    ) -> int:
        """Run *words* in *image* to their end; the exit code."""


def find_builder(name: str | None) -> Builder:
    """The builder of that name or of ENVSCALER_BUILDER; else docker where its daemon answers, else buildah.

    Raises:
        SpecError: There is none.
    """
    name = name or os.environ.get("ENVSCALER_BUILDER") or None
    if name in (None, "docker") and (program := find_program("docker")):
        docker = Docker(program)
        fault = docker.fault()
        if fault is None:
            return docker
        if name == "docker":
            raise SpecError(f"--builder docker: {fault}, or use --builder buildah")
    if name in (None, "buildah") and (program := find_program("buildah")):
        return Buildah(program)
    wanted = name or "docker or buildah"
    raise SpecError(f"{wanted} is not available here; install it (Debian: docker.io, buildah)")


class Buildah:
    """Needs no daemon; isolation as BUILDAH_ISOLATION says."""

    name = "buildah"

    def __init__(self, program: str = "buildah") -> None:
        """Use *program*."""
        self._program = program

    def inspect(self, image: str) -> Image | None:
        """See :class:`Builder`."""
        done = run_program([self._program, "inspect", "--type", "image", image])
        if done.code != 0:
            return None
        body = json.loads(done.out)
        oci = body.get("OCIv1") or {}
        config, root = oci.get("config") or {}, oci.get("rootfs") or {}
        return _image(body["FromImageID"], body.get("FromImageDigest"), config, root.get("diff_ids"))

    def build(self, order: Order, access: Access, on_line: Callable[[str], None]) -> int:
        """See :class:`Builder`."""
        words = [self._program, "build", "--layers", "--pull=false", "--tag", order.name, _tls(access)]
        words += order.options()
        words += [] if order.cache is None else ["--cache-from", order.cache, "--cache-to", order.cache]
        return stream_program([*words, str(order.folder)], on_line, env=access.env)

    def pull(self, image: str, access: Access) -> str | None:
        """See :class:`Builder`."""
        words = [self._program, "pull", "--quiet", _tls(access)]
        words += [] if access.auth is None else ["--authfile", str(access.auth / "config.json")]
        return _words_of_failure(run_program([*words, image], env=access.env, timeout_s=TRANSFER_S))

    def push(self, image: str, access: Access) -> str | None:
        """See :class:`Builder`."""
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "digest")
            words = [self._program, "push", "--quiet", _tls(access), "--digestfile", str(told), image]
            _check(run_program(words, env=access.env, timeout_s=TRANSFER_S), f"{image} cannot be pushed")
            return told.read_text(encoding="utf-8").strip() or None

    def save(self, image: str, path: Path) -> None:
        """See :class:`Builder`."""
        words = [self._program, "push", "--quiet", image, f"docker-archive:{path}:{image}"]
        _check(run_program(words, timeout_s=TRANSFER_S), f"{image} cannot be saved")

    def run(
        self, image: str, words: Sequence[str], container: Container, on_line: Callable[[str], None]
    ) -> int:
        """See :class:`Builder`. Limits hold with an OCI isolation only; chroot has none.

        Raises:
            SpecError: The container requests GPUs, or buildah would split a path.
        """
        if container.gpus:
            raise SpecError("buildah hands no GPU to a container; use docker, or ask for none under targets")
        options = [] if container.memory_bytes is None else [f"--memory={container.memory_bytes}"]
        options += [] if container.shm_bytes is None else [f"--shm-size={container.shm_bytes}"]
        if container.cpus is not None:
            options += ["--cpu-period=100000", f"--cpu-quota={int(container.cpus * 100_000)}"]
        made = run_program([self._program, "from", "--pull-never", *options, image])
        _check(made, f"{image} cannot be started")
        name = made.out.strip()
        try:
            with tempfile.TemporaryDirectory() as folder:
                variables = Path(folder, "variables")
                text = "".join(f"{key}={shlex.quote(value)}\n" for key, value in container.env.items())
                variables.write_text(text, encoding="utf-8")
                variables.chmod(0o644)  # for the image's user, under any umask; the folder is ours alone
                output = Path(folder, "output")
                ours = (
                    (str(variables), "/run/secrets/variables", True),
                    (str(output), "/run/secrets/output", False),
                )
                mounts = (*container.mounts, *ours)
                volumes = [word for mount in mounts for word in ("--volume", _volume(mount))]
                inside = ["sh", "-c", _ENTER, "sh", *words]
                command = [self._program, "run", *volumes, name, "--", *inside]
                return stream_program(command, on_line, fifo=output)
        finally:
            run_program([self._program, "rm", name])


_VERSIONS = "{{.Client.Version}} {{.Server.Version}}"
_OWN_BUILDKIT = 23
"""Major version from which the client builds by its plugin buildx alone. Source: Docker Engine 23.0 notes."""


class Docker:
    """docker with BuildKit; layers go to a registry by buildx, or inside the image where there is none.

    ENVSCALER_DOCKER_NETWORK (such as ``host``) is the network of builds and containers, where the
    daemon's own is not to be used.
    """

    name = "docker"

    def __init__(self, program: str = "docker") -> None:
        """Use *program*."""
        self._program = program

    def fault(self) -> str | None:
        """Why it cannot build, and what to do; None when it can."""
        try:
            told = run_program([self._program, "version", "--format", _VERSIONS], timeout_s=20)
        except BackendError:
            told = None
        if told is None or told.code != 0:
            return "the daemon does not answer; start it"
        client = told.out.partition(".")[0].strip()
        if client.isdigit() and int(client) >= _OWN_BUILDKIT and not self._has_buildx():
            return "its BuildKit is missing; install buildx (Debian: docker-buildx)"
        return None

    def _has_buildx(self) -> bool:
        return run_program([self._program, "buildx", "version"]).code == 0

    def _has_init(self) -> bool:
        """True unless the daemon says that its init is not there (Debian: package tini)."""
        told = run_program([self._program, "info", "--format", "{{.InitCommit.ID}}"])
        return told.code == 0 and told.out.strip() != "N/A"

    def inspect(self, image: str) -> Image | None:
        """See :class:`Builder`."""
        done = run_program([self._program, "image", "inspect", image])
        if done.code != 0:
            return None
        body = json.loads(done.out)[0]
        layers = (body.get("RootFS") or {}).get("Layers")
        digest = _digest_in(body.get("RepoDigests") or (), image)
        return _image(body["Id"], digest, body.get("Config") or {}, layers)

    def build(self, order: Order, access: Access, on_line: Callable[[str], None]) -> int:
        """See :class:`Builder`."""
        proxies = {name: os.environ[name] for name in _PROXIES if name in os.environ}
        words = ["--progress=plain", *_network(), "--tag", order.name, *order.options()]
        words += [word for name in proxies for word in ("--build-arg", name)]
        has_buildx = self._has_buildx()
        if order.cache is not None and has_buildx:
            words += ["--cache-from", f"type=registry,ref={order.cache}"]
            words += ["--cache-to", f"type=registry,ref={order.cache},mode=max"]
        elif order.cache is not None:
            words += ["--cache-from", order.cache, "--build-arg", "BUILDKIT_INLINE_CACHE=1"]
        head = [self._program, "buildx", "build", "--load"] if has_buildx else [self._program, "build"]
        env = {**access.env, "DOCKER_BUILDKIT": "1"}
        code = stream_program([*head, *words, str(order.folder)], on_line, env=env)
        if code == 0 and order.cache is not None and not has_buildx:
            done = run_program([self._program, "tag", order.name, order.cache])
            _check(done, f"{order.name} cannot be named {order.cache}")
            self.push(order.cache, access)
        return code

    def pull(self, image: str, access: Access) -> str | None:
        """See :class:`Builder`."""
        config = [] if access.auth is None else ["--config", str(access.auth)]
        words = [self._program, *config, "pull", "--quiet", image]
        return _words_of_failure(run_program(words, env=access.env, timeout_s=TRANSFER_S))

    def push(self, image: str, access: Access) -> str | None:
        """See :class:`Builder`."""
        done = run_program([self._program, "push", "--quiet", image], env=access.env, timeout_s=TRANSFER_S)
        _check(done, f"{image} cannot be pushed")
        found = self.inspect(image)
        return None if found is None else found.digest

    def save(self, image: str, path: Path) -> None:
        """See :class:`Builder`."""
        words = [self._program, "save", "--output", str(path), image]
        _check(run_program(words, timeout_s=TRANSFER_S), f"{image} cannot be saved")

    def run(
        self, image: str, words: Sequence[str], container: Container, on_line: Callable[[str], None]
    ) -> int:
        """See :class:`Builder`. An interrupted run asks the command to end, and leaves no container."""
        name = f"envscaler-{uuid.uuid4().hex[:12]}"
        with tempfile.TemporaryDirectory() as folder:
            options, env = _docker_options(container, Path(folder))
            options += ["--init"] if self._has_init() else []
            entry, rest = (list(words[:1]), list(words[1:])) if words else ([], [])
            options += [f"--entrypoint={entry[0]}"] if entry else []
            command = [self._program, "run", "--rm", "--name", name, *_network(), *options, image, *rest]
            try:
                return stream_program(command, on_line, env=env)
            except BaseException:
                run_program([self._program, "rm", "--force", name])
                raise


def _docker_options(container: Container, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return options of ``docker run``, and the variables that only its own environment can pass on.

    A file in *folder* passes the others, since PATH and DOCKER_HOST of a stage are not docker's own.
    """
    told = {
        name: value
        for name, value in container.env.items()
        if "\n" in value or "\r" in value or len(value.encode()) > _ENV_FILE_LINE
    }
    variables = folder / "variables"
    variables.touch(mode=0o600)
    lines = [f"{name}={value}\n" for name, value in container.env.items() if name not in told]
    variables.write_text("".join(lines), encoding="utf-8")
    options = [f"--env-file={variables}", *(f"--env={name}" for name in told)]
    for source, path, is_read_only in container.mounts:
        fields = ["type=bind", f"source={source}", f"target={path}", *(["readonly"] if is_read_only else [])]
        options.append(f"--mount={','.join(_csv(field) for field in fields)}")
    options += [] if container.memory_bytes is None else [f"--memory={container.memory_bytes}"]
    options += [] if container.shm_bytes is None else [f"--shm-size={container.shm_bytes}"]
    options += [] if container.cpus is None else [f"--cpus={container.cpus:g}"]
    options += [f"--gpus={container.gpus}"] if container.gpus else []
    return options, told


def _csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else text


def _volume(mount: tuple[str, str, bool]) -> str:
    source, path, is_read_only = mount
    if ":" in source + path:
        raise SpecError(f"volumes: {source}: buildah takes ':' in a path for a separator; use docker")
    return f"{source}:{path}:{'ro' if is_read_only else 'rw'}"


def _digest_in(known: Sequence[str], image: str) -> str | None:
    """Digest of *image* in its own repository; else in any that it is in."""
    plain = image.partition("@")[0]
    head, colon, tag = plain.rpartition(":")
    repository = head if colon and "/" not in tag else plain
    found = {name: digest for name, _, digest in (text.rpartition("@") for text in known)}
    return found.get(repository) or next(iter(found.values()), None)


def _network() -> list[str]:
    name = os.environ.get("ENVSCALER_DOCKER_NETWORK")
    return [f"--network={name}"] if name else []


def _image(identity: str, digest: Any, config: Mapping[str, Any], layers: Any) -> Image:
    command = (*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ()))
    labels = config.get("Labels") or {}
    return Image(identity, str(digest) if digest else None, labels, tuple(layers or ()), command)


def _tls(access: Access) -> str:
    return f"--tls-verify={'true' if access.tls_verify else 'false'}"


def _words_of_failure(done: Output) -> str | None:
    return None if done.code == 0 else (done.err or done.out).strip()


def _check(done: Output, what: str) -> None:
    words = _words_of_failure(done)
    if words is not None:
        raise BackendError(f"{what}: {words}", transient=True)
