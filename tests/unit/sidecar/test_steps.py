"""The step of a save, by its name and by its content."""

import os

import joblib
import numpy as np
import pytest
from fakes.checkpoint_files import put

from envscaler_agent.protocol import Progress
from envscaler_airflow.sidecar import completeness, saver_layouts
from envscaler_airflow.sidecar.completeness import Settling


def selected(folder, *, reported=None):
    """Return what counts of *folder*, first seen when the training had reported *step*."""
    moments = iter((0.0, 0.0, 9.0))
    settling = Settling(lambda: next(moments))
    settling.look(saver_layouts.look(folder), Progress(step=reported))
    settling.look(saver_layouts.look(folder), Progress(step=reported))
    return settling.select()


def step(folder, *, reported):
    """Return its step."""
    return selected(folder, reported=reported).step


@pytest.mark.parametrize(
    ("name", "reported", "expected"),
    [
        ("checkpoints/checkpoint_8/scheduler.bin", 47, None),  # Accelerate's automatic naming counts saves
        ("checkpoints/checkpoint_45/scheduler.bin", 47, 45),
        ("checkpoints/checkpoint_8/scheduler.bin", None, 8),
        ("checkpoint_000008/model.pt", 47, None),
        ("checkpoint_000150/model.pt", 100, 150),  # it reports each hundredth step
        ("save_8/.metadata", 47, None),
        ("model-0045.pkl", 47, 45),
        ("model-0045.h5", 47, 45),
        ("model-0008.pkl", 47, None),
        ("model-20261130.pkl", 47, None),
        ("checkpoint-8.pth.tar", 47, None),  # timm's, of epoch 8
        ("epoch-45/model.pt", 47, None),
    ],
)
def test_a_number_may_count_saves_where_the_name_does_not_call_it_a_step(tmp_path, name, reported, expected):
    """A folder's number is not a step if a later step was reported; a file's is one only near that (C)."""
    put(tmp_path, {name: b"x"})

    assert step(tmp_path, reported=reported) == expected


@pytest.mark.parametrize("name", ["checkpoint-8/scheduler.bin", "step_8/model.pt", "iter_0000008/.metadata"])
def test_a_name_that_says_step_is_right_whatever_is_reported(tmp_path, name):
    """``checkpoint-N`` means step N for Trainer and diffusers (C4)."""
    put(tmp_path, {name: b"x"})

    assert step(tmp_path, reported=47) == 8


def test_what_a_save_keeps_is_nearer_than_its_name(tmp_path):
    """The eighth save of Accelerate's automatic naming, in the file that the script registered (C)."""
    put(
        tmp_path, {"checkpoint_8/scheduler.bin": b"x", "checkpoint_8/custom_checkpoint_0.pkl": b'{"step":45}'}
    )

    assert step(tmp_path, reported=47) == 45


def test_of_two_saves_of_one_moment_the_numbered_one_tells_the_step(tmp_path):
    """A copy of the newest save has the same time (C4)."""
    put(tmp_path, {"best.pt": b"x", "checkpoint_45/scheduler.bin": b"x"})
    for path in ("best.pt", "checkpoint_45/scheduler.bin"):
        os.utime(tmp_path / path, (1_700_000_000,) * 2)

    assert step(tmp_path, reported=47) == 45


def test_the_newest_of_distributed_checkpoints_counts_whatever_their_names_call_the_number(tmp_path):
    """The snapshot contains only ``save_9`` (C)."""
    put(tmp_path, {"save_8/.metadata": b"x", "save_9/.metadata": b"x"})

    assert [item.path for item in selected(tmp_path).files] == ["save_9/.metadata"]


def test_a_joblib_dump_tells_its_step(tmp_path):
    """Raw arrays are between its opcodes, so that it cannot be read to its end (C4)."""
    joblib.dump({"epoch": 3, "weights": np.arange(6.0)}, tmp_path / "model.joblib")

    assert completeness.steps_in(saver_layouts.look(tmp_path).files[0]) == {3}
