"""User-data of machines with GPUs: the driver, and Docker's way to them."""

import shutil
import subprocess

import pytest
import yaml

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.userdata import gpu_script, render_vm

GPU = {"count": 2, "type": ["H100"]}


def user_data(gpu, image="python:3.11-slim"):
    """The document of a stage on a machine with *gpu*."""
    spec = EnvSpec.from_dict({
        "version": "v1", "name": "s", "entrypoint": ["python", "t.py"],
        "base": {"image": image} if image else None, "resources": {"requests": {"gpu": gpu}},
    })  # fmt: skip
    (found,) = render_vm(spec, Requirements())
    return yaml.safe_load(found.text)


@pytest.fixture
def machine(tmp_path):
    """Runs a script in which every program only prints that it was called."""
    bin_, log, etc = tmp_path / "bin", tmp_path / "log", tmp_path / "etc"
    bin_.mkdir()
    etc.mkdir()
    names = [
        "apt-get", "ubuntu-drivers", "modprobe", "systemctl", "curl", "gpg", "nvidia-ctk-later", "uname",
    ]  # fmt: skip

    def add(name, body=""):
        (bin_ / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{body}\n')
        (bin_ / name).chmod(0o755)

    for name in names:
        add(name)
    add("cut", "echo 570")
    add("apt-get", f'case "$*" in *container-toolkit*) mv {bin_}/nvidia-ctk-later {bin_}/nvidia-ctk;; esac')
    for name in ("sed", "ls", "mv"):
        (bin_ / name).symlink_to(shutil.which(name))

    def run(script):
        text = script.replace("/etc/apt", str(etc)).replace("/usr/share/keyrings", str(etc))
        text = text.replace("sources.list.d/", "")
        done = subprocess.run(
            ["/bin/sh"],
            input=text,
            env={"PATH": str(bin_)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, log.read_text().splitlines() if log.exists() else []

    run.add = add
    return run


def test_a_machine_with_gpus_makes_them_usable_before_it_runs():
    """And runs nothing after a failure (F12)."""
    data = user_data(GPU)

    files = {item["path"]: item for item in data["write_files"]}
    assert "nvidia-container-toolkit" in files["/opt/envscaler/stage/gpu.sh"]["content"]
    last = data["runcmd"][-1]
    assert last == ["sh", "-c", "sh /opt/envscaler/stage/gpu.sh && exec sh /opt/envscaler/stage/run.sh"]
    assert "--gpus=2" in files["/opt/envscaler/stage/run.sh"]["content"]


@pytest.mark.parametrize("gpu", [None, {"count": 8, "type": ["MI300X"]}, {"count": 1, "vendor": "intel"}])
def test_a_machine_without_nvidia_s_gpus_gets_no_driver_of_theirs(gpu):
    """CPUs alone, and AMD's GPUs, whose driver is the image's."""
    data = user_data(gpu)

    assert all("gpu.sh" not in item["path"] for item in data["write_files"])
    assert data["runcmd"][-1] == ["sh", "/opt/envscaler/stage/run.sh"]


def test_a_process_on_the_machine_needs_the_driver_alone():
    """No Docker, no toolkit (F12)."""
    files = {item["path"]: item["content"] for item in user_data(GPU, image=None)["write_files"]}

    assert "ubuntu-drivers install --gpgpu" in files["/opt/envscaler/stage/gpu.sh"]
    assert "nvidia-ctk" not in files["/opt/envscaler/stage/gpu.sh"]


def test_a_bare_machine_gets_driver_and_toolkit(machine):
    """In this order, with a restart of Docker at the end (F12)."""
    machine.add(
        "ubuntu-drivers", 'printf "#!/bin/sh\\n" > ${0%/*}/nvidia-smi; /bin/chmod 755 ${0%/*}/nvidia-smi'
    )

    code, calls = machine(gpu_script(is_container=True))

    assert code == 0
    assert calls[:3] == ["ubuntu-drivers install --gpgpu", "modprobe nvidia", "modprobe nvidia-uvm"]
    assert "apt-get install --yes nvidia-container-toolkit" in calls
    assert calls[-2:] == ["nvidia-ctk-later runtime configure --runtime=docker", "systemctl restart docker"]


def test_an_image_with_driver_and_toolkit_is_left_alone(machine):
    """A deep-learning image has both (F12)."""
    machine.add("nvidia-smi")
    machine.add("nvidia-ctk")

    code, calls = machine(gpu_script(is_container=True))

    assert code == 0
    assert not [call for call in calls if call.startswith(("apt-get", "ubuntu-drivers", "modprobe"))]


def test_a_driver_that_does_not_answer_ends_the_machine_s_script(machine):
    """Before anything runs on CPUs by mistake (F12)."""
    machine.add("nvidia-smi", "exit 9")

    code, calls = machine(gpu_script(is_container=True))

    assert code == 1
    assert not [call for call in calls if "docker" in call]
