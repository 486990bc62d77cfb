"""One contract for every run store: a folder, S3 (moto's HTTP server on loopback), fsspec's memory."""

import json
import socket
import uuid

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.owner.prune import prune
from envscaler_airflow.run.event_bodies import Failed, NewGeneration, StopRequested
from envscaler_airflow.store import EventLog, RunKey, check_store, deployment_of, open_store
from envscaler_airflow.store.run import Run

BUCKET = "runs"
ODD_NAMES = [
    "a b/c+d.json",
    "dag/%2E%2E/x",
    "größe/данные.bin",
    "globs/[1]*?.bin",
    "hash#tag&x=y.json",
    ".metadata",
    "a/.hidden/b",
    "tilde~1/quote'\".txt",
]
BAD_NAMES = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a//b",
    "./a",
    "a/.",
    "a\0b",
    "a\\..\\b",
    "x" * 1025,
]


@pytest.fixture(scope="module")
def s3_options():
    """Options for a real S3 API on a free port of the loopback interface."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}),
    )
    client.create_bucket(Bucket=BUCKET)
    options = {"client": client}
    yield options
    client.close()
    server.stop()


@pytest.fixture(params=["file", "s3", "memory"])
def place(request, tmp_path):
    """URL and options of an empty store."""
    if request.param == "file":
        return f"file://{tmp_path}/store", {}
    if request.param == "s3":
        return f"s3://{BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3_options")
    return f"memory://{uuid.uuid4().hex}/store", {}


@pytest.fixture
def store(place):
    """An empty store that exists."""
    store = open_store(*place)
    check_store(store)
    return store


def test_what_was_never_written_is_none(store):
    """An absent file is None for bytes and size, and an empty list for folders."""
    assert store.read("a/b") is None
    assert store.size("a/b") is None
    assert store.names("a") == []
    assert store.children("a") == []
    assert store.names("") == []


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 512])
def test_what_was_written_is_read_back(store, data):
    """Any bytes, also an empty file."""
    store.write("a/b", data)

    assert store.read("a/b") == data
    assert store.size("a/b") == len(data)


def test_the_last_write_counts(store):
    """A write replaces the old content, whether longer or shorter."""
    store.write("a", b"long text")
    store.write("a", b"short")

    assert store.read("a") == b"short"


def test_of_two_creators_one_wins(place, store):
    """The second create returns False, and the content of the first stays."""
    other = open_store(*place)

    assert store.create("events/000001.json", b"first") is True
    assert other.create("events/000001.json", b"second") is False
    assert store.create("events/000001.json", b"third") is False
    assert other.read("events/000001.json") == b"first"


def test_a_deleted_name_can_be_created_again(store):
    """A deleted file can be created again."""
    store.create("a", b"1")
    store.delete("a")

    assert store.create("a", b"2") is True
    assert store.read("a") == b"2"


def test_reading_is_bounded(store):
    """A limit of ten bytes allows ten bytes, a limit of nine refuses them."""
    store.write("a", b"0123456789")

    assert store.read("a", max_bytes=10) == b"0123456789"
    with pytest.raises(ProtocolError, match="10 bytes, at most 9 are read"):
        store.read("a", max_bytes=9)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leaves_the_store(store, tmp_path, name):
    """Every method refuses a name that is absolute, has a parent part, or is empty."""
    (tmp_path / "file").write_bytes(b"x")
    calls = [
        lambda: store.read(name),
        lambda: store.write(name, b"x"),
        lambda: store.create(name, b"x"),
        lambda: store.delete(name),
        lambda: store.size(name),
        lambda: store.put_file(name, tmp_path / "file"),
        lambda: store.get_file(name, tmp_path / "other"),
        lambda: store.delete_tree(name),
    ]
    if name:
        calls += [lambda: store.names(name), lambda: store.children(name), lambda: store.uri(name)]

    for call in calls:
        with pytest.raises(ProtocolError, match="does not stay inside the store"):
            call()
    assert store.names("") == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_kept_as_they_are(store, tmp_path, name):
    """Percent signs, blanks, globs, quotes and other scripts have no special meaning."""
    store.write(name, b"1")

    assert store.read(name) == b"1"
    assert store.size(name) == 1
    assert store.names("") == [name]
    assert store.children("") == [name.split("/")[0]]
    store.get_file(name, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"1"
    store.delete(name)
    assert store.names("") == []


def test_a_prefix_is_a_folder(store):
    """``a`` contains ``a/...``, not ``ab/...``; a trailing slash makes no difference."""
    for name in ["a/2", "a/1", "a/c/d/e", "ab/1", "b"]:
        store.write(name, b"")

    assert store.names("a") == ["a/1", "a/2", "a/c/d/e"]
    assert store.names("a/") == ["a/1", "a/2", "a/c/d/e"]
    assert store.children("a") == ["1", "2", "c"]
    assert store.children("a/c/") == ["d"]
    assert store.children("") == ["a", "ab", "b"]
    assert store.names("") == ["a/1", "a/2", "a/c/d/e", "ab/1", "b"]


def test_a_folder_is_no_file(store):
    """A folder that is read, measured or deleted like a file is absent, and stays."""
    store.write("a/b", b"1")

    assert store.read("a") is None
    assert store.size("a") is None
    store.delete("a")
    assert store.read("a/b") == b"1"


def test_below_a_file_there_is_nothing(store):
    """``a/b`` is absent when ``a`` is a file."""
    store.write("a", b"1")

    assert store.read("a/b") is None
    assert store.size("a/b") is None
    assert store.names("a") == []
    assert store.children("a") == []
    store.delete("a/b")
    assert store.read("a") == b"1"


def test_deleting_is_repeatable_and_leaves_no_empty_folder(store):
    """As in an object store, a folder exists as long as it contains something."""
    store.write("a/b/c", b"1")
    store.write("a/d", b"1")

    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/was")

    assert store.children("a") == ["d"]
    assert store.names("") == ["a/d"]


def test_a_tree_is_deleted_and_nothing_else(store):
    """Names with the same beginning, and the name of the folder itself, stay."""
    for name in ["a/1", "a/b/manifest.json", "a/b/2", "ab/1", "c"]:
        store.write(name, b"")

    store.delete_tree("a")
    store.delete_tree("a")
    store.delete_tree("c")

    assert store.names("") == ["ab/1", "c"]


def test_files_go_up_and_come_down_whole(store, tmp_path):
    """Nine MiB, so that S3 gets it in two parts; it replaces an older file."""
    data = b"0123456789abcdef" * (9 << 16)
    (tmp_path / "up").write_bytes(data)
    (tmp_path / "small").write_bytes(b"small")
    (tmp_path / "down").write_bytes(b"old")

    store.put_file("checkpoints/c/weights", tmp_path / "up")
    store.get_file("checkpoints/c/weights", tmp_path / "down")
    store.put_file("checkpoints/c/weights", tmp_path / "small")
    store.get_file("checkpoints/c/weights", tmp_path / "new/folder/down")

    assert (tmp_path / "down").read_bytes() == data
    assert (tmp_path / "new/folder/down").read_bytes() == b"small"
    assert store.size("checkpoints/c/weights") == 5


def test_an_empty_file_goes_up_and_comes_down(store, tmp_path):
    """An empty file is a file too."""
    (tmp_path / "up").write_bytes(b"")

    store.put_file("empty", tmp_path / "up")
    store.get_file("empty", tmp_path / "down")

    assert (tmp_path / "down").read_bytes() == b""


def test_what_is_absent_does_not_come_down(store, tmp_path):
    """It is an error; the target keeps its content, and no partial file stays beside it."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")

    with pytest.raises(StoreError):
        store.get_file("absent", folder / "file")

    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_bytes() == b"old"


def test_a_uri_opens_the_folder_again(place, store):
    """A URI that one stage publishes opens in the next."""
    store.write("outputs/g1-a1-c1/model/%2E/a b", b"1")
    url, options = place

    again = open_store(store.uri("outputs/g1-a1-c1/model"), options)

    assert store.url == url
    assert again.url == f"{url}/outputs/g1-a1-c1/model"
    assert again.names("") == ["%2E/a b"]
    assert again.read("%2E/a b") == b"1"


def test_a_run_sees_its_folder_only(place, store, tmp_path):
    """Names are relative to the run, and cannot reach its neighbour."""
    store.write("d/dag/run1/x", b"neighbour")
    run = Run(store, "d/dag/run2")
    (tmp_path / "up").write_bytes(b"2")

    assert run.create("a/1", b"1") is True
    assert run.create("a/1", b"2") is False
    run.put_file("b", tmp_path / "up")
    run.get_file("b", tmp_path / "down")

    assert run.names("") == ["a/1", "b"]
    assert run.names("a") == ["a/1"]
    assert run.children("") == ["a", "b"]
    assert run.size("a/1") == 1
    assert (tmp_path / "down").read_bytes() == b"2"
    assert run.url == f"{place[0]}/d/dag/run2"
    assert run.uri("a/1") == f"{place[0]}/d/dag/run2/a/1"
    for name in ["../run1/x", "", "/a/1"]:
        with pytest.raises(ProtocolError):
            run.read(name)
    with pytest.raises(ProtocolError):
        run.delete_tree("")
    run.write("a/1", b"3")
    run.delete("b")
    run.delete_tree("a")
    assert store.names("") == ["d/dag/run1/x"]


def test_a_check_leaves_nothing_behind(store):
    """Neither at the root nor in a folder."""
    check_store(store)
    check_store(store, "deployment/dag")

    assert store.names("") == []


def test_a_store_that_others_may_share_needs_a_deployment(place, store):
    """A folder keeps one uuid for all; any other store is refused with the name of the setting."""
    assert deployment_of(store, "prod") == "prod"
    if place[0].startswith("file:"):
        kept = deployment_of(store, None)
        assert str(uuid.UUID(kept)) == kept
        assert deployment_of(open_store(*place), "") == kept
        assert store.names("") == ["deployment.json"]
    else:
        with pytest.raises(SpecError, match=r"\[envscaler\] deployment is not set"):
            deployment_of(store, None)


def test_of_two_events_with_one_number_one_stays(place, store):
    """The loser gets the refusal, folds, and appends its own event after the winner's."""
    mine, other = Run(store, "run").events, Run(open_store(*place), "run").events

    won = mine.append(0, NewGeneration(generation=1, spec_hash="a"))
    lost = other.append(0, NewGeneration(generation=1, spec_hash="b"))
    request = other.append_request(StopRequested(reason="r"))

    assert lost is None
    assert request.number == 2
    assert mine.read() == other.read() == [won, request]
    assert mine.load() == other.load()
    assert mine.load().spec_hash == "a"


class LostAnswer:
    """A store that loses the answer of its next create, before or after the write."""

    def __init__(self, store, *, written):
        """Lose the answer after the object was *written*, or lose the request itself."""
        self._store = store
        self._written = written

    def __getattr__(self, name):
        """Everything else goes to the store."""
        return getattr(self._store, name)

    def create(self, name, data):
        """Write, unless the request is lost, and fail."""
        if self._written:
            self._store.create(name, data)
        raise StoreError("the answer was lost", transient=True)


def test_an_event_whose_answer_was_lost_is_recognised(store):
    """The writer reads the number back and finds its own uuid."""
    log = Run(LostAnswer(store, written=True), "run").events

    event = log.append(0, NewGeneration(generation=1, spec_hash="a"))

    assert event is not None
    assert Run(store, "run").events.read() == [event]


def test_a_lost_answer_hides_no_winner(store):
    """If the number has another writer's event, the race is lost: that is not an error."""
    theirs = Run(store, "run").events.append(0, NewGeneration(generation=1, spec_hash="a"))

    assert Run(LostAnswer(store, written=True), "run").events.append(0, Failed(reason="x")) is None
    assert Run(store, "run").events.read() == [theirs]


def test_an_event_that_did_not_arrive_is_an_error(store):
    """The number has no event, and it may or may not appear later."""
    log = Run(LostAnswer(store, written=False), "run").events

    with pytest.raises(StoreError, match="the answer was lost"):
        log.append(0, NewGeneration(generation=1, spec_hash="a"))


def test_a_store_that_is_away_is_an_error_that_passes():
    """The endpoint is closed: the file is neither absent nor empty, and a retry may succeed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    options = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "region_name": "us-east-1",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "config": {"retries": {"total_max_attempts": 1}},
    }
    away = open_store(f"s3://{BUCKET}/x", options)

    for call in [lambda: away.read("a"), lambda: away.names(""), lambda: EventLog(away).load()]:
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.transient


def test_a_bucket_that_is_not_there_is_an_error(s3_options):
    """A typo in the bucket's name must not look like a store without runs."""
    typo = open_store("s3://ruins/x", s3_options)

    for call in [lambda: typo.read("a"), lambda: typo.size("a"), lambda: typo.names("")]:
        with pytest.raises(StoreError):
            call()
    with pytest.raises(StoreError, match="must all see the same store"):
        check_store(typo)


def test_an_old_run_is_removed_from_every_store(store):
    """Files at the top, folders and events; a run that stays and reads its output protects it at first."""
    old, reader = RunKey("dep", "dag", "old", "train"), RunKey("dep", "dag", "new", "score")
    for key in (old, reader):
        run = Run(store, key, snapshots=True)
        run.write("run.json", json.dumps({"schema": "2.0", "key": key.to_dict()}).encode())
        run.events.append(0, NewGeneration(generation=1, spec_hash="a"))
        run.events.append(1, Failed(generation=1, reason="r"))
        run.write("checkpoints/g1-step-00000001-a1/n0-c1/weights", b"123")
        run.write("outputs/g1-a1-c1/model/manifest.json", b"{}")
    Run(store, reader).write("spec-a.json", json.dumps({"uri": Run(store, old).uri("outputs/x")}).encode())

    def is_old(prefix):
        return prefix == old.prefix

    whole = store.names("")
    kept = list(prune(store, older_than_s=-1.0, applies_to=is_old, dry_run=True))
    Run(store, reader).delete("spec-a.json")
    gone = list(prune(store, older_than_s=-1.0, applies_to=is_old))

    words = f"the run {reader.prefix} names its outputs or checkpoints"
    assert [(one.prefix, one.kept, one.objects) for one in kept + gone] == [
        (old.prefix, words, 5),
        (old.prefix, "", 5),
    ]
    assert store.names("") == [
        name for name in whole if not name.startswith(f"{old.prefix}/") and "spec-a" not in name
    ]
