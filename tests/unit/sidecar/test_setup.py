"""What setup lays out before the start, and what it reports when it fails."""

import dataclasses
from types import SimpleNamespace

import attempts
import pytest

from envscaler_airflow.errors import StoreError
from envscaler_airflow.sidecar.context import WorkInterruptedError
from envscaler_airflow.sidecar.setup import lay_out
from envscaler_airflow.store.archive import pack_workdir
from envscaler_airflow.store.outputs import put_output

SPEC = {
    "stall": {"factor": 20.0, "min": "5m"},
    "checkpoint": {"every": "100 steps", "keep": 2, "align": "epoch"},
    "distributed": {"global_batch": 256},
    "metrics": {"log_patterns": {"step": r"step (\d+)"}},
    "env": [{"name": "TOKEN", "value_from": "secret:a/b"}, {"name": "OMP_NUM_THREADS", "value": "4"}],
}


@pytest.fixture
def node(make_bench, tmp_path, store):
    """A node whose run is ready to start, with optional layout fields."""

    def make(**layout):
        bench = make_bench(layout=attempts.launch(SPEC).layout() | {"outputs": {}} | layout)
        bench.owner_asks()
        return bench

    return make


def ship(store, tmp_path, text="print(1)"):
    """Put a workdir archive into the store and return its name."""
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    archive = pack_workdir(folder, scratch=tmp_path)
    store.put_file(archive.name, archive.path)
    return archive.name


def mount(path, source):
    """Return one volume of a layout."""
    return [{"name": "data", "source": str(source), "path": str(path)}]


def test_a_fresh_start(node, store, tmp_path):
    """The code and the training's output folders exist, and the session knows the spec."""
    bench = node(
        workdir_archive=ship(store, tmp_path),
        work=str(tmp_path / "w"),
        checkpoint_path=str(tmp_path / "ck"),
        outputs={"m": str(tmp_path / "out/m")},
    )

    lay_out(bench.context)

    assert (tmp_path / "w/train.py").read_text() == "print(1)"
    assert (tmp_path / "ck").is_dir()
    assert (tmp_path / "out").is_dir()
    assert bench.start() == {
        "schema": "2.0",
        "cwd": str(tmp_path / "w"),
        "env": {},
        "restore": None,
        "session": {
            "generation": 1,
            "attempt": 2,
            "node": 0,
            "nodes": 1,
            "every": {"steps": 100.0},
            "align": "epoch",
            "global_batch": 256,
            "checkpoint_path": str(tmp_path / "ck"),
            "log_patterns": {"step": r"step (\d+)"},
            "stall_factor": 20.0,
            "stall_min_s": 300.0,
            "secret_env": ["TOKEN"],
        },
    }
    assert (bench.state.start_step, bench.state.restored_from) == (0, None)


def test_nothing_is_laid_out_under_a_running_training(node, store, tmp_path):
    """A sidecar that restarts after start.json exists leaves the workdir unchanged."""
    bench = node(work=str(tmp_path / "w"), workdir_archive=ship(store, tmp_path))
    lay_out(bench.context)
    (tmp_path / "w/train.py").write_text("edited by the training")
    before = bench.spool.start.read_bytes()

    lay_out(bench.restarted())

    assert (tmp_path / "w/train.py").read_text() == "edited by the training"
    assert bench.spool.start.read_bytes() == before


def test_a_sidecar_killed_during_the_set_up_lays_out_again(node, store, tmp_path):
    """Half-finished files are removed: the workdir contains the archive and nothing else."""
    bench = node(work=str(tmp_path / "w"), workdir_archive=ship(store, tmp_path))
    (tmp_path / "w").mkdir()
    (tmp_path / "w/train.py").write_text("half")
    (tmp_path / "w/other.py").write_text("of another spec")

    lay_out(bench.restarted())

    assert {path.name: path.read_text() for path in (tmp_path / "w").iterdir()} == {"train.py": "print(1)"}


def test_a_flipped_bit_in_the_archive_fails_the_set_up(node, store, tmp_path):
    """The sidecar checks the hash in its name; the training never sees the archive."""
    name = ship(store, tmp_path)
    path = tmp_path / "store/d/run" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    bench = node(work=str(tmp_path / "w"), workdir_archive=name)

    lay_out(bench.context)

    assert name in bench.start()["failed"]
    assert bench.state.failed.startswith("set-up failed: ")
    assert not list((tmp_path / "w").iterdir())


def test_the_code_is_that_of_the_launch_alone(node, store, tmp_path):
    """Archives of other specs of the run do not count, nor does one that is the only one (A2)."""
    first = ship(store, tmp_path)
    ship(store, tmp_path, "print(2)")
    named = node(work=str(tmp_path / "w"), workdir_archive=first)

    lay_out(named.context)
    assert (tmp_path / "w/train.py").read_text() == "print(1)"

    named.spool.start.unlink()
    lay_out(node(work=str(tmp_path / "none")).context)
    assert list((tmp_path / "none").iterdir()) == []


def test_an_output_of_another_stage_arrives_verified(node, store, tmp_path):
    """The volume's source is its URI; the sidecar checks every file against the manifest."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made/a.txt").write_text("A")
    uri = put_output(store, "data", tmp_path / "made", attempt=(1, 1), claim=1)
    bench = node(mounts=mount(tmp_path / "in", uri))

    lay_out(bench.context)

    assert (tmp_path / "in/a.txt").read_text() == "A"
    assert "failed" not in bench.start()


def test_a_torn_output_fails_the_set_up(node, store, tmp_path):
    """The message names the volume, the file and the error."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made/a.txt").write_text("A")
    uri = put_output(store, "data", tmp_path / "made", attempt=(1, 1), claim=1)
    (tmp_path / "store/d/run/outputs/g1-a1-c1/data/a.txt").write_text("B")

    bench = node(mounts=mount(tmp_path / "in", uri))
    lay_out(bench.context)

    assert bench.start()["failed"].startswith("volume data: ")
    assert "a.txt has another sha256" in bench.start()["failed"]


@pytest.mark.parametrize(
    ("path", "landed"),
    [("in", "in/pred.csv"), ("in/table.csv", "in/table.csv"), ("in/pred.csv", "in/pred.csv")],
)
@pytest.mark.parametrize("kind", ["output", "path", "file"])
def test_one_file_lands_inside_or_as_the_mounts_path(node, store, tmp_path, kind, path, landed):
    """A path with the same suffix is the file itself; otherwise the file is inside it."""
    (tmp_path / "pred.csv").write_text("1,2")
    source = {
        "output": lambda: put_output(store, "p", tmp_path / "pred.csv", attempt=(1, 1), claim=1),
        "path": lambda: tmp_path / "pred.csv",
        "file": lambda: f"file://{tmp_path}/pred.csv",
    }[kind]()

    bench = node(mounts=mount(tmp_path / path, source))
    lay_out(bench.context)

    assert (tmp_path / landed).read_text() == "1,2"


def test_a_local_folder_is_copied_and_a_host_path_is_linked(node, tmp_path):
    """A copy is safe to write to; ``hostPath:`` is the machine's own folder."""
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/sub/a").write_text("A")
    bench = node(
        mounts=[
            *mount(tmp_path / "copy", tmp_path / "data"),
            *mount(tmp_path / "link", f"hostPath:{tmp_path}/data"),
        ]
    )

    lay_out(bench.context)

    (tmp_path / "copy/sub/a").write_text("changed")
    assert (tmp_path / "data/sub/a").read_text() == "A"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link/sub/a").read_text() == "A"


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_link_in_a_volume_that_leads_outside_is_refused(node, tmp_path, is_absolute):
    """The sidecar can read what the training may not: it copies nothing from outside (B1)."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/sub/x").symlink_to(tmp_path / "token" if is_absolute else "../../token")
    bench = node(mounts=mount(tmp_path / "in", f"file://{tmp_path}/data"))

    lay_out(bench.context)

    assert "volume data: " in bench.start()["failed"]
    assert f"outside {tmp_path}/data" in bench.start()["failed"]
    assert not [path for path in (tmp_path / "in").rglob("*") if path.is_file()]


def test_links_inside_a_volume_are_followed(node, tmp_path):
    """The copy contains their targets, with mode and time; the source itself may be a link (B1)."""
    (tmp_path / "real/blobs").mkdir(parents=True)
    blob = tmp_path / "real/blobs/1"
    blob.write_text("weights")
    blob.chmod(0o750)
    (tmp_path / "real/latest").symlink_to("blobs/1")
    (tmp_path / "data").symlink_to(tmp_path / "real")
    bench = node(mounts=mount(tmp_path / "in", f"file://{tmp_path}/data"))

    lay_out(bench.context)

    found = tmp_path / "in/latest"
    assert (found.read_text(), found.is_symlink()) == ("weights", False)
    assert (found.stat().st_mode & 0o777, found.stat().st_mtime) == (0o750, blob.stat().st_mtime)


@pytest.mark.parametrize("source", ["/no/such/folder", "hostPath:/no/such/folder", "file:///no/such/folder"])
def test_a_volume_that_does_not_exist_is_named(node, tmp_path, source):
    """The message has the volume and the path."""
    bench = node(mounts=mount(tmp_path / "in", source))

    lay_out(bench.context)

    assert bench.start() == {
        "schema": "2.0",
        "failed": "volume data: /no/such/folder does not exist on this machine",
        "reason": "setup-failed",
    }


def test_an_attempt_that_is_asked_to_go_is_not_set_up(node, tmp_path):
    """The owner changed its mind during a long copy: the wrapper learns of it at once."""
    bench = node(mounts=mount(tmp_path / "in", "/no/such/folder"))
    bench.heard(sequence=7, action="stop", reason="budget")

    lay_out(bench.context)

    assert bench.start()["failed"] == "asked to stop before the start: budget"
    assert bench.start()["reason"] == bench.state.failed_as == "stopped"


def test_a_sidecar_that_must_end_leaves_the_set_up_to_the_next(node):
    """Without start.json, the next one begins again."""
    bench = node()
    bench.context.ending.set()

    with pytest.raises(WorkInterruptedError):
        lay_out(bench.context)
    assert not bench.spool.start.exists()


@pytest.mark.parametrize(("attempt", "reason"), [(1, "setup-failed"), (2, "orphaned")])
def test_a_store_that_never_answers_fails_the_set_up(node, store, attempt, reason):
    """After its patience, with the store's own message; the stage is to blame only at the first attempt."""
    bench = node()
    bench.context.who = dataclasses.replace(bench.context.who, attempt=attempt)
    store.down = True

    lay_out(bench.context)

    assert (bench.start()["failed"], bench.start()["reason"]) == ("the store is down", reason)


def test_a_store_that_goes_away_in_the_set_up_is_no_fault_of_the_stage(node, store, tmp_path, monkeypatch):
    """It answered at first: a failover longer than the patience ends the attempt, not the run."""
    bench = node(work=str(tmp_path / "w"), workdir_archive=ship(store, tmp_path))
    monkeypatch.setattr(
        "envscaler_airflow.sidecar.setup.restore_with_others", lambda *_: go_away(store, for_good=True)
    )

    lay_out(bench.context)

    assert (bench.start()["failed"], bench.start()["reason"]) == ("the store is down", "orphaned")
    assert bench.state.failed_as == "orphaned"


def test_credentials_that_expire_before_the_set_up_are_no_fault_of_the_stage(node, store, monkeypatch):
    """They worked for the attempt before; the next attempt gets new ones (seed 33400995)."""
    bench = node()
    bench.context.who = dataclasses.replace(bench.context.who, attempt=2)
    expired = StoreError("read control/g1-a2.json: 403, the credentials have expired", status=403)

    def refuse(*_args, **_options):
        raise expired

    monkeypatch.setattr(bench.context, "run", SimpleNamespace(size=refuse, read=refuse, create=refuse))
    lay_out(bench.context)

    assert (bench.start()["failed"], bench.start()["reason"]) == (str(expired), "orphaned")


def test_a_volume_that_does_not_answer_is_the_stages_fault(node, store, monkeypatch):
    """The run's store answers: another try would fail the same way."""
    bench = node()
    monkeypatch.setattr(
        "envscaler_airflow.sidecar.setup.restore_with_others", lambda *_: go_away(store, for_good=False)
    )

    lay_out(bench.context)

    assert bench.start()["reason"] == "setup-failed"


def go_away(store, *, for_good):
    """Fail a call without an answer; *for_good*: the run's store stays down too."""
    store.down = for_good
    raise StoreError("the store is down", transient=True)


def test_what_an_earlier_try_could_not_write_down_does_not_count(node, store):
    """A disk that was full for a moment: the training that starts after it is uploaded."""
    bench = node()
    bench.context.memory.update(failed="set-up failed: disk full")

    lay_out(bench.context)

    assert (bench.start()["restore"], bench.state.failed) == (None, None)


def test_a_store_that_nobody_else_sees_is_said_so(make_bench):
    """No control: the operator and the sidecar use different stores."""
    bench = make_bench()

    lay_out(bench.context)

    assert "must see the same store" in bench.start()["failed"]
