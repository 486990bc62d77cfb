"""The archive contains what git would keep, compared with real git."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envscaler_airflow.store.archive import pack_workdir, unpack
from envscaler_airflow.store.gitignore import parse

FILES = [
    "train.py", "data.bin", "a b", "#c", "!d", "src/__init__.py", "src/pkg/__init__.py", "src/pkg/b.py",
    "src/pkg/big.bin", "lib/code.py", "lib/deep/more.py", "data/raw/x.csv", "data/README.md",
    "keep/x.log", "é/e.py",
]  # fmt: skip
TOKENS = [
    "*", "**", "/", "?", "!", "#", " ", "\\", "[ab]", "[!a]", "[a-c]", "[[:alpha:]]", "]", "[",
    "**/", "/**", "*/",
    "src", "pkg", "lib", "data", "*.py", "*.bin", "é", "a", "b", "x", ".", "-", "\t", "a b",
]  # fmt: skip


def git(folder, *words):
    """Output of git, which reads only the repository's own settings."""
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(folder)}
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        env={**os.environ, **quiet},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def repository(folder, files=FILES, **ignored):
    """A repository with *files*, and an ignore file for each folder of *ignored* (``root`` is the top)."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name, text in ignored.items():
        path = (folder if name == "root" else folder / name) / ".gitignore"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    git(folder, "init", "--quiet")
    return folder


def kept_by_git(folder):
    """Tracked files and those that are neither tracked nor ignored."""
    listed = git(folder, "ls-files", "-co", "-z", "--exclude-standard").split(b"\0")
    return sorted(os.fsdecode(name) for name in listed if name)


def shipped(folder, tmp_path_factory):
    """Names of the files unpacked from *folder*."""
    scratch, target = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("target")
    packed = pack_workdir(folder, scratch=scratch)
    unpack(packed.path, target, sha256=packed.sha256)
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("*\n!*/\n!*.py\n!*.yaml\n", "src/pkg/__init__.py"),
        ("**/pkg/**\n!**/pkg/b.py\n", "src/pkg/b.py"),
        ("src/**\n!src/**/\n!src/**/*.py\n", "src/pkg/b.py"),
        ("/*\n!/src\n", "src/pkg/big.bin"),
        ("data/*\n!data/README.md\n", "data/README.md"),
        ("lib/\n!lib/code.py\n", "train.py"),
        ("\ufeffdata.bin\n", "train.py"),
        ("data.bin\r\nlib\r\n", "train.py"),
        ("data.bin   \n!d \n\\!d\n\\#c\na\\ b\n", "train.py"),
        ("*.bin\n!src/pkg/*.bin\n", "src/pkg/big.bin"),
        ("/src/*/*.bin\nkeep/**/x.log\n**/raw\n", "data/README.md"),
        ("[!a-z]*\n[^t]*.bin\n", "train.py"),
        ("*.[!p][!y]\nsrc[/]pkg\n", "train.py"),
        ("data.bi?\n??.py\n?/e.py\n", "é/e.py"),
        ("foo[\nbar\\\n/\n//\n!\n", "data.bin"),
    ],
)
def test_files_are_kept_as_git_keeps_them(tmp_path, tmp_path_factory, text, arrives):
    """Re-included folders and files, leading marks, spaces, brackets (E)."""
    folder = repository(tmp_path, root=text)

    names = shipped(folder, tmp_path_factory)

    assert names == kept_by_git(folder)
    assert arrives in names


def test_the_deepest_file_decides(tmp_path, tmp_path_factory):
    """Within one file, the last pattern decides."""
    folder = repository(
        tmp_path,
        root="*.bin\n*.log\n",
        src="!*.bin\n/pkg/b.py\n",
        keep="*\n!x.log\n!.gitignore\n",
        data="*\n",
    )

    assert shipped(folder, tmp_path_factory) == kept_by_git(folder)


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_what_git_tracks_is_shipped_although_a_pattern_names_it(tmp_path, tmp_path_factory, version):
    """``lib/`` of the usual templates, and code below it that was added by force (E)."""
    folder = repository(tmp_path, root="lib/\ndata/\n*.bin\n")
    git(folder, "-c", f"index.version={version}", "add", "--force", "lib/deep/more.py", "src/pkg/big.bin")
    if version == "3":
        git(folder, "-c", "index.version=3", "add", "--intent-to-add", "--force", "data/README.md")

    names = shipped(folder, tmp_path_factory)

    assert names == kept_by_git(folder)
    assert {"lib/deep/more.py", "src/pkg/big.bin"} <= set(names)
    assert "lib/code.py" not in names


def test_the_repository_s_own_exclusions_count(tmp_path, tmp_path_factory):
    """``.git/info/exclude``, before every other file (E)."""
    folder = repository(tmp_path, src="!big.bin\n")
    (folder / ".git/info/exclude").write_text("*.bin\n")

    assert shipped(folder, tmp_path_factory) == kept_by_git(folder)


def test_a_worktree_has_its_index_elsewhere(tmp_path, tmp_path_factory):
    """``.git`` is a file there (E)."""
    main = repository(tmp_path / "main", root="lib/\n")
    git(main, "add", "--force", "train.py", ".gitignore", "lib/code.py")
    git(main, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", "-m", "x")
    git(main, "worktree", "add", "--quiet", str(tmp_path / "other"))

    assert (
        shipped(tmp_path / "other", tmp_path_factory) == [".git", ".gitignore", "lib/code.py", "train.py"][1:]
    )


def test_a_link_in_place_of_an_ignore_file_is_not_read(tmp_path, tmp_path_factory):
    """Git behaves the same since 2.32 (E)."""
    folder = repository(tmp_path, files=[*FILES, "rules"])
    (folder / "rules").write_text("*\n")
    (folder / ".gitignore").symlink_to("rules")

    assert "train.py" in shipped(folder, tmp_path_factory)


def test_an_index_that_cannot_be_read_keeps_nothing_back(tmp_path, tmp_path_factory):
    """Then only the patterns count."""
    folder = repository(tmp_path, root="lib/\n")
    for data in (b"", b"DIRC", b"DIRC\0\0\0\2\0\0\0\5" + b"x" * 50, b"DIRC\0\0\0\4\0\0\0\1" + b"\xff" * 200):
        (folder / ".git/index").write_bytes(data)
        assert "lib/code.py" not in shipped(folder, tmp_path_factory)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map("".join), min_size=1, max_size=4)
)
def test_any_patterns_mean_what_git_means(tmp_path_factory, lines):
    """For patterns of any pieces (E)."""
    folder = repository(tmp_path_factory.mktemp("repository"), root="\n".join(lines))

    assert shipped(folder, tmp_path_factory) == kept_by_git(folder)


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        ("a*" * 20 + "b", "a" * 250 + "b", "a" * 250),
        ("**/x/" * 10 + "y", "x/" * 200 + "y", "x/" * 200 + "z"),
        ("[!x]*[a-c]*[[:digit:]]*", "ya1" + "\n\udcff", "xa1"),
        ("a b*?*.\\!*", "a bc.!", "a b.!"),
    ],
)
def test_patterns_of_many_stars_take_linear_time(pattern, hit, miss):
    """A matcher that backtracks would need years for the first (B1)."""
    found = parse(pattern.encode())

    assert found.verdict(hit, is_folder=False)
    assert found.verdict(miss, is_folder=False) is None


def test_a_line_of_a_megabyte_is_read_once():
    """Spaces at its end do not count, unless a backslash precedes them; a longer pattern is skipped (B1)."""
    lines = (
        " " * 500_000 + "x",
        "a\\  ",
        "b\\\\  ",
        "c" + " " * 500_000,
        "*a" * 250_000,
        "[" + "a" * 500_000,
    )
    found = parse("\n".join(lines).encode())

    assert found.verdict("a ", is_folder=False)
    assert found.verdict("a", is_folder=False) is None
    assert found.verdict("b\\", is_folder=False)
    assert found.verdict("c", is_folder=False)
