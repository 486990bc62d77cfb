"""Folders with the name of a save, in paths that the training chose."""

import time

import pytest

from envscaler_airflow.sidecar import saver_layouts


@pytest.mark.parametrize("part", ["a/", "1x/", "step/", "checkpoint-x/"])
def test_a_path_of_a_thousand_folders_takes_no_time(part):
    """The training names its folders: 100 such paths took eight seconds, and take milliseconds."""
    began = time.process_time()

    found = {saver_layouts._outermost_save(part * 1023 + "model") for _ in range(100)}

    assert found == {None}
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("step_5/model", "step_5"),
        ("runs/Global-Step10/rank/model", "runs/Global-Step10"),
        ("runs/7/8/model", "runs/7"),
        ("runs/step_5", None),
        ("runs/step_x/model", None),
    ],
)
def test_the_outermost_folder_with_the_name_of_a_save_is_its_folder(path, folder):
    """A file with such a name is not."""
    assert saver_layouts._outermost_save(path) == folder
