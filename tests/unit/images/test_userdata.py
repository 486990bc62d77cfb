"""User-data of a machine: the folders that a stage writes into."""

import yaml

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.userdata import render_vm
from envscaler_airflow.launch import Paths

SPEC = {
    "version": "v1",
    "name": "stage",
    "base": {"image": "registry.example.com/stage:1"},
    "entrypoint": ["python", "main.py"],
    "outputs": {"table": "/output/table.csv", "log": "/output/log.txt"},
    "checkpoint": {"path": "/state/checkpoints"},
}


def test_an_output_may_be_a_file():
    """Its folder is made and mounted, and so is the checkpoints'; the training writes the file."""
    (found,) = render_vm(EnvSpec.from_dict(SPEC), Requirements())
    body = yaml.safe_load(found.text)
    script = "".join(entry["content"] for entry in body["write_files"])

    made = [command[-1] for command in body["runcmd"] if command[0] == "mkdir"]
    assert made == ["/output", "/state"]
    assert "--volume=/output:/output --volume=/state:/state" in script
    assert "table.csv:" not in script


def test_an_output_below_the_root_is_a_folder_of_its_own():
    """The root itself cannot be mounted; what a volume has needs no folder."""
    volume = {"name": "kept", "source": "s3://bucket/kept", "mount_path": "/kept"}
    outputs = {"model": "/model", "kept": "/kept", "part": "/kept/part"}
    spec = {key: SPEC[key] for key in ("version", "name", "base", "entrypoint")}

    paths = Paths.of(EnvSpec.from_dict({**spec, "outputs": outputs, "volumes": [volume]}))

    assert paths.written == ("/model",)
