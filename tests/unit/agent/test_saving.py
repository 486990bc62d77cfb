"""Unit tests of checkpoint folders: complete under their name, or absent."""

import json

import pytest

from envscaler_agent import saving

ONE, TWO, THREE = (f"g1-step-0000000{step}-a1" for step in (1, 2, 3))


def partial(checkpoints, name, text="weights"):
    """A folder that a save has filled."""
    folder = saving.partial_folder(checkpoints, name)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "w").write_text(text, encoding="utf-8")
    return folder


def test_a_completed_folder_has_its_name_and_its_facts(tmp_path):
    """Unknown facts are left out."""
    partial(tmp_path, ONE)

    final = saving.complete(tmp_path, ONE, {"step": 1, "epoch": None})

    assert final == tmp_path / ONE
    assert json.loads((final / "agent.json").read_text()) == {"step": 1}
    assert saving.facts_of(final) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == [ONE]


def test_everything_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """Each file and folder is synced before the rename, and the parent after it."""
    partial(tmp_path, ONE)
    synced = []
    monkeypatch.setattr(saving, "_sync", lambda path: synced.append((path.name, (tmp_path / ONE).exists())))

    saving.complete(tmp_path, ONE, {})

    before = {name for name, renamed in synced if not renamed}
    assert before == {"deep", "w", "agent.json", f".saving-{ONE}"}
    assert [name for name, renamed in synced if renamed] == [tmp_path.name]


def test_what_a_killed_save_left_is_cleared(tmp_path):
    """Complete folders stay."""
    partial(tmp_path, ONE)
    saving.complete(tmp_path, ONE, {})
    partial(tmp_path, TWO)

    saving.clear_partial(tmp_path)

    assert [entry.name for entry in tmp_path.iterdir()] == [ONE]


def test_an_abandoned_save_leaves_the_one_before(tmp_path):
    """A second save that fails does not touch the first."""
    partial(tmp_path, ONE)
    saving.complete(tmp_path, ONE, {})
    partial(tmp_path, TWO)

    saving.abandon(tmp_path, TWO)

    assert saving.newest(tmp_path) == tmp_path / ONE
    assert not saving.partial_folder(tmp_path, TWO).exists()


def test_what_the_sidecar_has_taken_does_not_wait(tmp_path):
    """Its ``.done`` marks it; the folder may exist or not."""
    for name in (ONE, TWO):
        partial(tmp_path, name)
        saving.complete(tmp_path, name, {})
    (tmp_path / f"{ONE}.done").touch()

    assert saving.waiting(tmp_path) == [TWO]
    assert saving.is_taken(tmp_path, ONE)
    assert saving.is_taken(tmp_path, TWO)
    (tmp_path / f"{THREE[:-1]}2.done").touch()  # its folder is already gone
    assert saving.is_taken(tmp_path, f"{THREE[:-1]}2")
    assert not saving.is_taken(tmp_path, THREE)


def test_only_the_newest_are_kept_without_a_sidecar(tmp_path):
    """By step as a number: 10 is newer than 9, in any attempt."""
    names = ["g1-step-00000009-a9", "g1-step-00000010-a1", "g1-step-00000011-a1"]
    for name in names:
        partial(tmp_path, name)
        saving.complete(tmp_path, name, {})

    saving.prune(tmp_path, keep=2)

    assert saving.waiting(tmp_path) == names[1:]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_facts_that_cannot_be_read_are_unknown(tmp_path, text):
    """Restoring continues without them."""
    (tmp_path / "agent.json").write_text(text, encoding="utf-8")

    assert saving.facts_of(tmp_path) == {}
    assert saving.facts_of(tmp_path / "absent") == {}


def test_nothing_is_there_before_the_first_save(tmp_path):
    """A missing folder raises no error."""
    assert saving.newest(tmp_path / "absent") is None
    saving.clear_partial(tmp_path / "absent")
