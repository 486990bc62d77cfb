"""User-data of a machine: the folders that a stage writes into."""

import yaml

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.userdata import render_vm

SPEC = {
    "version": "v1",
    "name": "stage",
    "base": {"image": "registry.example.com/stage:1"},
    "entrypoint": ["python", "main.py"],
    "outputs": {"table": "/output/table.csv", "log": "/output/log.txt"},
    "checkpoint": {"path": "/work/checkpoints"},
}


def test_an_output_may_be_a_file():
    """Its folder is made and mounted, and so is the checkpoints'; the training writes the file."""
    (found,) = render_vm(EnvSpec.from_dict(SPEC), Requirements())
    body = yaml.safe_load(found.text)
    script = "".join(entry["content"] for entry in body["write_files"])

    made = [command[-1] for command in body["runcmd"] if command[0] == "mkdir"]
    assert made == ["/output", "/work"]
    assert "--volume=/output:/output --volume=/work:/work" in script
    assert "table.csv:" not in script
