"""Outputs of a command that succeeded."""

import shutil
from pathlib import Path

import pytest

from envscaler_agent.protocol import Control, control_name
from envscaler_airflow.sidecar import saver_layouts as trees
from envscaler_airflow.sidecar.uploads import Outputs
from envscaler_airflow.store.root import Place


@pytest.fixture
def finished(make_bench, tmp_path):
    """A node with two outputs on the disk."""
    bench = make_bench(
        layout={"outputs": {"model": f"{tmp_path}/out/model", "report": f"{tmp_path}/out/r.json"}}
    )
    (tmp_path / "out/model").mkdir(parents=True)
    (tmp_path / "out/model/w").write_text("W")
    (tmp_path / "out/r.json").write_text("{}")
    return bench


def test_outputs_go_up_with_their_uris(finished, store):
    """Each below the generation, by its name."""
    assert Outputs(finished.context).step()

    assert finished.state.outputs == {
        "model": store.uri("outputs/g1-a2-c1/model"),
        "report": store.uri("outputs/g1-a2-c1/report"),
    }


def test_an_output_that_was_never_written_is_a_failure(finished, tmp_path):
    """The command succeeded but did not do what the spec requires."""
    (tmp_path / "out/r.json").unlink()

    assert Outputs(finished.context).step()

    assert (
        finished.state.failed
        == f"output 'report': {tmp_path}/out/r.json does not exist; the command must write it"
    )


def test_outputs_wait_for_the_store(finished, store):
    """One is uploaded, the store becomes unreachable, the other follows later; the first is not repeated."""
    outputs = Outputs(finished.context)
    real = store._store.write

    def fail(name, data):
        if name == "outputs/g1-a2-c1/report/manifest.json":
            raise OSError(5, "I/O error")
        real(name, data)

    store._store.write = fail
    assert not outputs.step()
    assert finished.context.messages.text() == "output report waits: [Errno 5] I/O error"
    store._store.write = real
    store.puts.clear()
    finished.clock.now += 2

    assert outputs.step()
    assert {name.split("/")[2] for name in store.puts} == {"report"}


def test_a_zombie_does_not_overwrite_the_outputs(finished, store):
    """A later attempt has begun: the run uses its outputs."""
    store.write(control_name(1, 3), Control().to_json())

    assert Outputs(finished.context).step()

    assert "a later attempt has begun" in finished.state.failed
    assert store.children("outputs") == []


def test_an_output_whose_folder_became_a_link_is_not_read(finished, store, tmp_path):
    """The training replaced its output folder by a link to a folder outside that has the same name."""
    finished.context.remember_places()
    (tmp_path / "etc/model").mkdir(parents=True)
    (tmp_path / "etc/model/shadow").write_text("secret")
    (tmp_path / "out").rename(tmp_path / "gone")
    (tmp_path / "out").symlink_to(tmp_path / "etc")

    assert Outputs(finished.context).step()

    assert f"leads to {tmp_path}/etc, and was {tmp_path}/out before the start" in finished.state.failed
    assert store.children("outputs") == []


def test_an_output_that_became_a_link_to_the_store_is_not_read(finished, store, tmp_path):
    """The store is not copied into itself either."""
    finished.context.remember_places()
    shutil.rmtree(tmp_path / "out/model")
    (tmp_path / "out/model").symlink_to(tmp_path / "store")

    assert Outputs(finished.context).step()

    assert f"the link leads to {tmp_path}/store" in finished.state.failed
    assert store.children("outputs") == []


def test_files_that_no_manifest_can_name_are_refused_before_the_first_goes_up(finished, store, monkeypatch):
    """A million small files would be uploaded for an hour, and then not count."""
    monkeypatch.setattr("envscaler_airflow.store.manifests.MAX_MANIFEST_BYTES", 150)
    (finished.root / "out/model/v").write_text("V")

    assert Outputs(finished.context).step()

    assert "a manifest of 2 files has" in finished.state.failed
    assert store.puts == []


@pytest.mark.parametrize("target", ["/output/model/w", "/output/model/w-away"])
def test_an_absolute_link_below_a_literal_mount_path_is_its_own(make_bench, store, tmp_path, target):
    """On `local` the training sees /output, which is elsewhere: its links lead there (F9)."""
    model = tmp_path / "root/output/model"
    model.mkdir(parents=True)
    (model / "w").write_text("W")
    (model / "latest").symlink_to(target)
    layout = {"outputs": {"model": str(model)}, "training_paths": {str(model): "/output/model"}}
    bench = make_bench(layout=layout)
    bench.context.remember_places()

    assert Outputs(bench.context).step()

    stored = {name: store.read(name) for name in store.names("outputs") if "manifest" not in name}
    expected = {"outputs/g1-a2-c1/model/w": b"W"}
    if target.endswith("/w"):
        expected["outputs/g1-a2-c1/model/latest"] = b"W"
    assert (stored, bench.state.failed) == (expected, None)


def test_an_absolute_link_of_a_checkpoint_is_kept(tmp_path):
    """`latest` of a training that names its folders by the path that it sees (F9)."""
    (tmp_path / "root/save/step-5").mkdir(parents=True)
    (tmp_path / "root/save/step-5/w").write_text("W")
    (tmp_path / "root/save/latest").symlink_to("/save/step-5")
    place = Place(tmp_path / "root", Path("/"))

    tree = trees.look(tmp_path / "root/save", parent=place)

    assert (tree.links, tree.left_out) == ({"latest": "step-5"}, {})
