"""Run by the interpreter that has the frameworks: ``make test-frameworks``."""

from __future__ import annotations

import pytest
import torch
from fakes.session_rig import LAUNCHER, Rig
from torch.distributed.checkpoint.api import CheckpointException

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Warnings of frameworks about each other are ignored; warnings about our modules are errors."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("error:::envscaler_airflow"))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Remove the variables of launchers and stages."""
    for name in (*LAUNCHER, "ENVSCALER_GLOBAL_BATCH", "ENVSCALER_MICRO_BATCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rig(tmp_path):
    """A spool folder and a clock set by hand."""
    return Rig(tmp_path / "spool")


@pytest.fixture
def rig_every(tmp_path):
    """The same with checkpoints every so many steps."""
    return lambda steps: Rig(tmp_path / "spool", every={"steps": steps})


@pytest.fixture(params=["file", "shard"])
def full_disk(request):
    """The error of a save on a full disk: of a file, or of the shards of a distributed checkpoint."""
    error = OSError(28, "No space left on device")
    return error if request.param == "file" else CheckpointException("save", {0: (error, None)})
