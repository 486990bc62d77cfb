"""Unit tests of host sampling: invented /proc and cgroup files, and a process of its own."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from envscaler_agent import host
from envscaler_agent.host import Cgroup, Host, fields_in, number_in, parse_net_dev
from envscaler_agent.process import family
from envscaler_agent.sampler import line

NET = b"""Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0
  eth1:  10 1 0 0 0 0 0 0  20 1 0 0 0 0 0 0
"""


def test_the_network_is_all_interfaces_but_loopback():
    """100 + 10 received, 200 + 20 sent."""
    assert parse_net_dev(NET) == (110, 220)
    assert parse_net_dev(b"") is None


@pytest.mark.parametrize(
    ("table", "folder"),
    [
        (b"0::/pod/c1\n", "pod/c1"),
        (b"0::/somewhere/on/the/host\n", ""),
        (b"9:name=systemd:/\n4:memory:/pod\n", "memory/pod"),
        (b"4:memory:/elsewhere\n", "memory"),
    ],
)
def test_a_cgroup_is_found_in_both_versions(tmp_path, table, folder):
    """Inside a container the path may be the host's: then the mount is the container's own."""
    for path in ("pod/c1", "memory/pod"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / folder / "memory.max").write_text("1000\n")

    got = Cgroup(1, root=tmp_path, table=table).file("memory.max", ("memory", "memory.max"))

    assert got == str(tmp_path / folder / "memory.max")


def test_a_cgroup_without_the_file_is_unknown(tmp_path):
    """No memory controller, no number."""
    assert Cgroup(1, root=tmp_path, table=b"0::/\n").file("memory.max", ("memory", "x")) is None


def test_small_files_are_numbers_or_fields(tmp_path):
    """``max`` is not a number, and neither is an absent file."""
    (tmp_path / "n").write_text("42\n")
    (tmp_path / "m").write_text("max\n")
    (tmp_path / "f").write_text("oom 3\noom_kill 2\nodd line here\n")

    assert number_in(str(tmp_path / "n")) == 42
    assert number_in(str(tmp_path / "m")) is None
    assert number_in(str(tmp_path / "absent")) is None
    assert fields_in(str(tmp_path / "f")) == {"oom": 3, "oom_kill": 2}


def memory(tmp_path, limit):
    """Write the memory files of a v2 cgroup."""
    for name, text in {
        "memory.max": limit,
        "memory.current": "1000\n",
        "memory.peak": "2000\n",
        "memory.stat": "anon 1\ninactive_file 300\n",
    }.items():
        (tmp_path / name).write_text(text)
    return host._MemoryFiles(Cgroup(1, root=tmp_path, table=b"0::/\n")).sample()


def test_memory_is_the_working_set_of_the_cgroup(tmp_path):
    """1000 in use, 300 of it reclaimable pages."""
    expected = {"memory_bytes": 700, "memory_peak_bytes": 2000, "memory_limit_bytes": 5000}

    assert memory(tmp_path, "5000\n") == expected


def test_a_working_set_that_cannot_be_told_is_unknown(tmp_path):
    """Without its statistics the usage may be all page cache: an unknown figure is better than that one."""
    memory(tmp_path, "5000\n")
    (tmp_path / "memory.stat").unlink()

    files = host._MemoryFiles(Cgroup(1, root=tmp_path, table=b"0::/\n"))

    assert files.sample() == {"memory_bytes": None, "memory_peak_bytes": 2000, "memory_limit_bytes": 5000}


def test_a_cgroup_without_a_limit_is_not_ours(tmp_path):
    """Its usage would be the whole machine's."""
    assert memory(tmp_path, "max\n") == {}
    assert memory(tmp_path, str(1 << 62)) == {}


def test_a_family_is_the_group_and_all_descendants():
    """5 is in the group of 2, 6 descends from it in a session of its own, 9 is unrelated."""
    tree = {1: (0, 1), 2: (1, 2), 5: (1, 2), 6: (5, 6), 7: (6, 6), 9: (1, 9)}

    assert family(2, tree) == [2, 5, 6, 7]


BURNS = """\
import sys, time
print("begins", flush=True)
sys.stdin.readline()
began = time.process_time()
while time.process_time() < began + 0.05:
    sum(range(10_000))
print("burnt", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc on this system")
def test_a_process_can_be_sampled():
    """Plausible numbers for a Python process that burns CPU between two samples."""
    process = subprocess.Popen(
        [sys.executable, "-c", BURNS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True,
    )  # fmt: skip
    with process:
        sampler = Host(process.pid)
        assert process.stdout.readline() == "begins\n"
        before = sampler.sample(0.0)
        process.stdin.write("\n")
        assert process.stdout.readline() == "burnt\n"
        after = sampler.sample(1.0)
        process.stdin.write("\n")

    used_s = after["cpu_seconds"] - before["cpu_seconds"]
    assert before["cpu_percent"] is None
    assert used_s >= 0.04  # the kernel counts hundredths of a second
    assert after["cpu_percent"] == pytest.approx(100 * used_s, abs=0.5)  # of one second
    assert after["processes"] == 1
    assert after["memory_rss_bytes"] > 1 << 20
    assert after["disk_free_bytes"] > 0


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc on this system")
def test_every_metric_is_in_the_table():
    """Users read the table in the docstring."""
    named = set(re.findall(r"``(\w+)``", host.__doc__))

    assert set(Host(os.getpid()).sample(0.0)) <= named


def test_a_process_that_is_gone_is_unknown():
    """The sampler invents no number for it."""
    got = Host(2**22 + 1).sample(0.0)

    assert got["cpu_seconds"] is None
    assert got["cpu_percent"] is None


def test_a_large_family_is_read_less_often(monkeypatch):
    """A hundred processes: every five seconds; in between the last numbers are repeated."""
    reads = []
    monkeypatch.setattr(host, "parents", lambda: dict.fromkeys(range(1, 101), (1, 1)))
    monkeypatch.setattr(host, "stat_fields", lambda pid: reads.append(pid) or [b"0"] * 30)
    sampler = Host(1)

    counts = []
    for now in range(10):
        sampler.sample(float(now))
        counts.append(len(reads))

    assert [after - before for before, after in pairwise(counts)] == [0, 0, 0, 0, 100, 0, 0, 0, 0]


def test_a_line_has_times_and_what_is_known():
    """Integers stay integers; unknown and invalid values are left out."""
    got = line({"a": 1.0, "b": 0.12345, "c": None, "d": float("nan")}, t=1.23456, at=5)

    assert got == b'{"t":1.235,"at":5,"a":1,"b":0.123}\n'
