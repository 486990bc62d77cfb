"""Unit tests of the messages between the two sides: complete, bounded, and checked when read."""

import json

import pytest

from envscaler_agent import messages, protocol
from envscaler_agent.protocol import Control, Ended, Manifest, ManifestFile, Progress, Status
from envscaler_airflow.errors import ProtocolError

SHA = "0" * 64
A_FILE = {"path": "a/b.bin", "size": 1, "sha256": SHA}
MESSAGES = [
    Control(
        sequence=3, action="drain", align="epoch", candidates=("g1-step-00000100-a1",), orphan_after_s=60
    ),
    Status(progress=Progress(step=5, loss=-0.5), usage={"cpu_percent": 80.0}, ended=Ended(exit_code=1)),
    Manifest(files=(ManifestFile(**A_FILE),), step=100, epoch=1),
]


def wire(**body):
    """Return a message of this version."""
    return json.dumps({"schema": messages.SCHEMA, **body})


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_read_is_what_was_written(message):
    """Every field, including tuples and nested messages."""
    assert type(message).from_json(message.to_json(), where="x") == message


def test_the_types_of_fields_are_resolved_once(monkeypatch):
    """300 statuses with progress and an end: three classes, each resolved once (A9)."""
    asked, resolve = [], messages.get_type_hints
    monkeypatch.setattr(messages, "get_type_hints", lambda cls: asked.append(cls) or resolve(cls))
    messages._HINTS.clear()
    said = Status(progress=Progress(step=5), ended=Ended(exit_code=1)).to_json()

    for _ in range(300):
        Status.from_json(said, where="x")

    assert sorted(cls.__name__ for cls in asked) == ["Ended", "Progress", "Status"]


def test_half_a_character_is_read_as_what_can_be_said():
    """A file name that is not UTF-8, in a message: printing a status raises no error."""
    said = Status(message="shard-\udcff of größe", ended=Ended(last_lines=("\udcff",)))

    got = Status.from_json(said.to_json(), where="test")

    assert (got.message, got.ended.last_lines) == ("shard-\\udcff of größe", ("\\udcff",))


def test_what_is_unknown_is_left_out():
    """None does not become zero in JSON either."""
    assert json.loads(Progress(step=0).to_json()) == {"schema": messages.SCHEMA, "step": 0}


@pytest.mark.parametrize("schema", ["2.0", "2.7"])
def test_fields_of_a_newer_minor_version_are_ignored(schema):
    """The newer side may send more."""
    body = json.dumps({"schema": schema, "step": 5, "mood": "good", "phase": None})

    assert Progress.from_json(body, where="x") == Progress(step=5)


@pytest.mark.parametrize("schema", ["3.0", "0.9", 1, None])
def test_another_major_version_is_refused_by_name(schema):
    """The message names both."""
    with pytest.raises(ProtocolError, match=rf"x: schema {schema!r}, this side uses {messages.SCHEMA}"):
        Progress.from_json(json.dumps({"schema": schema}), where="x")


@pytest.mark.parametrize("schema", ["1.0", "1.4"])
def test_a_document_of_the_first_schema_is_refused_by_the_name_of_its_version(schema):
    """The message says what wrote it and what to do."""
    told = (
        rf"x: was written by an unreleased 0\.1\.0 .*\(schema {schema}\).*{messages.SCHEMA}.*start a new run"
    )
    with pytest.raises(ProtocolError, match=told):
        Progress.from_json(json.dumps({"schema": schema}), where="x")


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Progress, b"{", "not JSON"),
        (Progress, b"[]", "got list, expected an object"),
        (Progress, "[" * 100_000, "not JSON"),
        (Progress, b" " * (messages.MAX_JSON_BYTES + 1), "at most 1048576 are read"),
        (Progress, wire(step="5"), "step: got '5', expected int"),
        (Progress, wire(step=True), "step: got True, expected int"),
        (Progress, wire(step=2**63), "step: got 9223372036854775808, expected int"),
        (Progress, '{"schema":"2.0","loss":NaN}', "NaN is not a number"),
        (Progress, '{"schema":"2.0","loss":1e999}', "loss: inf is not a number"),
        (Status, wire(progress=5), "progress: got int, expected an object"),
        (Status, wire(usage=[1]), "usage: got list, expected an object"),
        (Status, wire(rejected="x"), "rejected: got str, expected a list"),
        (Status, wire(phase="asleep"), "phase must be one of setup"),
        (Control, wire(action="dance"), "action must be one of hold"),
        (Control, wire(grace_s=-1), "grace_s must be finite and >= 0, got -1.0"),
        (Control, wire(candidates=["../g1"]), "is not a checkpoint name"),
        (Ended, wire(reason="boredom"), "reason must be one of succeeded"),
        (Manifest, wire(kind="zip"), "kind must be one of checkpoint"),
        (Manifest, wire(files=[{**A_FILE, "path": "../../etc/passwd"}]), "is not a plain relative path"),
        (Manifest, wire(files=[{**A_FILE, "sha256": SHA[:-1]}]), "sha256 must be 64 hex digits"),
        (Manifest, wire(files=[{**A_FILE, "size": -1}]), "size must be >= 0, got -1"),
        (Manifest, wire(files=[A_FILE, A_FILE]), "a path is named twice"),
    ],
)
def test_nonsense_is_a_protocol_error_that_says_where(kind, text, said):
    """Any invalid message raises the same error, which starts with the file's name."""
    with pytest.raises(ProtocolError, match="x: ") as caught:
        kind.from_json(text, where="x")

    assert said in str(caught.value)


@pytest.mark.parametrize("path", ["", "/a", "a//b", "a/../b", "..", "./a", "a/", "a\\b", "a\0b", "a" * 1025])
def test_a_path_that_leaves_its_folder_is_not_safe(path):
    """Neither by its parts nor by a system's special meaning of a character."""
    assert not protocol.is_safe_relative_path(path)


def test_a_plain_path_is_safe():
    """Also a hidden file, and a name with two dots."""
    assert all(protocol.is_safe_relative_path(path) for path in ("a", "a/b.bin", ".hidden", "a..b/c"))


def test_names_of_checkpoints_sort_by_step_and_read_back():
    """Step 99 comes before step 100."""
    names = [protocol.checkpoint_name(1, step, 2) for step in (99, 100)]

    assert names == sorted(names)
    assert protocol.parse_checkpoint_name(names[0]) == (1, 99, 2)


@pytest.mark.parametrize(
    "name", ["g1-step-5-a1", "g1-step-00000005-a1/..", "g1-step-00000005-a1\n", "latest"]
)
def test_other_names_are_no_checkpoints(name):
    """They come from a listing of a folder that others can write to."""
    assert protocol.parse_checkpoint_name(name) is None


@pytest.mark.parametrize("count", [0, 2])
def test_a_manifest_of_one_file_has_one(count):
    """Readers take the first; an output of another stage is checked when it is read (B1)."""
    files = tuple(ManifestFile(path=str(number), size=0, sha256="0" * 64) for number in range(count))

    with pytest.raises(ValueError, match=f"a manifest of one file has {count}"):
        Manifest(kind="file", files=files)


@pytest.mark.parametrize(
    "links",
    [
        {"latest": "/etc"},
        {"latest": "../x"},
        {"a/latest": "../../x"},
        {"a/latest": "b/../../../x"},
        {"../latest": "x"},
        {"latest": ""},
        {"w": "a"},
        {"a": "b", "a/c": "d"},
        {"sub": "other"},
        {"deep/b": "..", "v": "deep/b/../x"},
    ],
)
def test_links_of_a_manifest_stay_in_the_folder(links):
    """Not out of it, not over a file, and with nothing below them (C)."""
    files = tuple(ManifestFile(path=path, size=0, sha256="0" * 64) for path in ("w", "sub/x"))

    with pytest.raises(ValueError, match="links: "):
        Manifest(files=files, links=links)
