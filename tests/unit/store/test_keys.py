"""The folder of a run: one for each key, and none outside the store."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.store.keys import RunKey, encode_part, is_name

texts = st.one_of(
    st.text(min_size=1, max_size=120),
    st.text(alphabet="aA._-~%2E/ é", min_size=1, max_size=12),
    st.text(alphabet="a", min_size=60, max_size=100),
)
keys = st.builds(
    RunKey,
    deployment=texts,
    dag_id=texts,
    run_id=texts,
    task_id=texts,
    map_index=st.integers(-1, 10_000),
    team=st.none() | texts,
)


def test_a_usual_key_reads_like_its_parts():
    """Colons and plus signs of a run_id, and dots of a TaskGroup, are encoded."""
    key = RunKey("prod", "retrain", "scheduled__2026-01-02T03:04:05+00:00", "group.train", 7)

    assert key.prefix == "prod/retrain/scheduled__2026-01-02T03%3A04%3A05%2B00%3A00/group%2Etrain/7"


def test_a_team_stands_behind_a_dot_that_no_deployment_holds():
    """``a.b`` without a team and ``a`` of team ``b`` are different folders."""
    assert RunKey("a", "d", "r", "t", team="b").prefix == "a.b/d/r/t/-1"
    assert RunKey("a.b", "d", "r", "t").prefix == "a%2Eb/d/r/t/-1"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("..", "%2E%2E"),
        (".", "%2E"),
        (".hidden", "%2Ehidden"),
        ("a/b", "a%2Fb"),
        ("%2E", "%252E"),
        ("~", "%7E"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("\ud800", "%ED%A0%80"),
        ("a" * 80, "a" * 80),
    ],
)
def test_a_part_is_encoded_outside_plain_ascii(text, part):
    """Bytes of UTF-8, upper-case hex."""
    assert encode_part(text) == part


def test_a_long_part_is_cut_at_80_bytes():
    """69 bytes, a tilde, and the first 10 digits of ``printf 'a%.0s' $(seq 81) | sha256sum``."""
    part = encode_part("a" * 81)

    assert part == "a" * 69 + "~" + "8c48280d57"
    assert len(part) == 80


def test_no_escape_is_cut_in_two():
    """One byte and 68 escapes of three: 22 of them fit into the 69 bytes before the hash, 67 in all."""
    part = encode_part("a" + "é" * 34)

    assert re.fullmatch(r"a(%C3%A9){11}~[0-9a-f]{10}", part)


@given(text=texts)
def test_a_part_is_always_a_plain_file_name(text):
    """No filesystem, URL or S3 interprets it in another way."""
    part = encode_part(text)

    assert re.fullmatch(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+(?:~[0-9a-f]{10})?", part)
    assert len(part) <= 80


@given(one=texts, other=texts)
def test_different_texts_give_different_parts(one, other):
    """Even if a text looks like a truncated or encoded one."""
    assert (encode_part(one) == encode_part(other)) == (one == other)
    assert encode_part(encode_part(one)) != encode_part(one) or encode_part(one) == one


@given(text=st.text(alphabet="é.a", min_size=90, max_size=120))
def test_no_short_text_passes_for_a_cut_one(text):
    """The folder name of a long text, used as an id, gets another folder."""
    cut = encode_part(text)

    assert encode_part(cut) != cut


@given(one=keys, other=keys)
def test_different_keys_give_different_folders(one, other):
    """For any parts, including slashes."""
    assert (one.prefix == other.prefix) == (one == other)


@given(key=keys)
def test_every_folder_is_a_name_of_five_parts(key):
    """No key leads outside the store."""
    assert is_name(key.prefix)
    assert len(key.prefix.split("/")) == 5


@given(key=keys)
def test_a_key_is_read_back_from_its_dict(key):
    """In the form of run.json and of triggers; unknown fields are ignored."""
    assert RunKey.from_dict({**key.to_dict(), "more": 1}) == key


def test_an_absent_team_is_left_out_of_the_dict():
    """None means unknown or absent, never a value."""
    assert RunKey("a", "d", "r", "t").to_dict() == {
        "deployment": "a",
        "dag_id": "d",
        "run_id": "r",
        "task_id": "t",
        "map_index": -1,
    }


@pytest.mark.parametrize(
    "change",
    [{"dag_id": None}, {"dag_id": 1}, {"map_index": "1"}, {"map_index": True}, {"team": 1}, {"team": ""}],
)
def test_a_key_of_wrong_types_is_refused(change):
    """The content of a file is checked field by field."""
    body = {"deployment": "a", "dag_id": "d", "run_id": "r", "task_id": "t", **change}

    with pytest.raises(ValueError, match=next(iter(change))):
        RunKey.from_dict(body)


def test_a_key_that_lacks_a_field_is_refused():
    """The message names it."""
    with pytest.raises(ValueError, match="task_id"):
        RunKey.from_dict({"deployment": "a", "dag_id": "d", "run_id": "r"})


@pytest.mark.parametrize("field", ["deployment", "dag_id", "run_id", "task_id", "team"])
def test_no_part_is_empty(field):
    """An empty part would be a folder with its parent's name."""
    parts = {"deployment": "a", "dag_id": "d", "run_id": "r", "task_id": "t", field: ""}

    with pytest.raises(ValueError, match=f"{field} is empty"):
        RunKey(**parts)
