"""What of a checkpoint folder is copied, by the layout of its files, and only when it is complete."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
from fakes.checkpoint_files import STATE, ZIP, hdf5, put, safetensors

from envscaler_agent.protocol import Progress
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.sidecar import completeness, saver_layouts, snapshots
from envscaler_airflow.sidecar.completeness import Settling, is_open_for_writing
from envscaler_airflow.store.root import Root


class Watcher:
    """Check a folder by a separate clock."""

    def __init__(self, folder):
        """Check for the first time at 0."""
        self.folder, self.now = folder, 0.0
        self.settling = Settling(lambda: self.now)

    def look(self, *, after=0.0, **progress):
        """Check again *after* seconds, when the training has reported *progress*."""
        self.now += after
        self.settling.look(saver_layouts.look(self.folder), Progress(**progress))
        return self


def zipped(**state):
    """Write a zip with a state in it."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("state.json", json.dumps(state))
    return raw.getvalue()


def select(folder):
    """Return what would be copied of a folder in which nothing changed for ten seconds."""
    return Watcher(folder).look().look(after=10).settling.select()


def chosen(folder):
    """Return paths and step of what would be copied; None when nothing is complete."""
    selection = select(folder)
    return None if selection.is_empty else ([item.path for item in selection.files], selection.step)


def test_an_unknown_layout_is_copied_as_a_whole(tmp_path):
    """Two files, no step."""
    put(tmp_path, {"model.pt": b"1", "sub/optimizer.pt": b"2", "model.pt.tmp": b"half"})

    assert chosen(tmp_path) == (["model.pt", "sub/optimizer.pt"], None)


def test_nothing_there_is_nothing_to_copy(tmp_path):
    """Neither an empty folder nor a missing one."""
    assert chosen(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        chosen(tmp_path / "none")


def test_hugging_face_takes_the_newest_complete_one_and_the_best(tmp_path):
    """checkpoint-12 has no trainer_state.json yet; 10 names 5 as the best; 8 and the logs are not copied."""
    put(
        tmp_path,
        {
            "checkpoint-5/trainer_state.json": STATE,
            "checkpoint-8/trainer_state.json": STATE,
            "checkpoint-10/model.safetensors": safetensors(1),
            "checkpoint-10/trainer_state.json": STATE,
            "checkpoint-12/model.safetensors": safetensors(1),
            "runs/events.out.tfevents.1.host": b"log",
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
    """The writer was killed while it wrote trainer_state.json: the previous checkpoint counts."""
    put(tmp_path, {"checkpoint-5/trainer_state.json": STATE, "checkpoint-10/trainer_state.json": state})

    assert chosen(tmp_path) == (["checkpoint-5/trainer_state.json"], 5)


@pytest.mark.parametrize("name", ["training_args.bin", "rng_state.pth", "rng_state_0.pth"])
def test_hugging_face_without_any_mark_is_nothing(tmp_path, name):
    """A Trainer's save counts only with its mark, however long it is quiet."""
    put(tmp_path, {"checkpoint-5/model.bin": b"x", f"checkpoint-5/{name}": b"x"})

    assert chosen(tmp_path) is None


ACCELERATE = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
DIFFUSERS = ("unet/config.json", "unet/diffusion_pytorch_model.safetensors", *ACCELERATE[1:])


def folder_of(name, files):
    """Write a folder with *files* as a saver would."""
    return {f"{name}/{file}": safetensors(1) if file.endswith("safetensors") else b"\x80." for file in files}


@pytest.mark.parametrize("files", [ACCELERATE, DIFFUSERS])
@pytest.mark.parametrize("name", ["checkpoint-{}", "checkpoints/checkpoint_{}"])
def test_accelerate_and_diffusers_take_the_newest_that_is_quiet(tmp_path, files, name):
    """Folders ``checkpoint-N`` without trainer_state.json; step 30 lacks files that the others have (C1)."""
    put(tmp_path, folder_of(name.format(10), files) | folder_of(name.format(20), files))
    put(tmp_path, folder_of(name.format(30), files[:-2]))

    got, step = chosen(tmp_path)

    assert (sorted(got), step) == (sorted(folder_of(name.format(20), files)), 20)
    assert select(tmp_path).left_out[name.format(30)].startswith("lacks ")


def test_accelerate_s_own_order_is_waited_for(tmp_path):
    """Between two of its files the new folder is not copied, and the previous one stays (C1)."""
    put(tmp_path, folder_of("checkpoint-10", ACCELERATE))
    watcher = Watcher(tmp_path).look().look(after=10)
    put(tmp_path, folder_of("checkpoint-20", ACCELERATE))

    assert watcher.look(after=1).settling.select().step == 10
    assert watcher.look(after=5).settling.select().step == 20


def test_a_folder_of_any_saver_is_waited_for_until_it_has_what_the_one_before_has(tmp_path):
    """``step_20`` has its weights but not yet its optimizer; it is quiet for long in between (C1)."""
    put(tmp_path, {"step_10/w.bin": b"1", "step_10/optimizer.bin": b"1", "step_20/w.bin": b"2"})

    assert chosen(tmp_path) == (["step_10/optimizer.bin", "step_10/w.bin"], 10)


def test_a_folder_that_is_renamed_into_place_and_its_temporary_one(tmp_path):
    """As orbax saves: ``4`` is complete, ``5`` is still being assembled (C)."""
    put(tmp_path, {"4/d/0": b"x", "4/_METADATA": b"{}", "5.orbax-checkpoint-tmp-17/d/0": b"x"})

    assert chosen(tmp_path) == (["4/_METADATA", "4/d/0"], 4)
    assert select(tmp_path).left_out == {"5.orbax-checkpoint-tmp-17/d/0": "a temporary name"}


def test_lightning_keeps_every_whole_one_and_the_last(tmp_path):
    """The zip of step 30 has no end yet; any other checkpoint may be the best (C3)."""
    put(
        tmp_path,
        {
            "v0/epoch=0-step=10.ckpt": ZIP,
            "v0/epoch=1-step=20.ckpt": ZIP,
            "v0/last.ckpt": ZIP,
            "v0/epoch=2-step=30.ckpt": ZIP[:-10],
            "v0/hparams.yaml": b"x",
        },
    )

    assert chosen(tmp_path)[0] == [
        "v0/epoch=0-step=10.ckpt",
        "v0/epoch=1-step=20.ckpt",
        "v0/hparams.yaml",
        "v0/last.ckpt",
    ]


def test_the_step_is_of_the_newest_content_and_not_in_the_best_one_s_name(tmp_path):
    """``last.ckpt`` of step 70 beside the best of step 20; the training has just reported 71 (C4)."""
    watcher = Watcher(tmp_path).look()
    put(tmp_path, {"epoch=1-step=20.ckpt": zipped(step=20), "last.ckpt": zipped(step=70)})

    selection = watcher.look(after=1, step=71).look(after=6, step=77).settling.select()

    assert (len(selection.files), selection.step, selection.progress.step) == (2, 70, 71)


@pytest.mark.parametrize(
    ("found", "reported", "expected"),
    [
        ({"step": 5}, 70, None),
        ({"global_step": 69, "epoch": 3}, 70, 69),
        ({"step": 70}, None, 70),
        ({}, 70, None),
    ],
)
def test_a_number_in_a_file_is_its_step_only_near_what_is_reported(tmp_path, found, reported, expected):
    """A step within the epoch is not the step of the training (C4)."""
    watcher = Watcher(tmp_path).look()
    put(tmp_path, {"last.json": json.dumps(found).encode()})

    assert watcher.look(after=1, step=reported).look(after=6).settling.select().step == expected


class Bomb:
    """An object whose code must never run."""

    def __reduce__(self):
        """Fail the test."""
        return (pytest.fail, ("the pickle was run",))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_tells_its_step_without_being_run(tmp_path, protocol):
    """As ``torch.save`` puts a dict into its zip, and as ``pickle.dump`` writes one (C4)."""
    data = pickle.dumps({"model": Bomb(), "global_step": 700, "epoch": 3, "lr": 5}, protocol=protocol)
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", data)
    put(tmp_path, {"a.pkl": data, "b.pt": raw.getvalue()})

    assert [completeness.steps_in(item) for item in saver_layouts.look(tmp_path).files] == [
        {700, 3},
        {700, 3},
    ]


def test_a_log_in_the_folder_holds_up_nothing(tmp_path):
    """Excluded by its name, or by a write before the save began; the message names it (C2)."""
    watcher = Watcher(tmp_path)
    for count in range(20):
        put(tmp_path, {"log.txt": b"x" * (count + 1), "history": b"x" * (count + 1)})
        if count == 8:
            put(tmp_path, {"ckpt.json": b"{}"})
        watcher.look(after=1)

    selection = watcher.settling.select()

    assert [item.path for item in selection.files] == ["ckpt.json"]
    assert selection.left_out == {
        "history": "written all the time",
        "log.txt": "changed less than 5 s ago",
    }
    assert selection.waits_for == ()


def test_a_file_of_the_same_save_is_waited_for(tmp_path):
    """The optimizer is still being written when the weights are quiet (C2)."""
    watcher = Watcher(tmp_path).look()
    put(tmp_path, {"w.bin": b"1"})
    for count in range(10):
        put(tmp_path, {"optimizer.bin": b"x" * (count + 1)})
        watcher.look(after=1)

    selection = watcher.settling.select()

    assert [item.path for item in selection.files] == ["w.bin"]
    assert selection.waits_for == ("optimizer.bin",)


def replace_with(folder, files):
    """Write each file under another name and rename it."""
    for path, data in files.items():
        (folder / f"{path}.tmp").write_bytes(data)
        (folder / f"{path}.tmp").replace(folder / path)


def test_what_is_renamed_into_place_every_two_seconds_counts_once_it_is_overdue(tmp_path):
    """Two backup files; neither is ever quiet (C21)."""
    watcher = Watcher(tmp_path)
    for count in range(6):
        replace_with(tmp_path, {"latest.weights.h5": b"x" * (count + 1), "meta.json": b"%d" % count})
        watcher.look(after=1).look(after=1)

    assert watcher.settling.select().is_empty
    selection = watcher.settling.select(hurry=True)

    assert [item.path for item in selection.files] == ["latest.weights.h5", "meta.json"]
    assert selection.waits_for == ()


def test_what_is_written_in_place_all_the_time_never_counts(tmp_path):
    """No moment is known at which it is complete (C21)."""
    watcher = Watcher(tmp_path)
    for count in range(20):
        put(tmp_path, {"state.bin": b"x" * (count + 1)})
        watcher.look(after=1)

    selection = watcher.settling.select(hurry=True)

    assert selection.is_empty
    assert selection.left_out == {"state.bin": "changed less than 5 s ago"}


@pytest.mark.parametrize(
    "says", ["model_20.bin", 'model_checkpoint_path: "model_20"', '{"last": "model_20.bin"}']
)
def test_what_a_text_that_was_written_later_names_is_whole(tmp_path, says):
    """As detectron2 and TensorFlow save: they write the pointer last (C)."""
    put(tmp_path, {"model_10.bin": b"1"})
    watcher = Watcher(tmp_path).look().look(after=10)
    put(tmp_path, {"model_20.bin": b"2", "last_checkpoint": says.encode()})

    selection = watcher.look(after=1).look(after=1).settling.select(hurry=True)

    assert [item.path for item in selection.files] == ["last_checkpoint", "model_10.bin", "model_20.bin"]


def test_files_of_one_number_belong_together(tmp_path):
    """The newest set lacks its optimizer; the previous set is copied, and nothing waits (C)."""
    put(tmp_path, {"w_10.bin": b"1", "opt_10.bin": b"1"})
    watcher = Watcher(tmp_path).look().look(after=10)
    put(tmp_path, {"w_20.bin": b"2"})

    selection = watcher.look(after=1).look(after=6).settling.select()

    assert [item.path for item in selection.files] == ["opt_10.bin", "w_10.bin"]
    assert selection.left_out == {"w_20.bin": "lacks opt_#.bin, which the one before has"}
    assert selection.waits_for == ()


def test_a_file_that_is_open_for_writing_is_seen(tmp_path):
    """The system refuses a lease on it (C2)."""
    path = tmp_path / "a"
    with path.open("wb"), path.open("rb") as reading:
        assert is_open_for_writing(reading.fileno()) in (True, None)
    with path.open("rb") as reading:
        assert is_open_for_writing(reading.fileno()) in (False, None)


# -- links


def test_links_stay_links_and_what_leads_outside_is_left_out(tmp_path):
    """``latest`` by a relative and by an absolute name, and a link to the machine's own files (C)."""
    folder = tmp_path / "ck"
    put(folder, {"step_10/w.bin": b"1", "step_20/w.bin": b"2"})
    (folder / "latest").symlink_to("step_20")
    (folder / "best").symlink_to(folder / "step_10")
    (folder / "passwd").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("../..")

    selection = select(folder)

    assert dict(selection.links) == {"latest": "step_20", "best": "step_10"}
    assert [item.path for item in selection.files] == ["step_10/w.bin", "step_20/w.bin"]
    assert selection.left_out == {
        "passwd": "a link that leads outside",
        "up": "a link that leads outside",
    }


def test_what_a_link_names_is_kept_whatever_its_number(tmp_path):
    """``best`` points to the first of three Accelerate folders (C)."""
    put(
        tmp_path,
        {path: data for n in (10, 20, 30) for path, data in folder_of(f"checkpoint-{n}", ACCELERATE).items()},
    )
    (tmp_path / "best").symlink_to("checkpoint-10")

    selection = select(tmp_path)

    assert {item.path.split("/")[0] for item in selection.files} == {"checkpoint-10", "checkpoint-30"}
    assert dict(selection.links) == {"best": "checkpoint-10"}


def test_a_link_to_a_folder_that_is_being_written_is_waited_for(tmp_path):
    """The training moved the link first (C)."""
    watcher = Watcher(tmp_path)
    put(tmp_path, {"step_10/w.bin": b"1"})
    (tmp_path / "latest").symlink_to("step_10")
    watcher.look().look(after=10)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_20")
    put(tmp_path, {"step_20/w.bin": b"1"})

    assert watcher.look(after=1).settling.select().waits_for == ("step_20",)
    assert watcher.look(after=6).settling.select().waits_for == ()


def test_distributed_takes_the_newest_with_its_metadata(tmp_path):
    """step_30 has only shards; the loose ``latest`` is copied too."""
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
    """A shard younger than .metadata belongs to the save that is in progress."""
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
            "run/global_step2/mp_rank_00_model_states.pt",
            "run/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "run/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "run/latest",
            "run/zero_to_fp32.py",
        ],
        2,
    )


@pytest.mark.parametrize("mark", [None, b"", b"global_step9", b"../elsewhere", b"\xff", b"x" * 5000])
def test_deepspeed_without_a_mark_that_names_a_folder_is_nothing(tmp_path, mark):
    """Absent, empty, of a missing folder, or not a valid name."""
    put(tmp_path, {"global_step2/mp_rank_00_model_states.pt": ZIP})
    if mark is not None:
        put(tmp_path, {"latest": mark})

    assert chosen(tmp_path) is None


def test_deepspeed_saved_again_under_one_name_waits_for_its_mark(tmp_path):
    """A file younger than ``latest`` belongs to the save that is in progress."""
    put(tmp_path, {"latest": b"best", "best/mp_rank_00_model_states.pt": ZIP})
    assert chosen(tmp_path) is None

    put(tmp_path, {"best/mp_rank_00_model_states.pt": ZIP, "latest": b"best"})
    assert chosen(tmp_path) == (["best/mp_rank_00_model_states.pt", "latest"], None)


def test_deepspeed_files_as_old_as_their_mark_are_whole(tmp_path):
    """File system clocks are coarse: a small model and its mark have the same time."""
    put(tmp_path, {"latest": b"best", "best/mp_rank_00_model_states.pt": ZIP})
    for name in ("latest", "best/mp_rank_00_model_states.pt"):
        os.utime(tmp_path / name, (1_700_000_000,) * 2)

    assert chosen(tmp_path) == (["best/mp_rank_00_model_states.pt", "latest"], None)


def test_deepspeed_s_mark_names_a_folder_beside_it(tmp_path):
    """DeepSpeed never writes a deeper one, even if it exists."""
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
        ("a.h5", hdf5(64), None),
        ("a.h5", hdf5(64, claimed=100), "HDF5 without its end"),
        ("a.h5", hdf5(64)[:8] + b"\x09" + bytes(55), None),  # a future version
        ("a.safetensors", safetensors(64), None),
        ("a.safetensors", safetensors(64)[:-1], "its header says"),
        ("a.safetensors", safetensors(64, claimed=128), "its header says"),
        ("a.safetensors", safetensors(64)[:40], "shorter than its header"),
        ("a.safetensors", b"123", "shorter than its header"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "its header is torn"),
    ],
)
def test_files_that_say_where_they_end_must_be_whole(tmp_path, name, data, why):
    """A killed or slow writer leaves such a file short."""
    put(tmp_path, {name: data})

    _, found = completeness.first_look(saver_layouts.look(tmp_path).files[0])

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
        snapshots.copy(tmp_path / "ck", select(tmp_path / "ck"), Root.of(tmp_path / "copy"), between=append)


def test_a_file_that_became_a_link_is_not_read(tmp_path):
    """The training swaps in a link to a file of the machine after the check (C)."""
    put(tmp_path / "ck", {"a": b"1", "sub/b": b"2"})
    (tmp_path / "secret").write_bytes(b"2")
    selection = select(tmp_path / "ck")
    (tmp_path / "copy").mkdir()
    (tmp_path / "ck/sub/b").unlink()
    (tmp_path / "ck/sub/b").symlink_to(tmp_path / "secret")

    with pytest.raises(CheckpointError, match="changed while it was copied"):
        snapshots.copy(tmp_path / "ck", selection, Root.of(tmp_path / "copy"), between=lambda: None)


def test_a_copy_is_of_one_instant_whatever_replaces_the_files_meanwhile(tmp_path):
    """The training saves both files again, by a rename, while the first one is copied (C21)."""
    put(tmp_path / "ck", {"a": b"1", "b": b"1"})
    (tmp_path / "copy").mkdir()

    def save():
        replace_with(tmp_path / "ck", {"a": b"2", "b": b"2"})

    snapshots.copy(tmp_path / "ck", select(tmp_path / "ck"), Root.of(tmp_path / "copy"), between=save)

    assert [(tmp_path / "copy" / name).read_bytes() for name in "ab"] == [b"1", b"1"]


def test_a_hard_link_to_a_file_outside_is_left_out(tmp_path):
    """Two names within the tree are the training's own (C)."""
    put(tmp_path, {"ck/a": b"1", "ck/c": b"2", "secret": b"3"})
    (tmp_path / "ck/b").hardlink_to(tmp_path / "ck/a")
    (tmp_path / "ck/d").hardlink_to(tmp_path / "secret")

    selection = select(tmp_path / "ck")

    assert [item.path for item in selection.files] == ["a", "b", "c"]
    assert selection.left_out == {"d": "a hard link to a file outside"}


@pytest.mark.parametrize("most_open", [1, 256])
def test_a_copy_of_more_files_than_may_be_open_is_checked_afterwards(tmp_path, monkeypatch, most_open):
    """Of two files with one descriptor, a change in between is detected; with two it does no harm (C21)."""
    monkeypatch.setattr(snapshots, "MOST_OPEN", most_open)
    put(tmp_path / "ck", {"a": b"1", "b": b"1"})
    (tmp_path / "copy").mkdir()
    selection, calls = select(tmp_path / "ck"), []

    def save():
        calls.append(1)
        if len(calls) == 2:
            replace_with(tmp_path / "ck", {"a": b"2"})

    if most_open == 256:
        snapshots.copy(tmp_path / "ck", selection, Root.of(tmp_path / "copy"), between=save)
        return
    with pytest.raises(CheckpointError, match="changed while it was copied: a"):
        snapshots.copy(tmp_path / "ck", selection, Root.of(tmp_path / "copy"), between=save)
