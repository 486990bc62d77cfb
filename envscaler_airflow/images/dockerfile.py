"""A layered, cache-friendly, non-root Dockerfile. Pure.

Layers are ordered by how often they change: base, system packages, user, Python, requirements, the agent, the
stage's code, then instructions without a layer (variables, labels, command). No layer contains a secret:
credentials are build secrets, which are mounted for one command and not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from envscaler_airflow.envspec import spec_hash
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.images.artefacts import (
    Artefact,
    comment,
    dockerfile_value,
    json_words,
)
from envscaler_airflow.images.bases import BaseFacts, facts, fetching_packages
from envscaler_airflow.images.requirement_files import FOLDER, MAIN, Requirements
from envscaler_airflow.images.venv import install_command, python_version, render_conda

UID = 10001
"""User that the stage runs as. Chosen: above the ids that distributions assign, so that no base uses it."""
UV_IMAGE = "docker.io/astral/uv:0.13.9"
"""Image of the installer if the base does not have this Python; ``--build-arg UV_IMAGE`` replaces it."""
MICROMAMBA_IMAGE = "docker.io/mambaorg/micromamba:2.0.5"
"""The same for conda's packages; ``--build-arg MICROMAMBA_IMAGE`` replaces it."""
CREDENTIALS = "index-credentials"
"""Build secret with a netrc file for private indexes."""
CA = "ca-file"
"""Build secret with the certificates to trust, such as those of your own proxy."""
APP = "/app"
"""Folder of the stage's code in the image."""
AGENT = "/opt/envscaler"
"""Folder of the agent in the image, on PYTHONPATH."""

_APT_CACHE = (
    "--mount=type=cache,target=/var/cache/apt,sharing=locked "
    "--mount=type=cache,target=/var/lib/apt/lists,sharing=locked"
)
_DNF_CACHE = "--mount=type=cache,target=/var/cache/dnf,sharing=locked"
_APK_CACHE = "--mount=type=cache,target=/etc/apk/cache,sharing=locked"
_PIP_CACHE = "--mount=type=cache,target=/root/.cache"

DOCKERIGNORE = """\
.git
.hg
.svn
**/.git
**/.venv
**/__pycache__
**/.mypy_cache
**/.pytest_cache
**/.ruff_cache
**/.ipynb_checkpoints
**/node_modules
**/.env
**/.env.*
**/.netrc
**/.aws
**/.ssh
**/*.pem
**/*.key
**/id_rsa*
"""


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What rendering needs in addition to the spec.

    Attributes:
        base: Image to build from if it is known more exactly than in the spec, such as by its digest.
        has_ca: True when the build secret ``ca-file`` provides certificates to trust.
        has_agent: True when the context contains the agent below ``envscaler/``.
        has_workdir: True when the context contains the code below ``work/``.
    """

    base: str | None = None
    has_ca: bool = False
    has_agent: bool = False
    has_workdir: bool = False


def render_dockerfile(
    spec: EnvSpec, requirements: Requirements, options: ImageOptions | None = None
) -> list[Artefact]:
    """Render ``Dockerfile``, ``.dockerignore`` and the files that the Dockerfile copies."""
    options = options or ImageOptions()
    known = facts(spec.base)
    python = _Python.of(spec, requirements, known)
    parts = [
        comment(
            [
                f"Environment of {spec.name}, rendered by envscaler from its spec.",
                *_notes(spec, known, options),
            ]
        ),
        python.stages(),
        (comment([known.image]) if options.base else "") + f"FROM {options.base or known.image}\n",
        _system_packages(_packages(spec, known, requirements), known, has_ca=options.has_ca),
        _user(),
        python.install(spec, requirements, has_ca=options.has_ca),
        f"COPY envscaler/ {AGENT}/\n" if options.has_agent else "",
        f"WORKDIR {APP}\n",
        f"COPY --chown={UID}:{UID} work/ {APP}/\n" if options.has_workdir else "",
        _variables(spec, python, has_agent=options.has_agent),
        _labels(spec),
        f"USER {UID}:{UID}\n",
        _command(spec),
    ]
    return [
        Artefact("Dockerfile", "\n".join(part for part in parts if part)),
        Artefact(".dockerignore", DOCKERIGNORE),
        *python.files(spec, requirements),
    ]


def _notes(spec: EnvSpec, known: BaseFacts, options: ImageOptions) -> list[str]:
    notes = []
    if options.has_workdir and not options.has_agent:
        notes.append(f"work/ is {spec.workdir} beside the spec: copy it here, as `envscaler build` does")
    if not known.is_known:
        notes.append("The base's package manager is a guess: base.distro says which")
    for item in spec.env:
        if item.value_from is not None:
            notes.append(f"{item.name} is taken from {item.value_from} when the container starts")
        elif "\n" in (item.value or ""):
            notes.append(f"{item.name} has several lines and is set when the container starts")
    return notes


def _run(mounts: str, command: str, *, has_ca: bool = False, has_credentials: bool = False) -> str:
    exports = []
    if has_ca:
        path = f"/run/secrets/{CA}"
        mounts = f"{mounts} --mount=type=secret,id={CA},target={path}".strip()
        names = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "MAMBA_SSL_VERIFY")
        exports.append(f"export {' '.join(f'{name}={path}' for name in names)}; ")
    if has_credentials:
        path = "/run/secrets/netrc"
        mounts = f"{mounts} --mount=type=secret,id={CREDENTIALS},target={path},required=true".strip()
        exports.append(f"export NETRC={path}; ")
    head = f"RUN {mounts} \\\n    " if mounts else "RUN "
    return f"{head}{''.join(exports)}{command}\n"


def _packages(spec: EnvSpec, known: BaseFacts, requirements: Requirements) -> tuple[str, ...]:
    """System packages of the spec, and those needed to fetch requirements that the base may not have."""
    written = {text.partition("=")[0] for text in spec.system_packages}
    added = [name for name in fetching_packages(requirements.programs, known) if name not in written]
    return (*spec.system_packages, *added)


def _system_packages(packages: tuple[str, ...], known: BaseFacts, *, has_ca: bool) -> str:
    if not packages:
        return ""
    command = install_command(known.family, packages)
    if known.family == "apt":
        # Debian's images delete downloads; the cache is a mount, which is in no layer.
        ca = f" -o Acquire::https::CaInfo=/run/secrets/{CA}" if has_ca else ""
        command = command.replace("apt-get install", f"apt-get{ca} install", 1)
        steps = [
            "rm -f /etc/apt/apt.conf.d/docker-clean",
            f"apt-get{ca} update --quiet",
            f"DEBIAN_FRONTEND=noninteractive {command}",
        ]
        return _run(_APT_CACHE, " && \\\n    ".join(steps), has_ca=has_ca)
    if known.family == "dnf" and has_ca:  # dnf's libcurl ignores CA variables
        command = command.replace("dnf install", f"dnf install --setopt=sslcacert=/run/secrets/{CA}", 1)
    return _run(_DNF_CACHE if known.family == "dnf" else _APK_CACHE, command, has_ca=has_ca)


def _user() -> str:
    """Create the user without useradd, which small bases do not have."""
    home = "/home/envscaler"
    return (
        f"RUN echo 'envscaler:x:{UID}:{UID}::{home}:/bin/sh' >> /etc/passwd && \\\n"
        f"    echo 'envscaler:x:{UID}:' >> /etc/group && \\\n"
        f"    mkdir -p {home} {APP} && chown {UID}:{UID} {home} {APP}\n"
    )


@dataclass(frozen=True, slots=True)
class _Python:
    """Source of Python and its packages: ``base`` (the base's own), ``uv``, ``conda`` or ``none``."""

    kind: str
    version: str

    @classmethod
    def of(cls, spec: EnvSpec, requirements: Requirements, known: BaseFacts) -> _Python:
        runtime = requirements.runtime
        version = python_version(spec)
        if runtime is None:
            return cls("none", version)
        if runtime.package_manager == "conda":
            return cls("conda", version)
        return cls("base" if known.has_python(runtime.version) else "uv", version)

    def stages(self) -> str:
        if self.kind == "uv":
            return f"ARG UV_IMAGE={UV_IMAGE}\nFROM ${{UV_IMAGE}} AS uv\n"
        if self.kind == "conda":
            return f"ARG MICROMAMBA_IMAGE={MICROMAMBA_IMAGE}\nFROM ${{MICROMAMBA_IMAGE}} AS micromamba\n"
        return ""

    def files(self, spec: EnvSpec, requirements: Requirements) -> list[Artefact]:
        return render_conda(spec, requirements) if self.kind == "conda" else requirements.artefacts()

    def install(self, spec: EnvSpec, requirements: Requirements, *, has_ca: bool) -> str:
        if self.kind == "none":
            return ""
        has_credentials = requirements.runtime is not None and requirements.runtime.credentials is not None
        flags = {"has_ca": has_ca, "has_credentials": has_credentials}
        if self.kind == "conda":
            files = [item.name for item in self.files(spec, requirements) if "/" not in item.name]
            command = "micromamba create --yes --prefix /opt/venv --file /opt/build/environment.yml"
            return (
                "COPY --from=micromamba /bin/micromamba /usr/local/bin/micromamba\n"
                + _copies(files, requirements)
                + _run("--mount=type=cache,target=/root/.mamba/pkgs", command, **flags)
            )
        text = ""
        if self.kind == "uv":
            text = (
                "COPY --from=uv /uv /usr/local/bin/uv\n"
                "ENV UV_PYTHON_INSTALL_DIR=/opt/python UV_LINK_MODE=copy\n"
            ) + _run(_PIP_CACHE, f"uv venv --python {self.version} /opt/venv", has_ca=has_ca)
        if requirements.is_empty:
            return text
        # A lock contains neither the base's packages nor their hashes; it is complete without them.
        no_deps = " --no-deps" if self.kind == "base" else ""
        hashes = f" --require-hashes{no_deps}" if requirements.locked is not None else ""
        install = (
            f"uv pip install --python /opt/venv/bin/python{hashes}"
            if self.kind == "uv"
            else f"python3 -m pip install{hashes}"
        )
        command = f"{install} --requirement /opt/build/{MAIN}"
        return text + _copies([MAIN], requirements) + _run(_PIP_CACHE, command, **flags)


def _copies(names: list[str], requirements: Requirements) -> str:
    text = f"COPY {' '.join(names)} /opt/build/\n"
    if requirements.files and requirements.locked is None:
        text += f"COPY {FOLDER}/ /opt/build/{FOLDER}/\n"
    return text


def _variables(spec: EnvSpec, python: _Python, *, has_agent: bool) -> str:
    values = {
        item.name: item.value
        for item in spec.env
        if item.value is not None and "\n" not in item.value and "\r" not in item.value
    }
    if has_agent:
        written = values.get("PYTHONPATH")
        values["PYTHONPATH"] = f"{written}:{AGENT}" if written else AGENT
    text = "".join(f"ENV {name}={dockerfile_value(value)}\n" for name, value in values.items())
    if python.kind in ("uv", "conda"):
        return 'ENV PATH="/opt/venv/bin:${PATH}" VIRTUAL_ENV=/opt/venv\n' + text
    return text


def _labels(spec: EnvSpec) -> str:
    title = dockerfile_value(" ".join(spec.name.split()))
    text = f"LABEL org.opencontainers.image.title={title}\n"
    if spec.description:
        description = dockerfile_value(" ".join(spec.description.split()))
        text += f"LABEL org.opencontainers.image.description={description}\n"
    return f"{text}LABEL io.envscaler.spec-hash={spec_hash(spec)}\n"


def _command(spec: EnvSpec) -> str:
    """The exec form instead of the base's entrypoint; CMD is emptied, so no default arguments follow."""
    if not spec.entrypoint:
        return ""
    return f"ENTRYPOINT {json_words(spec.entrypoint)}\nCMD []\n"
