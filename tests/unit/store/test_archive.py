"""The workdir archive: equal content, equal hash; nothing unpacks outside its folder."""

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from envscaler_airflow.errors import CheckpointError, SpecError
from envscaler_airflow.store.archive import pack_workdir, unpack
from envscaler_airflow.store.root import Root


def make(folder, files):
    """Write ``{path: text}`` below *folder*."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def tree(folder):
    """All files below *folder* as ``{path: text}``."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def packed(tmp_path, entries):
    """An archive of hand-made tar entries, and its hash: content that only an attacker writes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path = tmp_path / "made.tar.zst"
    path.write_bytes(zstandard.compress(raw.getvalue()))
    return path, hashlib.sha256(raw.getvalue()).hexdigest()


def entry(name, kind=tarfile.REGTYPE, link=""):
    """A tar header."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def shipped(tmp_path, folder, **options):
    """The unpacked content of *folder*."""
    archive = pack_workdir(folder, scratch=tmp_path, **options)
    target = tmp_path / "target"
    target.mkdir()
    unpack(archive.path, target, sha256=archive.sha256)
    return target


def test_what_is_packed_arrives(tmp_path):
    """Text, an executable and an internal link are unchanged."""
    folder = make(tmp_path / "work", {"train.py": "go", "lib/a.py": "a", "run.sh": "#!"})
    (folder / "run.sh").chmod(0o700)
    (folder / "lib/b.py").symlink_to("../train.py")

    target = shipped(tmp_path, folder)

    assert tree(target) == {"train.py": "go", "lib/a.py": "a", "run.sh": "#!", "lib/b.py": "go"}
    assert (target / "lib/b.py").readlink().as_posix() == "../train.py"
    assert os.access(target / "run.sh", os.X_OK)
    assert (target / "train.py").stat().st_mode & 0o777 == 0o644


def test_equal_content_gives_an_equal_hash(tmp_path):
    """Times, order of creation and group bits do not count; one byte does."""
    one = make(tmp_path / "one", {"a": "1", "b/c": "2"})
    two = make(tmp_path / "two", {"b/c": "2", "a": "1"})
    os.utime(two / "a", (1, 1))
    (two / "a").chmod(0o640)
    other = make(tmp_path / "other", {"a": "1", "b/c": "3"})

    first, second, third = (pack_workdir(folder, scratch=tmp_path) for folder in (one, two, other))

    assert first.sha256 == second.sha256 != third.sha256
    assert first.name == f"workdir-{first.sha256}.tar.zst"
    assert first.path.read_bytes() == second.path.read_bytes()


def test_gitignore_is_followed_as_git_does(tmp_path):
    """Nested rules override outer ones, ``!`` re-includes, and an ignored folder is not entered."""
    folder = make(
        tmp_path / "work",
        {
            ".gitignore": "*.bin\n/out/\n",
            "a.bin": "x",
            "out/keep.py": "x",
            "sub/.gitignore": "!b.bin\nc.py\n",
            "sub/b.bin": "kept",
            "sub/c.py": "x",
            "sub/out/d.py": "kept: only /out/ at the top is named",
            ".git/config": "x",
            "__pycache__/m.pyc": "x",
            ".venv/bin/python": "x",
        },
    )

    arrived = tree(shipped(tmp_path, folder))

    assert sorted(arrived) == [".gitignore", "sub/.gitignore", "sub/b.bin", "sub/out/d.py"]


def test_rules_above_the_workdir_count_up_to_the_repository(tmp_path):
    """A workdir inside a repository is packed by the repository's rules."""
    make(tmp_path, {"repo/.git/HEAD": "x", "repo/.gitignore": "*.log\n", ".gitignore": "*.py\n"})
    folder = make(tmp_path / "repo/work", {"train.py": "go", "run.log": "x"})

    assert sorted(tree(shipped(tmp_path, folder))) == ["train.py"]


def test_a_workdir_that_is_itself_ignored_is_shipped(tmp_path):
    """``build/`` in .gitignore does not empty the workdir ``build/experiment``."""
    make(tmp_path, {"repo/.git/HEAD": "x", "repo/.gitignore": "build/\n"})
    folder = make(tmp_path / "repo/build/experiment", {"train.py": "go"})

    assert sorted(tree(shipped(tmp_path, folder))) == ["train.py"]


def test_too_much_is_refused_and_the_largest_are_named(tmp_path):
    """The error for data in the workdir names the files and what to do."""
    folder = make(tmp_path / "work", {"train.py": "go", "data.csv": "x" * 100})

    with pytest.raises(
        SpecError, match=r"102 bytes, at most .* of 100 .*volume\. Largest: data\.csv \(100 bytes\)"
    ):
        pack_workdir(folder, max_bytes=100, scratch=tmp_path)
    assert not list(tmp_path.glob("*.zst"))


@pytest.mark.parametrize("target", ["/etc/hostname", "../beside", "sub/../../beside"])
def test_a_link_that_leads_outside_is_refused(tmp_path, target):
    """The target does not exist on the machine that unpacks."""
    folder = make(tmp_path / "work", {"sub/a": "x"})
    (folder / "link").symlink_to(target)

    with pytest.raises(SpecError, match=r"the link link leads to .*, outside the folder"):
        pack_workdir(folder, scratch=tmp_path)


def test_pipes_are_left_out(tmp_path):
    """A pipe would block the reader; git does not track one either."""
    folder = make(tmp_path / "work", {"a": "x"})
    os.mkfifo(folder / "pipe")

    assert sorted(tree(shipped(tmp_path, folder))) == ["a"]


def test_no_such_workdir(tmp_path):
    """The message names the folder."""
    with pytest.raises(SpecError, match="missing is not a folder"):
        pack_workdir(tmp_path / "missing")


@pytest.mark.parametrize("name", ["secret.key", "sub"])
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, name):
    """A file or a folder of another user; no archive is left behind."""
    folder = make(tmp_path / "work", {"secret.key": "x", "sub/a": "x"})

    def refuse(function):
        def asked(path, *arguments, **options):
            if isinstance(path, str | Path) and Path(path).name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *arguments, **options)

        return asked

    monkeypatch.setattr(os, "scandir", refuse(os.scandir))
    monkeypatch.setattr(os, "open", refuse(os.open))

    with pytest.raises(SpecError, match=rf"{name} cannot be read: Permission denied; .* in \.gitignore"):
        pack_workdir(folder, scratch=tmp_path)
    assert not list(tmp_path.glob("*.zst"))


def test_another_content_is_refused_before_anything_is_written(tmp_path):
    """The name contains the hash, and it is checked."""
    archive = pack_workdir(make(tmp_path / "work", {"a": "x"}), scratch=tmp_path)

    with pytest.raises(CheckpointError, match="expected 000"):
        unpack(archive.path, tmp_path / "nowhere", sha256="0" * 64)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_torn_archive_is_refused(tmp_path, damage):
    """Truncated, overwritten or empty: one error, nothing written."""
    archive = pack_workdir(make(tmp_path / "work", {"a": "x" * 4000}), scratch=tmp_path)
    archive.path.write_bytes(damage(archive.path.read_bytes()))

    with pytest.raises(CheckpointError, match=r"torn archive|sha256"):
        unpack(archive.path, tmp_path / "nowhere", sha256=archive.sha256)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([(entry("../evil"), b"x")], "leads outside"),
        ([(entry("/evil"), b"x")], "leads outside"),
        ([(entry("a/../../evil"), b"x")], "leads outside"),
        ([(entry("null", tarfile.CHRTYPE), b"")], "a device"),
        ([(entry("pipe", tarfile.FIFOTYPE), b"")], "a device"),
        ([(entry("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")], "a device or another special"),
        ([(entry("link", tarfile.SYMTYPE, "/etc"), b"")], "leads outside"),
        ([(entry("link", tarfile.SYMTYPE, "../.."), b"")], "leads outside"),
        ([(entry("a"), b"1"), (entry("a"), b"2")], "appears twice"),
        ([(entry("l", tarfile.SYMTYPE, "d"), b""), (entry("l"), b"through")], "appears twice"),
        (
            [
                (entry("deep/a/b", tarfile.SYMTYPE, "../../s"), b""),
                (entry("s/file"), b"x"),
                (entry("w", tarfile.SYMTYPE, "deep/a/b/../../x"), b""),
            ],
            "leads outside",
        ),
    ],
    ids=["dotdot", "absolute", "hidden dotdot", "device", "pipe", "hard link", "link abs", "link up", "twice",
         "file over link", "chain of links"],
)  # fmt: skip
def test_entries_that_lead_outside_are_refused(tmp_path, entries, why):
    """For any archive, nothing is written outside the folder."""
    path, sha256 = packed(tmp_path, entries)
    target = tmp_path / "in" / "target"
    target.mkdir(parents=True)

    with pytest.raises(CheckpointError, match=why):
        unpack(path, target, sha256=sha256)
    assert not (tmp_path / "in" / "evil").exists()
    assert not [link for link in target.rglob("*") if link.is_symlink()]


def test_nothing_is_written_through_a_link(tmp_path):
    """A file below a name that is also a link is written to a real folder, and the link is rejected."""
    entries = [
        (entry("out", tarfile.SYMTYPE, "real"), b""),
        (entry("out/file"), b"x"),
        (entry("real/a"), b"1"),
    ]
    path, sha256 = packed(tmp_path, entries)
    target = tmp_path / "target"
    target.mkdir()

    with pytest.raises(CheckpointError, match="File exists"):
        unpack(path, target, sha256=sha256)
    assert not (target / "real" / "file").exists()


def test_a_bomb_is_refused(tmp_path):
    """Unpacking a few hundred bytes that expand to 50 MB stops at the limit."""
    path, sha256 = packed(tmp_path, [(entry("zeros"), bytes(50 << 20))])
    target = tmp_path / "target"
    target.mkdir()
    assert path.stat().st_size < 10_000

    with pytest.raises(CheckpointError, match="unpacks to more than is allowed"):
        unpack(path, target, sha256=sha256, max_bytes=1 << 20, max_files=10)
    with pytest.raises(CheckpointError, match="more than 10 files or 41943040 bytes"):
        unpack(path, target, sha256=sha256, max_bytes=40 << 20, max_files=10)
    assert not list(target.iterdir())


def test_a_store_that_is_the_workdir_itself_is_refused(tmp_path):
    """Without it the code would be missing, and with it each start would ship other code."""
    folder = make(tmp_path / "work", {"a": "x"})

    with pytest.raises(SpecError, match="the run store itself"):
        pack_workdir(folder, store=folder, scratch=tmp_path)


def test_a_file_that_vanishes_meanwhile_fails_no_retry_of_a_running_stage(tmp_path, monkeypatch):
    """A rotated log, an editor's temporary file: the folder is read once more."""
    folder = make(tmp_path / "work", {"a": "x", "b.tmp": "y"})
    open_file = Root.open_file

    def opened(root, name):
        (folder / "b.tmp").unlink(missing_ok=True)
        return open_file(root, name)

    monkeypatch.setattr(Root, "open_file", opened)
    packed = pack_workdir(folder, scratch=tmp_path)

    assert packed.files == 1
    assert [path.name for path in tmp_path.glob("*.tar.zst")] == [packed.path.name]


def raw_header(name, kind, size=0, link=""):
    """A tar header of any type and size."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(**fields):
    """Headers of a file ``x`` with these PAX records."""
    body = b""
    for key, value in fields.items():
        record = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(record) + len(str(len(record) + len(str(len(record)))))
        body += str(length).encode() + record
    return (
        raw_header("p", tarfile.XHDTYPE, len(body))
        + body
        + bytes(-len(body) % 512)
        + raw_header("x", tarfile.REGTYPE)
    )


LONG = raw_header("p", tarfile.GNUTYPE_LONGNAME, 5) + b"abcd".ljust(512, b"\0")


@pytest.mark.parametrize(
    "raw",
    [
        LONG * 3000 + raw_header("x", tarfile.REGTYPE),
        pax(GNU__sparse__map="0,1,x", GNU__sparse__size="5"),
        pax(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__name="../evil"),
        pax(path="a" * 5000),
        pax(path="/".join("a" * 2000)),
        pax(path="a" * 300),
        raw_header("a", tarfile.REGTYPE) + raw_header("a/b", tarfile.REGTYPE),
        raw_header("a/b", tarfile.REGTYPE) + raw_header("a", tarfile.REGTYPE),
        raw_header("a", tarfile.REGTYPE) + raw_header("./a", tarfile.REGTYPE),
        raw_header("s", tarfile.GNUTYPE_SPARSE),
    ],
    ids=["recursion", "sparse map", "sparse name", "long", "deep", "part", "below a file", "over a folder",
         "twice", "sparse"],
)  # fmt: skip
def test_any_archive_is_unpacked_or_refused(tmp_path, raw):
    """Both tarfile and the disk raise many errors; the caller sees one (B1)."""
    raw += bytes(1024)
    (tmp_path / "t").mkdir()
    packed = io.BytesIO(zstandard.compress(raw))
    file = tmp_path / "made.tar.zst"
    file.write_bytes(packed.getvalue())

    with pytest.raises(CheckpointError):
        unpack(file, tmp_path / "t", sha256=hashlib.sha256(raw).hexdigest())


def test_a_path_that_no_archive_can_have_is_named(tmp_path):
    """A path has at most 1,024 characters (B1)."""
    make(tmp_path / "work", {"/".join(["a" * 200] * 6) + "/x": "x"})

    with pytest.raises(SpecError, match="more than 1024 characters"):
        pack_workdir(tmp_path / "work", scratch=tmp_path)
