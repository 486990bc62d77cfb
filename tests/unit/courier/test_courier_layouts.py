"""What of a checkpoint folder is copied, by the layout that its code writes, and only when it is whole."""

import os
import shutil
import struct

import pytest
from fakes.checkpoint_files import STATE, ZIP, put, safetensors

from envscaler_airflow.courier import layouts
from envscaler_airflow.courier.layouts import select
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.store.root import Root


def chosen(folder):
    """Paths and step of what would be copied; None when nothing is complete."""
    selection = select(folder)
    return selection and ([item.path for item in selection.files], selection.step)


def test_an_unknown_layout_is_copied_as_a_whole(tmp_path):
    """Two files, no step."""
    put(tmp_path, {"model.pt": b"1", "sub/optimizer.pt": b"2", "model.pt.tmp": b"half"})

    assert chosen(tmp_path) == (["model.pt", "sub/optimizer.pt"], None)


def test_nothing_there_is_nothing_to_copy(tmp_path):
    """Neither an empty folder nor none."""
    assert chosen(tmp_path) is None
    assert chosen(tmp_path / "none") is None


def test_hugging_face_takes_the_newest_complete_one_and_the_best(tmp_path):
    """checkpoint-12 has no trainer_state.json yet; 10 names 5 as the best; 8 and the logs stay away."""
    put(
        tmp_path,
        {
            "checkpoint-5/trainer_state.json": STATE,
            "checkpoint-8/trainer_state.json": STATE,
            "checkpoint-10/model.safetensors": b"w",
            "checkpoint-10/trainer_state.json": STATE,
            "checkpoint-12/model.safetensors": b"w",
            "runs/events": b"log",
        },
    )

    expected = [
        "checkpoint-10/model.safetensors",
        "checkpoint-10/trainer_state.json",
        "checkpoint-5/trainer_state.json",
    ]
    assert chosen(tmp_path) == (expected, 10)


@pytest.mark.parametrize("state", [b"", b'{"global_st', b"[]", b"{}"])
def test_hugging_face_with_a_torn_mark_is_not_complete(tmp_path, state):
    """The writer was killed while it wrote trainer_state.json: the one before counts."""
    put(tmp_path, {"checkpoint-5/trainer_state.json": STATE, "checkpoint-10/trainer_state.json": state})

    assert chosen(tmp_path) == (["checkpoint-5/trainer_state.json"], 5)


def test_hugging_face_without_any_mark_is_nothing(tmp_path):
    """Known layouts count only with their mark, however quiet they are."""
    put(tmp_path, {"checkpoint-5/model.bin": b"x"})

    assert chosen(tmp_path) is None


def test_lightning_takes_the_newest_whole_one_and_the_last(tmp_path):
    """The zip of step 30 has no end yet."""
    put(
        tmp_path,
        {
            "v0/epoch=0-step=10.ckpt": ZIP,
            "v0/epoch=1-step=20.ckpt": ZIP,
            "v0/epoch=2-step=30.ckpt": ZIP[:-10],
            "v0/last.ckpt": ZIP,
            "v0/hparams.yaml": b"x",
        },
    )

    assert chosen(tmp_path) == (["v0/epoch=1-step=20.ckpt", "v0/last.ckpt"], 20)


def test_distributed_takes_the_newest_with_its_metadata(tmp_path):
    """step_30 has shards alone; the loose ``latest`` comes along."""
    put(
        tmp_path,
        {
            "step_20/__0_0.distcp": b"a",
            "step_20/.metadata": b"m",
            "step_30/__0_0.distcp": b"b",
            "latest": b"step_20",
        },
    )

    assert chosen(tmp_path) == (["latest", "step_20/.metadata", "step_20/__0_0.distcp"], 20)


def test_distributed_written_in_place_waits_for_its_metadata(tmp_path):
    """A shard younger than .metadata belongs to the save that is going on."""
    put(tmp_path, {".metadata": b"m", "__0_0.distcp": b"new"})
    assert chosen(tmp_path) is None

    put(tmp_path, {"__0_0.distcp": b"new", "__1_0.distcp": b"new", ".metadata": b"m"})
    assert chosen(tmp_path) == ([".metadata", "__0_0.distcp", "__1_0.distcp"], None)


def test_deepspeed_takes_what_latest_names_with_every_rank_s_file(tmp_path):
    """Files of two ranks as DeepSpeed 0.19.8 writes them; step 4 is being saved and has no mark yet."""
    put(
        tmp_path,
        {
            "run/global_step2/mp_rank_00_model_states.pt": ZIP,
            "run/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": ZIP,
            "run/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt": ZIP,
            "run/zero_to_fp32.py": b"x",
            "run/latest": b"global_step2\n",
            "run/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt": ZIP,
        },
    )

    assert chosen(tmp_path) == (
        [
            "run/latest",
            "run/zero_to_fp32.py",
            "run/global_step2/mp_rank_00_model_states.pt",
            "run/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "run/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ],
        2,
    )


@pytest.mark.parametrize("mark", [None, b"", b"global_step9", b"../elsewhere", b"\xff", b"x" * 5000])
def test_deepspeed_without_a_mark_that_names_a_folder_is_nothing(tmp_path, mark):
    """Absent, empty, of a folder that is not there, or not a name at all."""
    put(tmp_path, {"global_step2/mp_rank_00_model_states.pt": ZIP})
    if mark is not None:
        put(tmp_path, {"latest": mark})

    assert chosen(tmp_path) is None


def test_deepspeed_saved_again_under_one_name_waits_for_its_mark(tmp_path):
    """A file younger than ``latest`` belongs to the save that is going on."""
    put(tmp_path, {"latest": b"best", "best/mp_rank_00_model_states.pt": ZIP})
    assert chosen(tmp_path) is None

    put(tmp_path, {"best/mp_rank_00_model_states.pt": ZIP, "latest": b"best"})
    assert chosen(tmp_path) == (["latest", "best/mp_rank_00_model_states.pt"], None)


def test_deepspeed_files_as_old_as_their_mark_are_whole(tmp_path):
    """Clocks of file systems are coarse: a small model and its mark have one time."""
    put(tmp_path, {"latest": b"best", "best/mp_rank_00_model_states.pt": ZIP})
    for name in ("latest", "best/mp_rank_00_model_states.pt"):
        os.utime(tmp_path / name, (1_700_000_000,) * 2)

    assert chosen(tmp_path) == (["latest", "best/mp_rank_00_model_states.pt"], None)


def test_deepspeed_s_mark_names_a_folder_beside_it(tmp_path):
    """One further down is none that DeepSpeed writes, though it is there."""
    name = "mp_rank_00_model_states.pt"
    put(tmp_path, {f"run/best/{name}": ZIP, f"run/old/step9/{name}": ZIP, "run/latest": b"old/step9"})

    assert chosen(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.pt", ZIP, None),
        ("a.pt", ZIP[: len(ZIP) // 2], "zip without its end"),
        ("a.npz", ZIP[:-1], "zip without its end"),
        ("a.bin", b"anything", None),
        ("a.safetensors", safetensors(64), None),
        ("a.safetensors", safetensors(64)[:-1], "its header says"),
        ("a.safetensors", safetensors(64, claimed=128), "its header says"),
        ("a.safetensors", safetensors(64)[:40], "shorter than its header"),
        ("a.safetensors", b"123", "shorter than its header"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "its header is torn"),
    ],
)
def test_files_that_say_where_they_end_must_be_whole(tmp_path, name, data, why):
    """A writer that was killed or is slow leaves such a file short."""
    put(tmp_path, {name: data})

    found = layouts.torn(select(tmp_path).files[0])

    assert (found is None) if why is None else (why in found)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"22"),
        lambda path: os.utime(path, (1, 1)),
        lambda path: path.rename(path.with_name("other")),
        lambda path: path.with_name("more").write_bytes(b""),
        lambda path: (shutil.copy2(path, path.with_name("x")), path.with_name("x").replace(path)),
    ],
    ids=["size", "mtime", "name", "new file", "inode"],
)
def test_any_change_makes_another_fingerprint(tmp_path, change):
    """Name, size, modification time and inode."""
    put(tmp_path, {"a": b"1"})
    before = select(tmp_path).fingerprint

    change(tmp_path / "a")

    assert select(tmp_path).fingerprint != before


def test_a_copy_of_a_tree_that_changes_meanwhile_does_not_count(tmp_path):
    """A slow writer appends between two files."""
    put(tmp_path / "ck", {"a": b"1", "b": b"2"})
    (tmp_path / "copy").mkdir()

    def append():
        with (tmp_path / "ck/a").open("ab") as file:
            file.write(b"+")

    with pytest.raises(CheckpointError, match="changed while it was copied"):
        layouts.copy(tmp_path / "ck", select(tmp_path / "ck"), Root.of(tmp_path / "copy"), between=append)
