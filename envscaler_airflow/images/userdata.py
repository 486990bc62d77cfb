"""cloud-init user-data of a stage on a virtual machine. Pure.

With a base image, the machine pulls the stage's image and runs a container. With only a distribution as base,
the stage runs on the machine itself: packages, a virtual environment, the command.
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Iterable
from typing import Any

from envscaler_airflow.envspec.gpus import vendor_of
from envscaler_airflow.envspec.models import EnvSpec, Volume
from envscaler_airflow.errors import SpecError, refuse
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.venv import render_venv
from envscaler_airflow.launch import (
    NODE_RANK,
    PORT,
    RENDEZVOUS_HOST,
    RENDEZVOUS_PORT,
    Launch,
    Paths,
    launch_of,
)

HOME = "/opt/envscaler/stage"
"""Folder of the stage's files on the machine."""
SECRETS = "/run/envscaler/secrets.env"
"""``NAME=value`` lines that the user puts there, because every process on the machine can read user-data."""
NODE_FILE = "/run/envscaler/node.env"
"""ENVSCALER_NODE and ENVSCALER_RENDEZVOUS, which are known only when the nodes start."""
MAX_BYTES = 16384
"""Largest user-data. Source: Amazon EC2, user data is limited to 16 KB in raw form."""
PACK_ABOVE = 2048
"""Files above this many bytes are compressed. Chosen: usual files stay readable."""


def render_vm(spec: EnvSpec, requirements: Requirements, image: str | None = None) -> list[Artefact]:
    """``user-data``: a ``#cloud-config`` document.

    Raises:
        SpecError: A machine cannot mount a volume, or the user-data is larger than a provider accepts.
    """
    _check_volumes(spec)
    launch = launch_of(spec, spec.num_nodes.min)
    image = image or launch.image
    is_container = image is not None
    if image is not None:
        files = {
            "env.list": _env_list(launch),
            "run.sh": _container_script(launch, image, spec.num_nodes.min),
        }
    else:
        files = {item.name: item.text for item in render_venv(spec, requirements)}
        files["run.sh"] = _machine_script(spec, launch)
    gpus = _nvidia_gpus(spec)
    if gpus:
        files = {"gpu.sh": gpu_script(is_container=is_container), **files}
    run, packages = ["sh", f"{HOME}/run.sh"], ["python3-venv", *spec.system_packages, *requirements.programs]
    document: dict[str, Any] = {
        "package_update": True,
        "packages": ["docker.io"] if is_container else packages,
        "write_files": [_file(name, text) for name, text in files.items()],
        "mounts": _mounts(launch.paths.volumes),
        "runcmd": [["mkdir", "-p", path] for path in _folders(launch.paths)]
        + ([] if is_container else [["sh", f"{HOME}/venv.sh"]])
        + [["sh", "-c", f"sh {HOME}/gpu.sh && exec {shlex.join(run)}"] if gpus else run],
    }
    notes = [f"{spec.name}, rendered by envscaler from its spec.", *_notes(spec)]
    body = yaml_text({key: value for key, value in document.items() if value})
    text = "#cloud-config\n" + comment(notes) + body
    if len(text.encode()) > MAX_BYTES:
        raise SpecError(
            f"user-data of {spec.name} has {len(text.encode())} bytes, {MAX_BYTES} are taken at most; "
            "build an image (base.image) instead of installing on the machine"
        )
    return [Artefact("user-data", text)]


def _check_volumes(spec: EnvSpec) -> None:
    faults = [
        f"volumes: {volume.name}: {volume.source} is a claim of Kubernetes, which a machine has not; "
        f"write targets: {{vm: {{volumes: [{{name: {volume.name}, source: nfs://host/path, ...}}]}}}}"
        for volume in spec.volumes
        if volume.kind == "pvc"
    ]
    refuse(faults)


def _file(name: str, text: str) -> dict[str, Any]:
    permissions = "0755" if name.endswith(".sh") else "0644"
    head = {"path": f"{HOME}/{name}", "permissions": permissions, "owner": "root:root"}
    if len(text) <= PACK_ABOVE and text.isascii():
        return {**head, "content": text}
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return {**head, "encoding": "gz+b64", "content": packed}


def _host_path(volume: Volume) -> str:
    """Path of a volume on the machine, from which a container mounts it."""
    return volume.location if volume.kind == "hostPath" else volume.mount_path


def _folders(paths: Paths) -> list[str]:
    return list(dict.fromkeys([*map(_host_path, paths.volumes), *paths.written]))


def _mounts(volumes: Iterable[Volume]) -> list[list[str]]:
    found = []
    for volume in volumes:
        if volume.kind == "nfs":
            server, _, path = volume.location.partition("/")
            options = "ro,_netdev" if volume.is_read_only else "rw,_netdev"
            found.append([f"{server}:/{path}", volume.mount_path, "nfs", options, "0", "0"])
    return found


_KNOWN = {
    RENDEZVOUS_HOST: '"$ENVSCALER_RENDEZVOUS"',
    RENDEZVOUS_PORT: str(PORT),
    NODE_RANK: '"$ENVSCALER_NODE"',
}
"""What only the nodes know, from the machine's own variables."""
_PLACEHOLDER = re.compile("|".join(rf"({re.escape(name)}(?![A-Za-z0-9_]))" for name in _KNOWN))


def _command(launch: Launch) -> str:
    """The command for a shell."""
    return " ".join(map(_word, launch.command)) or "true"


def _word(word: str) -> str:
    """Quote *word* except what a variable of the machine replaces."""
    parts = [part for part in _PLACEHOLDER.split(word) if part]
    return "".join(_KNOWN.get(part) or shlex.quote(part) for part in parts) or "''"


def _nvidia_gpus(spec: EnvSpec) -> int:
    """Number of GPUs that need NVIDIA's driver; drivers of other vendors come with the machine's image."""
    need = spec.resources.alternatives[0].requests.gpu
    if need is None:
        return 0
    vendors = {need.vendor} if need.vendor else set(map(vendor_of, need.type)) or {"nvidia"}
    return need.count if "nvidia" in vendors else 0


_GPU_HEAD = """\
#!/bin/sh
# Makes the machine's GPUs usable, unless its image has done so: the driver{more}.
set -eu
export DEBIAN_FRONTEND=noninteractive
if ! nvidia-smi >/dev/null 2>&1; then
  if command -v ubuntu-drivers >/dev/null 2>&1 || apt-get install --yes ubuntu-drivers-common; then
    ubuntu-drivers install --gpgpu
  else
    apt-get install --yes "linux-headers-$(uname -r)" nvidia-driver
  fi
  modprobe nvidia
  modprobe nvidia-uvm
  version="$(cut -d . -f 1 /sys/module/nvidia/version)"
  if ! command -v nvidia-smi >/dev/null 2>&1; then
    apt-get install --yes "nvidia-utils-$version-server" || apt-get install --yes "nvidia-utils-$version"
  fi
  if ls /dev/nvidia-nvswitch* >/dev/null 2>&1; then
    apt-get install --yes "nvidia-fabricmanager-$version"
    systemctl enable --now nvidia-fabricmanager
  fi
fi
if ! nvidia-smi; then
  echo "nvidia-smi does not answer: take an image with NVIDIA's driver" >&2
  exit 1
fi
"""
"""Sources: documentation.ubuntu.com/server/how-to/graphics/install-nvidia-drivers (``--gpgpu``, then utils),
docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide, wiki.debian.org/NvidiaGraphicsDrivers."""
_TOOLKIT = """\
if ! command -v nvidia-ctk >/dev/null 2>&1; then
  apt-get install --yes --no-install-recommends ca-certificates curl gnupg
  base=https://nvidia.github.io/libnvidia-container
  key=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
  list=/etc/apt/sources.list.d/nvidia-container-toolkit.list
  curl -fsSL "$base/gpgkey" | gpg --batch --yes --dearmor -o "$key"
  curl -fsSL "$base/stable/deb/nvidia-container-toolkit.list" \\
    | sed "s#deb https://#deb [signed-by=$key] https://#g" > "$list"
  apt-get update
  apt-get install --yes nvidia-container-toolkit
fi
nvidia-ctk runtime configure --runtime=docker
systemctl restart docker
"""
"""Source: docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html, with apt."""


def gpu_script(*, is_container: bool) -> str:
    """Script that installs the GPU driver and, for containers, Docker's GPU toolkit; stops on failure."""
    head = _GPU_HEAD.replace("{more}", " and Docker's way to them" if is_container else "")
    return head + (_TOOLKIT if is_container else "")


_HEAD = f"""\
#!/bin/sh
set -eu
cd {HOME}
set -a
if [ -f {SECRETS} ]; then . {SECRETS}; fi
if [ -f {NODE_FILE} ]; then . {NODE_FILE}; fi
"""


def _machine_script(spec: EnvSpec, launch: Launch) -> str:
    plain = {item.name for item in spec.env}  # env.sh sets these
    batch = "".join(f"{name}={value}\n" for name, value in launch.env.items() if name not in plain)
    return f"{_HEAD}. ./env.sh\n{batch}PATH={HOME}/.venv/bin:$PATH\nset +a\nexec {_command(launch)}\n"


def _container_script(launch: Launch, image: str, nodes: int) -> str:
    need, paths = launch.resources.alternatives[0], launch.paths
    several = {name: value for name, value in launch.env.items() if "\n" in value}
    options = ["--rm", "--network=host", "--env-file=env.list"]
    options += [f"--env={name}" for name in (*launch.secrets, *several)]
    options += [f"--gpus={need.requests.gpu.count}"] if need.requests.gpu is not None else []
    options += [f"--memory={need.limits.memory_bytes}"] if need.limits.memory_bytes is not None else []
    options += [f"--cpus={need.limits.cpu_cores:g}"] if need.limits.cpu_cores is not None else []
    options += [f"--shm-size={need.shm_bytes}"] if need.shm_bytes is not None else ["--ipc=host"]
    for volume in paths.volumes:
        mode = ":ro" if volume.is_read_only else ""
        options.append(f"--volume={_host_path(volume)}:{volume.mount_path}{mode}")
    options += [f"--volume={path}:{path}" for path in paths.written]
    if nodes > 1 or launch.max_nodes is not None:
        options += ["--env=ENVSCALER_NODE", "--env=ENVSCALER_RENDEZVOUS"]
    if not launch.command:
        command = shlex.join(["docker", "run", *options, image])
    else:
        inside = f"exec {_command(launch)}"
        command = shlex.join(["docker", "run", *options, "--entrypoint=sh", image, "-c", inside])
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in several.items())
    return f"{_HEAD}{lines}set +a\nexec {command}\n"


def _env_list(launch: Launch) -> str:
    return "".join(f"{name}={value}\n" for name, value in launch.env.items() if "\n" not in value)


def _notes(spec: EnvSpec) -> list[str]:
    notes = [
        f"{item.name} is taken from {item.value_from}: put it into {SECRETS}"
        for item in spec.env
        if item.value_from is not None
    ]
    notes += [
        f"{volume.mount_path}: `envscaler submit` copies {volume.source} in; this file alone leaves it empty"
        for volume in spec.volumes
        if volume.is_copied
    ]
    return notes
